"""What the budget decides, against the best decision found by trying all, and in modelled time over whole texts."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Many

import pytest
import torch
from drafting import sequence, walk

from specdec.draft.base import Drafter
from specdec.draft.budget import Budget
from specdec.draft.merge import Merge
from specdec.metrics.stats import Stats
from specdec.runner.cost import Costs
from specdec.tree import chain
from specdec.types import ROOT, Draft, Forward, Sequence, Span, Step, Tree, Verdict

CURVES = {
    "free": lambda rows: 4.0,
    "3 %": lambda rows: 4.0 + 0.12 * (rows - 1),
    "10 %": lambda rows: 4.0 + 0.4 * (rows - 1),
    "20 %": lambda rows: 4.0 + 0.8 * (rows - 1),
    "as dear as a pass": lambda rows: 4.0 * rows,
    "steps of four rows": lambda rows: 4.0 + 1.0 * ((rows - 1) // 4),
    "a cliff at six rows": lambda rows: 4.0 if rows < 6 else 9.0,
}


def costs_of(curve: Callable[[int], float], n: int = 64) -> Costs:
    return Costs({rows: curve(rows) for rows in range(1, n + 1)}, fixed=True)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class Scripted(Drafter):
    """Proposes what a function of the sequence and the limit says; asking takes ``seconds``."""

    def __init__(self, script: Callable[[Sequence, int], Draft], clock: Clock, seconds: float = 0.0, name: str = "script"):
        self.name, self._script, self._clock, self._seconds = name, script, clock, seconds
        self.asked = 0

    def propose(self, sequences: Many[Sequence], budgets: Many[int]) -> list[Draft]:
        self._clock.now += self._seconds * len(sequences)
        self.asked += len(sequences)
        return [self._script(s, n) for s, n in zip(sequences, budgets, strict=True)]


def draft_of(parents: Many[int], estimates: Many[float] = (), name: str = "script") -> Draft:
    return Draft(Tree(tuple(range(len(parents))), tuple(parents)), (name,) * len(parents), estimates=tuple(estimates))


def budget_of(curve: Callable[[int], float], script: Callable[[Sequence, int], Draft], seconds: float = 0.0) -> Budget:
    clock = Clock()
    return Budget(Scripted(script, clock, seconds), costs_of(curve), Stats(), clock)


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
@pytest.mark.parametrize("a", [0.05, 0.3, 0.6, 0.9, 0.99])
def test_the_length_of_a_chain_is_the_analytic_argmax(curve: Callable[[int], float], a: float) -> None:
    """Constant acceptance a: k maximises (1 + a + ... + a^k) / (drafting + pass of k + 1 rows)."""
    for seconds in (0.0, 0.3, 2.0):
        estimates = [a ** (i + 1) for i in range(16)]
        budget = budget_of(curve, lambda s, n: draft_of(range(-1, 15), estimates), seconds)  # noqa: B023
        (draft,) = budget.propose([sequence([1])], [16], 1)
        rates = [sum(a**i for i in range(k + 1)) / (seconds + curve(k + 1)) for k in range(17)]
        assert rates[len(draft)] == pytest.approx(max(rates))
        assert draft.tree.parents == tuple(range(-1, len(draft) - 1))


@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_the_best_of_all_subtrees(curve: Callable[[int], float]) -> None:
    """Random trees of up to seven nodes: no subtree that contains its nodes' parents gives more tokens per second."""
    rng = random.Random(1)
    for _ in range(60):
        parents = [rng.randint(ROOT, i - 1) for i in range(rng.randint(1, 7))]
        estimates: list[float] = []
        for parent in parents:
            estimates.append(rng.choice([0.1, 0.4, 0.8, 1.0]) * (estimates[parent] if parent != ROOT else 1.0))
        budget = budget_of(curve, lambda s, n: draft_of(parents, estimates), 0.3)  # noqa: B023
        (draft,) = budget.propose([sequence([1])], [8], 1)
        best = 0.0
        for bits in itertools.product((False, True), repeat=len(parents)):
            if all(parents[i] == ROOT or bits[parents[i]] for i in range(len(parents)) if bits[i]):
                tokens = 1 + sum(e for e, bit in zip(estimates, bits, strict=True) if bit)
                best = max(best, tokens / (0.3 + curve(1 + sum(bits))))
        assert (1 + sum(draft.estimates)) / (0.3 + curve(1 + len(draft))) == pytest.approx(best)


