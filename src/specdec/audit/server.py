"""An audit from outside: does a server's answer depend on anything but the request?

Any server with OpenAI's routes is asked the same things again, alone and under a load of the audit's own making, whole and
streamed; a specdec server also with speculation off and on, request by request; and two servers can be held against each
other. Requests are few and bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from specdec.audit.client import Question, Refused, Reply, Server
from specdec.audit.report import Check, Report
from specdec.audit.session import Clock
from specdec.bench import prompts as texts
from specdec.bench.provenance import provenance
from specdec.config import ConfigError

TIMES = 3
"""How often a question is asked again, alone."""

AT_ONCE = 8
"""Requests in flight under load."""

ROUNDS = 2
"""How often all questions are asked at once."""

LIMITS = (
    "What this shows: a difference is real, and means that the answer depends on more than the request (on load, on the call, "
    "on speculation). No difference in {n} comparisons leaves room for rare ones: at 95 % confidence fewer than {share:.1%} "
    "of such answers differ. Seen from outside, speculation cannot be told from other causes unless two servers differ in "
    "nothing else. Where the gap between the two likeliest tokens is small (below about 0.05), rounding is the likely cause; "
    "where it is large, a fault is."
)

NO_TEETH = (
    "An audit from outside cannot break the server on purpose, so it does not show what it would have noticed: for that, run "
    "specdec audit on the model itself."
)


def audit(
    server: Server, other: Server | None, minutes: float, max_tokens: int, told: Callable[[str, Check | None], None]
) -> Report:
    """Audit a server, or two against each other.

    Args:
        max_tokens: most tokens of an answer.
        told: hears of every part that begins (without a check) and of every check that ends.

    Raises:
        ConfigError: a server does not answer, or takes none of the questions.
    """
    clock = Clock(minutes)
    run = _Run(server, clock, questions(server.ours, max_tokens))
    required = ("repetition", "load", *(("speculation", "streaming") if server.ours else ()), *(("against",) if other else ()))
    subject: dict[str, Any] = {"kind": "server", "server": server.url, "model": server.model}
    subject |= {"drafters": server.drafters} if server.ours else {}
    subject |= {"against": other.url} if other else {}
    report = Report(subject, provenance(), {"minutes": minutes, "max_tokens": max_tokens}, required)

    def add(part: str, checks: Iterator[Check]) -> None:
        told(part, None)
        for check in checks:
            report.checks.append(check)
            told(part, check)

    add("repetition", run.repetition())
    if other:
        add("against", run.against(other))
    if server.ours:
        add("speculation", run.speculation())
    add("load", run.load())
    add("streaming", run.streaming())
    n = run.compared
    report.notes += [LIMITS.format(n=n, share=min(1.0, 3 / n)), NO_TEETH] if n else [NO_TEETH]
    return report


def questions(ours: bool, max_tokens: int) -> list[Question]:
    """Greedy and seeded ones, on prompts that ship; for a specdec server on both routes, with every kind of parameter."""
    prompts = [p.request for p in texts.load(texts.DEFAULT) if isinstance(p.request, str)]
    prompts = sorted(prompts, key=len)[:6]
    greedy = {"temperature": 0, "max_tokens": max_tokens}
    seeded = {"temperature": 1, "seed": 7, "max_tokens": max_tokens}
    made = [
        *(_chat(f"greedy {i + 1}", prompt, greedy) for i, prompt in enumerate(prompts[:4])),
        *(_chat(f"seeded {i + 1}", prompt, seeded) for i, prompt in enumerate(prompts[4:6])),
    ]
    if not ours:
        return made
    told = {"return_token_ids": True, "stats": True}
    more = [
        _text("greedy text", prompts[1], {**greedy, "logprobs": 2, **told}),
        _text("penalties", prompts[2], {**seeded, "frequency_penalty": 1.1, "presence_penalty": 0.4, "top_k": 40, **told}),
        _text("filters", prompts[3], {**seeded, "top_p": 0.9, "min_p": 0.02, "temperature": 0.8, **told}),
        _text("stop and min_tokens", prompts[0], {**greedy, "stop": [".", "\n"], "min_tokens": max_tokens // 2, **told}),
        _text("logit bias", prompts[2], {**greedy, "logit_bias": {"13": -5.0, "28": 2.0}, "repetition_penalty": 1.2, **told}),
    ]
    return [*(question.with_fields(**told) for question in made), *more]


def _chat(label: str, prompt: str, fields: dict[str, Any]) -> Question:
    content = {"messages": [{"role": "user", "content": prompt}], "logprobs": True, "top_logprobs": 2}
    return Question(label, "chat/completions", {**content, **fields})


def _text(label: str, prompt: str, fields: dict[str, Any]) -> Question:
    return Question(label, "completions", {"prompt": prompt, **fields})


class _Run:
    """The questions that a server takes, and its first answer to each, alone."""

    def __init__(self, server: Server, clock: Clock, asked: Many[Question]) -> None:
        self._server, self._clock, self._asked = server, clock, asked
        self._first: dict[str, Reply] = {}
        self._questions: list[Question] = []
        self.compared = 0
        """Answers that were compared with another."""

    def repetition(self) -> Iterator[Check]:
        """Every question a few times, alone; one whose seed is not kept is not asked again."""
        plain = {"speculation": "off"} if self._server.ours else {}
        refused: list[str] = []
        for question in self._asked:
            if self._late():
                yield _left_out("repetition", question.label)
                continue
            asked = self._accepted(question.with_fields(**plain), refused)
            if asked is None:
                yield Check("repetition", question.label, "left out", f"the server does not take it: {refused[-1]}")
                continue
            first, again = self._server.ask(asked), [self._server.ask(asked) for _ in range(TIMES - 1)]
            check = self._compared("repetition", question.label, first, again, f"asked {TIMES} times")
            if check.status == "failed" and "seed" in asked.body and not self._server.ours:
                summary = f"the seed is ignored or not kept to, so sampled answers cannot be compared: {check.summary}"
                yield Check("repetition", question.label, "measured", summary, details=check.details)
                continue
            self._questions.append(asked)
            self._first[question.label] = first
            yield check
        if not self._questions and refused and not self._late():
            raise ConfigError(f"{self._server.url} takes none of the audit's questions: {'; '.join(dict.fromkeys(refused))}")

    def load(self) -> Iterator[Check]:
        """All questions at once, a few times over; a specdec server drafts as it likes meanwhile."""
        found: dict[str, list[Reply]] = {question.label: [] for question in self._questions}
        crowd = [question.with_fields(speculation="auto") if self._server.ours else question for question in self._questions]
        rounds = 0
        with ThreadPoolExecutor(AT_ONCE) as pool:
            while rounds < ROUNDS and not self._late():
                rounds += 1
                for question, reply in zip(crowd * 2, pool.map(self._server.ask, crowd * 2), strict=True):
                    found[question.label].append(reply)
        for label, replies in found.items():
            if not replies:
                yield _left_out("load", label)
                continue
            yield self._compared(
                "load", label, self._first[label], replies, f"{len(replies)} times, {AT_ONCE} requests at once"
            )

    def speculation(self) -> Iterator[Check]:
        """Off, against every drafter and width that a request can ask for."""
        modes: list[tuple[str, Any]] = [
            ("auto", "auto"),
            ("one token", {"max_tokens": 1}),
            *((name, {"drafter": name}) for name in self._server.drafters if len(self._server.drafters) > 1),
        ]
        for question in self._questions:
            if self._late():
                yield _left_out("speculation", question.label)
                continue
            replies = [self._server.ask(question.with_fields(speculation=choice)) for _, choice in modes]
            drafted = sum(source is not None for reply in replies for source in reply.sources)
            told = f"{', '.join(name for name, _ in modes)} against off; {drafted} tokens came from drafts"
            yield self._compared("speculation", question.label, self._first[question.label], replies, told)

    def streaming(self) -> Iterator[Check]:
        """Streams, put together, against whole answers."""
        for question in self._questions:
            if self._late():
                yield _left_out("streaming", question.label)
                continue
            try:
                reply = self._server.stream(question)
            except Refused as error:
                yield Check("streaming", question.label, "left out", f"the server does not stream it: {error}")
                continue
            reply.n_tokens = self._first[question.label].n_tokens  # a stream tells it only where asked
            yield self._compared("streaming", question.label, self._first[question.label], [reply], "streamed and whole")

    def against(self, other: Server) -> Iterator[Check]:
        """The same questions to another server; seeds are understood alike only where both are specdec."""
        both = self._server.ours and other.ours
        for question in self._questions:
            if question.body["temperature"] and not both:
                reason = "a seed means other random numbers to another program"
                yield Check("against", question.label, "left out", reason)
                continue
            if self._late():
                yield _left_out("against", question.label)
                continue
            try:
                reply = other.ask(question if other.ours else _without_ours(question))
            except Refused as error:
                yield Check("against", question.label, "left out", f"{other.url} does not take it: {error}")
                continue
            yield self._compared(
                "against", question.label, self._first[question.label], [reply], f"{other.url}", text_only=True
            )

    def _accepted(self, question: Question, refused: list[str]) -> Question | None:
        """The question as the server takes it: without log-probabilities where it gives none."""
        bare = question.with_fields(**dict.fromkeys(("logprobs", "top_logprobs")))
        for form in (question, Question(question.label, question.route, {k: v for k, v in bare.body.items() if v is not None})):
            try:
                self._server.ask(form.with_fields(max_tokens=max(1, form.body.get("min_tokens", 0))))
            except Refused as error:
                refused.append(str(error))
            else:
                return form
        return None

    def _compared(
        self, section: str, label: str, first: Reply, replies: Many[Reply], how: str, *, text_only: bool = False
    ) -> Check:
        self.compared += len(replies)
        found = [
            told for reply in replies if (told := difference(first, reply, everything=self._server.ours and not text_only))
        ]
        moved = max((_moved(first, reply) for reply in replies), default=0.0)
        details: dict[str, Any] = {"compared": len(replies), "differing": len(found), "logprobs_moved": moved}
        if found:
            summary = f"{len(found)} of {len(replies)} answers differ ({how}): {found[0]['summary']}"
            return Check(section, label, "failed", summary, details={**details, "differences": found[:3]})
        drift = f"; log-probabilities moved by up to {moved:.1e}" if moved else ""
        return Check(section, label, "passed", f"the same answer ({how}){drift}", details=details)

    def _late(self) -> bool:
        return self._clock.left <= 0


def _left_out(section: str, label: str) -> Check:
    return Check(section, label, "left out", "no time was left")


def _without_ours(question: Question) -> Question:
    """Without the fields that only specdec knows."""
    ours = ("speculation", "return_token_ids", "stats")
    return Question(question.label, question.route, {k: v for k, v in question.body.items() if k not in ours})


def difference(a: Reply, b: Reply, *, everything: bool) -> dict[str, Any] | None:
    """Where two answers to one question part; None where they do not.

    Args:
        everything: ids, log-probabilities and counts must be the same too, and not only what a reader sees.
    """
    if a.text == b.text and a.finish_reason == b.finish_reason:
        if not everything:
            return None
        for what in ("token_ids", "logprobs", "n_tokens"):
            if getattr(a, what) != getattr(b, what):
                return {"what": what, "summary": f"the same text with other {what.replace('_', ' ')}"}
        return None
    at = next((i for i, (x, y) in enumerate(zip(a.text, b.text, strict=False)) if x != y), min(len(a.text), len(b.text)))
    told: dict[str, Any] = {"what": "text", "character": at, "a": a.text[at : at + 40], "b": b.text[at : at + 40]}
    token = next((i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=False)) if x != y), None)
    gap = a.gaps[token] if token is not None else None
    told |= {"token": token, "gap": gap, "finish_reasons": [a.finish_reason, b.finish_reason]}
    place = f"from character {at} on" if token is None else f"from token {token} on"
    tie = "" if gap is None else f", where the two likeliest tokens lie {gap:.3f} apart"
    if a.text == b.text:
        return {**told, "what": "finish reason", "summary": f"finish reason {a.finish_reason} and {b.finish_reason}"}
    return {**told, "summary": f"{place}{tie}: {told['a']!r} and {told['b']!r}"}


def _moved(a: Reply, b: Reply) -> float:
    """The largest change of a log-probability before the tokens part."""
    largest = 0.0
    for x, y, p, q in zip(a.tokens, b.tokens, a.logprobs, b.logprobs, strict=False):
        if x != y:
            break
        largest = max(largest, abs(p - q))
    return largest