def test_a_batch_shares_its_rows() -> None:
    """Nodes of all sequences compete for the same pass. A prompt that is read beside them makes it longer and rows perhaps
    dearer, but its time is not theirs: it does not let nodes of little chance ride along."""
    estimates = {0: [0.9, 0.8, 0.7, 0.6], 1: [0.5, 0.2, 0.1, 0.05], 2: [0.95, 0.3, 0.1, 0.1]}
    rows = [sequence([1], number=i) for i in estimates]
    for curve, others in itertools.product(CURVES.values(), (0, 20)):
        budget = budget_of(curve, lambda s, n: draft_of([-1, 0, 1, 2], estimates[s.id]))
        drafts = budget.propose(rows, [4] * 3, 3 + others)
        prompt = curve(3 + others) - curve(3)

        def rate(tokens: float, nodes: int) -> float:
            return (3 + tokens) / (curve(3 + others + nodes) - prompt)  # noqa: B023

        best, lengths = max(
            (rate(sum(sum(e[:k]) for e, k in zip(estimates.values(), ks, strict=True)), sum(ks)), ks)
            for ks in itertools.product(range(5), repeat=3)
        )
        got = rate(sum(sum(d.estimates) for d in drafts), sum(map(len, drafts)))
        assert got == pytest.approx(best), (lengths, [len(d) for d in drafts])


def test_a_wide_batch_drafts_nothing() -> None:
    """Where rows are free up to eight, a lone sequence verifies drafts; among 32 that fill the machine nobody does, though
    the same nodes are as likely."""
    estimates = [0.6, 0.36]
    for n, most in ((1, 2), (4, 4), (32, 0)):
        budget = budget_of(lambda rows: 4.0 + max(0, rows - 8), lambda s, n: draft_of([-1, 0], estimates), 0.01)
        rows = [sequence([1], number=i) for i in range(n)]
        assert sum(map(len, budget.propose(rows, [8] * n, n))) == most


def test_limits_are_kept_and_checked() -> None:
    """A drafter is not asked where no node is granted, and one that drafts more than granted is named."""
    budget = budget_of(CURVES["free"], lambda s, n: draft_of([-1, 0, 1]))
    assert len(budget.propose([sequence([1])], [0], 1)[0]) == 0
    with pytest.raises(RuntimeError, match="script drafted 3 nodes where 2 were granted"):
        budget.propose([sequence([1])], [2], 1)


def test_sampled_drafts_stay_whole() -> None:
    """Dropping a sampled node after a look at it would bias what acceptance by chance emits, so costs do not matter."""
    q = torch.full((3, 4), 0.25)
    draft = Draft(chain([1, 2, 3]), ("script",) * 3, q, (0.01, 0.001, 0.0001))
    budget = budget_of(CURVES["as dear as a pass"], lambda s, n: draft)
    assert budget.propose([sequence([1])], [3], 1) == [draft]


class Course:
    """Decodes a text with a budget in modelled time."""

    def __init__(self, text: Many[int], drafters: list[Scripted], clock: Clock, curve: Callable[[int], float], limit: int = 8):
        self.clock, self.curve, self.limit, self.text = clock, curve, limit, text
        self.budget = Budget(drafters[0] if len(drafters) == 1 else Merge(drafters), costs_of(curve), Stats(), clock)
        self.row = sequence([0], 1)
        self.passes: list[tuple[int, int]] = []  # tokens out before, nodes verified

    def run(self) -> Course:
        while (done := self.row.n_output) < len(self.text):
            limit = min(self.limit, len(self.text) - done - 1)
            (draft,) = self.budget.propose([self.row], [limit], 1)
            rest = self.text[done:]
            path = walk(draft.tree, rest[: len(rest) - 1])
            span = Span(self.row, len(self.row.tokens) - 1, len(self.row.tokens), draft)
            self.row.tokens += rest[: len(path) + 1]
            self.clock.now += self.curve(1 + len(draft))
            forward = Forward(torch.zeros(1 + len(draft), 4), (slice(0, 1 + len(draft)),))
            self.budget.observe(Step((span,)), forward, [Verdict(path, rest[len(path)])])
            self.budget.costs.follow(1 + len(draft), self.curve(1 + len(draft)))
            self.budget.follow(0.0)
            self.passes.append((done, len(draft)))
        return self

    @property
    def speed(self) -> float:
        """Modelled seconds of plain decoding over those that were taken."""
        return len(self.text) * self.curve(1) / self.clock.now


def right(text: Many[int], when: Callable[[int], bool], estimate: float | None = None) -> Callable[[Sequence, int], Draft]:
    """A chain that is right if ``when`` says so for the number of tokens out, else wrong from its first node."""

    def script(s: Sequence, n: int) -> Draft:
        tokens = [t if when(s.n_output) else t + 1000 for t in text[s.n_output : s.n_output + n]]
        estimates = () if estimate is None else tuple(estimate ** (i + 1) for i in range(len(tokens)))
        return Draft(chain(tokens), ("script",) * len(tokens), estimates=estimates)

    return script


@pytest.mark.parametrize("estimate", [None, 0.5, 0.95])
@pytest.mark.parametrize("curve", CURVES.values(), ids=CURVES)
def test_an_adversary_costs_less_than_three_percent(curve: Callable[[int], float], estimate: float | None) -> None:
    """Never right, sure of itself, 7.5 % of a pass for each ask: off is at most 3 % faster over 300 tokens."""
    text, clock = list(range(300)), Clock()
    course = Course(text, [Scripted(right(text, lambda n: False, estimate), clock, 0.3)], clock, curve).run()
    assert course.speed > 0.97


@pytest.mark.parametrize("estimate", [None, 0.5, 0.95])
@pytest.mark.parametrize("curve", [CURVES["free"], CURVES["3 %"], CURVES["10 %"], CURVES["20 %"]])
def test_a_drafter_that_turns_right_is_heard_again(curve: Callable[[int], float], estimate: float | None) -> None:
    """Wrong for 300 tokens, right from then on: within 40 passes bursts are as long as they are for an oracle."""
    text, clock = list(range(1000)), Clock()
    script = right(text, lambda n: n >= 300, estimate)
    course = Course(text, [Scripted(script, clock, 0.3)], clock, curve).run()
    late = [nodes for done, nodes in course.passes if done >= 300]
    assert late[40:50] == [8] * 10
    assert course.speed > 1.5


@pytest.mark.parametrize("estimate", [None, 0.7, 0.95])
@pytest.mark.parametrize("curve", [CURVES["free"], CURVES["3 %"], CURVES["10 %"], CURVES["20 %"]])
def test_an_oracle_is_used_to_its_full_depth(curve: Callable[[int], float], estimate: float | None) -> None:
    """Always right, whatever it says of itself: after a few passes every burst is as long as it may be."""
    text, clock = list(range(500)), Clock()
    course = Course(text, [Scripted(right(text, lambda n: True, estimate), clock, 0.3)], clock, curve, limit=16).run()
    assert [nodes for _, nodes in course.passes[16:24]] == [16] * 8


@pytest.mark.parametrize("share", [0.05, 0.2, 0.5, 0.8])
@pytest.mark.parametrize("curve", [curve for name, curve in CURVES.items() if name != "as dear as a pass"])
def test_never_slower_than_off_by_more_than_three_percent(curve: Callable[[int], float], share: float) -> None:
    """Drafts that are right in a share of the passes, at random, by a drafter whose estimates say nothing."""
    rng = random.Random(3)
    text, clock = list(range(600)), Clock()
    coins = [rng.random() < share for _ in text]
    course = Course(text, [Scripted(right(text, lambda n: coins[n], 0.6), clock, 0.3)], clock, curve).run()
    assert course.speed > 0.97


def test_a_useless_drafter_falls_silent_beside_a_useful_one() -> None:
    """Each is asked for its own merit."""
    text, clock = list(range(600)), Clock()
    good = Scripted(right(text, lambda n: True, 0.9), clock, 0.2, "script")
    bad = Scripted(lambda s, n: draft_of([-1] if n else [], [0.5] if n else [], "bad"), clock, 0.4, "bad")
    course = Course(text, [bad, good], clock, CURVES["10 %"]).run()
    assert good.asked > 0.9 * len(course.passes)
    assert bad.asked < 0.5 * len(course.passes)
    asked = course.row.stats.as_dict()["asked_by_drafter"]
    assert asked == {"script": good.asked, "bad": bad.asked}


def test_a_drafter_is_silent_only_where_others_have_drafted_well() -> None:
    """It is right where the first drafter has nothing, and never where that is sure: in the end it is asked there alone."""
    text, clock = list(range(2000)), Clock()
    asked: list[int] = []

    def other(row: Sequence, budget: int) -> Draft:
        n = row.n_output
        asked.append(n)
        found = n % 40 >= 20 and n < len(text)
        return Draft(chain([text[n] if found else 1 << 20]), ("other",), estimates=(0.9,))

    sure = right(text, lambda n: True, 0.9)
    first = Scripted(lambda row, n: sure(row, min(n, 3)) if row.n_output % 40 < 20 else Draft(), clock, 0.2)
    Course(text, [first, Scripted(other, clock, 1.0, "other")], clock, CURVES["10 %"]).run()
    late = [n % 40 for n in asked if n > 1000]
    assert sum(n >= 20 for n in late) > 5 * sum(n < 20 for n in late) > 0


def test_what_one_sequence_showed_helps_the_next() -> None:
    """A new sequence starts from the record of all: an adversary is not tried out anew each time."""
    text, clock = list(range(120)), Clock()
    adversary = Scripted(right(text, lambda n: False, 0.95), clock, 0.3)
    course = Course(text, [adversary], clock, CURVES["10 %"])
    asked = []
    for number in range(6):
        course.row = sequence([0], 1, number=number)
        before = adversary.asked
        course.run()
        course.budget.release(course.row)
        asked.append(adversary.asked - before)
    assert asked[-1] < asked[0]
    assert len(course.budget._chances) == 0, "what is known of a sequence ends with it"


def test_decisions_are_counted() -> None:
    """Proposed, verified, quiet and expected: in the sequence's counters and in those of all."""
    text, clock = list(range(200)), Clock()
    course = Course(text, [Scripted(right(text, lambda n: False, 0.9), clock, 0.3)], clock, CURVES["20 %"]).run()
    stats = course.row.stats
    verified = sum(nodes for _, nodes in course.passes)
    assert stats.proposed > verified
    assert stats.quiet_passes == len(course.passes) - course.row.stats.asked_by_drafter["script"] > 100
    assert len(course.passes) <= stats.expected < 1.2 * len(course.passes)


def test_reading_is_not_the_price_of_asking() -> None:
    """What a drafter takes to read a prompt comes once; a price that held it would silence a drafter that pays."""
    clock = Clock()

    class Reader(Scripted):
        def unread(self, sequence: Sequence) -> int:
            return 100 * (self.asked == 0)

        def read(self, sequences: Many[Sequence]) -> None:
            assert [s.id for s in sequences] == [0], "those that are asked for, and they alone"
            clock.now += 1000.0

    reader = Reader(lambda s, n: draft_of([-1], [0.9]), clock, 0.1)
    budget = Budget(reader, costs_of(CURVES["3 %"]), Stats(), clock)
    rows = [sequence([1], number=0), sequence([1], number=1)]
    for asked in range(1, 20):
        right = asked % 3 > 0
        drafts = budget.propose(rows, [4, 0], 2)
        assert [len(draft) for draft in drafts] == [1, 0]
        assert reader.asked == asked
        step = Step(tuple(Span(s, 0, 1, d) for s, d in zip(rows, drafts, strict=True)))
        forward = Forward(torch.zeros(3, 4), (slice(0, 2), slice(2, 3)))
        budget.observe(step, forward, [Verdict((0,), 1) if right else Verdict((), 1), Verdict((), 1)])


def test_where_chance_decides_a_drafter_is_asked_whatever_it_costs() -> None:
    """Prompts that are dear to read, and drafts that are never right: nothing is weighed, and nothing breaks."""

    class Reader(Scripted):
        read_of: int | None = None

        def unread(self, sequence: Sequence) -> int:
            return 0 if sequence.id == self.read_of else 1000

        def read(self, sequences: Many[Sequence]) -> None:
            (row,) = sequences
            self.read_of = row.id
            clock.now += 10.0

    clock = Clock()
    reader = Reader(lambda s, n: draft_of([-1]), clock, 1.0)
    budget = Budget(reader, costs_of(CURVES["free"]), Stats(), clock, by_chance=True)
    for number in range(100):
        row = sequence([1], number=number, room=20)
        (draft,) = budget.propose([row], [1], 1)
        assert len(draft) == 1
        step, forward = Step((Span(row, 0, 1, draft),)), Forward(torch.zeros(2, 4), (slice(0, 2),))
        budget.observe(step, forward, [Verdict((), 99)])
        budget.release(row)


def test_a_thrifty_drafter_watches_those_that_ask_and_a_few_others() -> None:
    """Of 32 sequences two may ask: they are always observed, of the others four in one pass of four, all in their turn."""
    seen: list[list[int]] = []

    class Thrifty(Scripted):
        thrifty = True

        def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
            seen.append([span.sequence.id for span in step])
            assert [rows.start for rows in forward.rows] == [starts[i] for i in seen[-1]], "each with its own rows"
            assert [verdict.token for verdict in verdicts if verdict] == seen[-1]
            clock.now += 0.001

    clock = Clock()
    budget = Budget(Thrifty(lambda s, n: draft_of([-1], [0.9]), clock, 0.1), costs_of(CURVES["3 %"]), Stats(), clock)
    rows = [sequence([1], number=i) for i in range(32)]
    for _ in range(40):
        drafts = budget.propose(rows, [4, *[0] * 20, 4, *[0] * 10], 32)
        ends = list(itertools.accumulate((1 + len(draft) for draft in drafts), initial=0))
        starts = ends[:-1]
        step = Step(tuple(Span(s, 0, 1, d) for s, d in zip(rows, drafts, strict=True)))
        forward = Forward(torch.zeros(ends[-1], 4), tuple(slice(a, b) for a, b in itertools.pairwise(ends)))
        budget.observe(step, forward, [Verdict((0,) if len(d) else (), s.id) for s, d in zip(rows, drafts, strict=True)])
    assert all(ids[0] == 0 and 21 in ids for ids in seen)
    assert [len(ids) for ids in seen] == [2, 2, 2, 6] * 10
    assert {i for ids in seen for i in ids} == set(range(32))


def test_a_drafter_that_holds_rows_observes_those_that_may_ask_it_and_forgets_the_others() -> None:
    """Of 16 sequences two are followed where it does not pay; each comes with its own hidden states, a prompt with all of them.
    As the others end, those that are left are followed."""
    seen: list[list[int]] = []
    forgotten: set[int] = set()

    class Holder(Scripted):
        holds = True
        taps = (3,)

        def observe(self, step: Step, forward: Forward, verdicts: Many[Verdict | None]) -> None:
            seen.append([span.sequence.id for span in step])
            assert forward.taps[3].squeeze(1).tolist() == [span.sequence.id for span in step for _ in range(span.n_rows)]
            assert [verdict and verdict.token for verdict in verdicts] == [s.sequence.id if s.stop == 1 else None for s in step]

        def release(self, sequence: Sequence) -> None:
            forgotten.add(sequence.id)

    clock = Clock()
    budget = Budget(
        Holder(lambda s, n: draft_of([-1], [0.9]), clock, 9.0), costs_of(CURVES["as dear as a pass"]), Stats(), clock
    )

    def run(decoding: range, prompt: int) -> None:
        rows = [sequence([1], number=i) for i in decoding]
        drafts = budget.propose(rows, [4] * len(rows), len(rows) + 3)
        spans = [Span(s, 0, 1, d) for s, d in zip(rows, drafts, strict=True)] + [Span(sequence([1] * 9, number=prompt), 0, 3)]
        ends = list(itertools.accumulate((1 + len(draft) for draft in drafts), initial=0))
        scored = [*itertools.starmap(slice, itertools.pairwise(ends)), slice(ends[-1], ends[-1])]
        owners = [[span.sequence.id] for span in spans for _ in range(span.n_rows)]
        forward = Forward(torch.zeros(ends[-1], 4), tuple(scored), taps={3: torch.tensor(owners)})
        budget.observe(Step(tuple(spans)), forward, [*(Verdict((), s.id) for s in rows), None])

    for _ in range(60):
        run(range(16), 24)
    assert seen[-1] == [0, 8, 24]
    assert forgotten == {i for i in range(16) if i % 8}
    run(range(1, 4), 25)
    assert seen[-1] == [1, 2, 3, 25]


@pytest.mark.parametrize(("curve", "verified"), [("free", True), ("10 %", False)])
def test_beside_prompts_that_never_end_a_node_must_be_worth_its_own_row(curve: str, verified: bool) -> None:
    """A busy server reads prompts in every pass: fewer passes save nothing there, so a node of chance 0.4 is dearer than what
    it brings, unless rows are free. When the prompts have been read it pays again."""
    budget = budget_of(CURVES[curve], lambda s, n: draft_of([-1], [0.4]))
    right = itertools.cycle([True, False, False, True, False])
    row, prompt = sequence([1]), sequence([1] * 4000, number=1)

    def step(reads: bool) -> int:
        (draft,) = budget.propose([row], [4], 1 + 20 * reads)
        spans = (Span(row, 0, 1, draft), *[Span(prompt, 0, 20)] * reads)
        n = 1 + len(draft)
        forward = Forward(torch.zeros(n, 4), (slice(0, n), *[slice(n, n)] * reads))
        taken, hit = len(draft), next(right)  # the node's token is 0, and so is the next one of the text where it is right
        verdict = Verdict((0,), 5) if hit and taken else Verdict((), 1 - hit)
        budget.observe(Step(spans), forward, [verdict, *[None] * reads])
        return taken

    assert step(reads=False) == 1
    busy = [step(reads=True) for _ in range(200)]
    assert bool(busy[-1]) is verified
    assert 1 in [step(reads=False) for _ in range(200)][-50:]


def test_a_new_sequence_waits_where_a_drafter_did_not_pay_for_others() -> None:
    """The first ask of a sequence comes at once while nothing is known, and after some passes once the drafter is known to
    cost more than it saves."""
    text, clock = list(range(60)), Clock()
    wrong = right(text, lambda n: False, 0.95)
    asked: list[tuple[int, int]] = []

    def noting(s: Sequence, n: int) -> Draft:
        asked.append((s.id, s.n_output))
        return wrong(s, n)

    course = Course(text, [Scripted(noting, clock, 0.3)], clock, CURVES["as dear as a pass"])
    for number in range(8):
        course.row = sequence([0], 1, number=number)
        course.run()
        course.budget.release(course.row)
    firsts = [next(done for i, done in asked if i == number) for number in range(8)]
    assert firsts[0] == 0
    assert firsts[-1] == 3
