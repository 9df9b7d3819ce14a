"""The step loop: schedule, draft, forward, verify, commit. Token ids in, Deltas out; it knows no text.

Plain decoding is the empty draft. What a drafter proposes decides how many tokens a pass emits and, unless another rule of
acceptance than the coupled one was chosen, never which.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence as Many
from dataclasses import dataclass

from specdec import attention, draft
from specdec.acceptance import Acceptance
from specdec.commit import Committer
from specdec.config import AUTO, BLOCK_SIZE, ConfigError, EngineConfig, SamplingParams
from specdec.draft.base import Drafter, Target
from specdec.draft.budget import Budget
from specdec.draft.merge import Merge
from specdec.history import History
from specdec.kernels.base import Kernels
from specdec.kv import codec
from specdec.kv.blocks import BlockAllocator, BlockTable, blocks_for
from specdec.kv.pool import Pool
from specdec.kv.prefix import PrefixCache
from specdec.metrics.speedup import Pass, Recent, plain
from specdec.metrics.stats import Stats
from specdec.models.base import Model
from specdec.request import Limits, RequestError
from specdec.runner.compiled import make_runner
from specdec.runner.cost import Costs
from specdec.runner.invariance import Invariance, check_invariance
from specdec.runner.measure import pass_costs
from specdec.scheduler import Grant, Scheduler
from specdec.types import NO_DRAFT, Delta, Draft, Sequence, Span, Speculation, Step, Stopper, Times, Verdict
from specdec.verify import RULES, Rule

__all__ = ["Counts", "Engine", "RequestError"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Counts:
    """How many sequences and blocks are in which state."""

    running: int
    waiting: int
    blocks: int
    """All that the pool has."""
    blocks_used: int
    """Held by sequences."""
    blocks_cached: int
    """Held by nobody, but with a prefix that later sequences may go on from; they are free to be taken."""


class Engine:
    """Runs several sequences at once, each with its own parameters.

    Args:
        model: the target.
        kernels: its arithmetic, used by the sampler too.
        config: limits and speculation.
        drafter: used instead of the one that ``config.speculation`` names.
        rule: used instead of the one that ``config.speculation`` names.

    Raises:
        ConfigError: the context is shorter than ``max_len``, the pool cannot hold the longest sequence or does not fit into
            memory, its heads do not fit the format of keys and values, or the rule would not be exact with these drafters.
    """

    def __init__(
        self,
        model: Model,
        kernels: Kernels,
        config: EngineConfig,
        drafter: Drafter | None = None,
        rule: Rule | None = None,
    ) -> None:
        shape, speculation = model.shape, config.speculation
        if config.max_len is not None and config.max_len > shape.context:
            raise ConfigError(f"max_len must be at most the model's context of {shape.context} tokens, got {config.max_len}")
        self.max_len = config.max_len or shape.context
        longest = blocks_for(self.max_len)
        n_blocks = config.kv_tokens // BLOCK_SIZE if config.kv_tokens else max(longest, min(4 * longest, 32_768 // BLOCK_SIZE))
        if longest > n_blocks:
            raise ConfigError(
                f"a pool of {config.kv_tokens} tokens ({n_blocks} whole blocks of {BLOCK_SIZE}) cannot hold a sequence of "
                f"{self.max_len}, which needs {longest} blocks: raise kv_tokens or lower max_len"
            )
        if config.kv_format != AUTO:
            model = model.holding(codec.DTYPES[config.kv_format])
        self.model = model
        self.pool = Pool(shape.n_layers, n_blocks, shape.n_kv_heads, shape.head_dim, model.kv_dtype, model.device)
        self.allocator = BlockAllocator(self.pool.n_blocks)
        rule = rule or RULES[speculation.acceptance]
        self.drafter = drafter or draft.build(speculation, Target(model, kernels, self.pool.n_blocks), rule.siblings)
        self.acceptance = Acceptance(rule, self.drafters, kernels)
        self.cache = PrefixCache(self.allocator) if config.prefix_cache else None
        self.scheduler = Scheduler(
            self.allocator,
            max_sequences=config.max_sequences,
            prompt_rows=self._prompt_rows,
            max_nodes=speculation.max_nodes if self.drafter else 0,
            cache=self.cache,
        )
        self._limits = Limits(
            shape.vocab_size,
            self.max_len,
            tuple(part.name for part in self.drafters),
            frozenset(part.name for part in self.drafters if part.prediction),
        )
        self.stats = Stats(**self.acceptance.facts)
        self.recent = Recent()
        self._committer = Committer(self.pool, self.cache, self.stats)
        self._config = config
        self._runner = make_runner(model, attention.select(self.pool, kernels), self.drafter.taps if self.drafter else ())
        self._ids = itertools.count()
        self._sequences: dict[int, Sequence] = {}
        self.invariance: Invariance | None = check_invariance(model, kernels) if config.self_test else None
        if self.invariance and not self.invariance.exact:
            _log.warning("%s", self.invariance.describe())
        given, widest = config.pass_seconds, config.max_sequences + speculation.max_nodes
        self.costs = Costs(given, fixed=True) if given else pass_costs(model, kernels, widest)
        self.budget = self._make_budget(self.drafter) if self.drafter else None

    @property
    def drafters(self) -> tuple[Drafter, ...]:
        """Those that run, best first."""
        if self.drafter is None:
            return ()
        return self.drafter.drafters if isinstance(self.drafter, Merge) else (self.drafter,)

    @property
    def has_work(self) -> bool:
        return bool(self._sequences)

    def add(
        self,
        prompt: Many[int],
        params: SamplingParams,
        end_tokens: frozenset[int],
        seed: int,
        stopper: Stopper | None = None,
        *,
        salt: str = "",
        speculation: Speculation | None = None,
        times: Times | None = None,
    ) -> int:
        """Queue a sequence.

        Args:
            prompt: token ids.
            params: how to sample; ``stop`` strings need a ``stopper`` and ``bad_words`` must already be ids.
            end_tokens: the model's own end tokens; ``params.ignore_eos`` disregards them.
            seed: owner of all randomness of this sequence.
            stopper: sees each committed token and may end the sequence.
            salt: only sequences of the same salt share cached blocks.
            speculation: which drafters may be asked, for how many tokens, and what the output may resemble.
            times: to be filled in, for whoever wants to know them while the sequence runs.

        Returns:
            The id that its deltas carry.

        Raises:
            RequestError: the request cannot be served as it stands.
        """
        speculation = speculation or Speculation()
        self._limits.check(prompt, params, stopper is not None, speculation)
        self.acceptance.check(params)
        tokens = list(prompt)
        limit = self.max_len if params.max_tokens is None else min(self.max_len, len(tokens) + params.max_tokens)
        # A tokenizer may name end tokens that the model has no row for; those cannot come out.
        own = frozenset() if params.ignore_eos else frozenset(token for token in end_tokens if token < self._limits.vocab_size)
        sequence = Sequence(
            id=next(self._ids),
            tokens=tokens,
            n_prompt=len(tokens),
            params=params,
            seed=seed,
            max_len=limit,
            end_tokens=own | frozenset(params.stop_token_ids),
            table=BlockTable(self.allocator),
            history=History.of(tokens, len(tokens)),
            stats=Stats(**self.acceptance.facts),
            stopper=stopper,
            salt=salt,
            speculation=speculation,
            times=times or Times(),
        )
        sequence.times.added = time.perf_counter()
        self._sequences[sequence.id] = sequence
        self.scheduler.add(sequence)
        return sequence.id

    def abort(self, sequence_id: int) -> None:
        """End a sequence now and free what it holds; an unknown id is ignored, since it may just have ended."""
        if sequence := self._sequences.get(sequence_id):
            self._release(sequence)

    def preempt(self) -> None:
        """Preempt the youngest running sequence, if there is one, as a full pool would: audits see so that it does no harm."""
        if self.scheduler.running:
            self.scheduler.preempt().stats.preemptions += 1
            self.stats.preemptions += 1

    def step(self) -> list[Delta]:
        """One pass over the model for the sequences whose turn it is.

        Returns:
            What became of each sequence that emitted tokens or ended.
        """
        started = time.perf_counter()
        grants, preempted = self.scheduler.next()
        for sequence in preempted:
            sequence.stats.preemptions += 1
            self.stats.preemptions += 1
        if not grants:
            return []
        for grant in grants:
            if grant.sequence.times.begun is None:
                grant.sequence.times.begun = started
        n_running = len(self.scheduler.running)
        scheduled = time.perf_counter()
        step = self._draft(grants)
        drafted = time.perf_counter()
        forward = self._runner.forward(step)
        forwarded = time.perf_counter()
        verdicts = self.acceptance.judge(step, forward)
        judged = time.perf_counter()
        outcomes: list[Delta | None] = []
        due = drafted_rows = emitted = 0
        for span, verdict in zip(step.spans, verdicts, strict=True):
            delta = self._committer.commit(span, verdict)
            outcomes.append(delta)
            due += verdict is not None
            drafted_rows += len(span.draft)
            emitted += len(delta.tokens) if delta else 0
        deltas = [delta for delta in outcomes if delta]
        committed = time.perf_counter()
        if self.budget:
            self.budget.observe(step, forward, [v if isinstance(v, Verdict) else None for v in verdicts])
        for delta in deltas:
            if delta.finish_reason:
                self._release(self._sequences[delta.sequence_id])
        ended = time.perf_counter()
        n_rows = step.n_rows
        self.costs.follow(n_rows, forwarded - drafted)
        if self.budget:
            self.budget.follow(ended - forwarded + scheduled - started)
        drafting = drafted - scheduled + ended - committed if self.budget else 0.0
        host = ended - started - drafting - (judged - drafted)
        self._record_seconds(
            step,
            outcomes,
            Pass(
                rows=n_rows,
                sequences=due,
                reading=n_running - due,
                drafted=drafted_rows,
                emitted=emitted,
                spent=(drafting, forwarded - drafted, judged - forwarded, host),
            ),
        )
        return deltas

    def _record_seconds(self, step: Step, outcomes: list[Delta | None], done: Pass) -> None:
        """Count what a pass took, and what its tokens would have taken with speculation off, for all and for each sequence."""
        other = plain(done, self.costs.seconds)
        whole = other.seconds(done.plain_passes)
        self.recent.add(done.seconds, whole, done.sequences, done.emitted)
        self.stats.add_pass(done.spent, whole)
        for span, delta in zip(step.spans, outcomes, strict=True):
            span.sequence.stats.add_pass(done.spent, other.seconds(len(delta.tokens) if delta else 1))

    def counts(self) -> Counts:
        """What is going on now, whether a step has run since something changed or not."""
        return Counts(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            blocks=self.allocator.n_blocks,
            blocks_used=self.allocator.n_used,
            blocks_cached=self.allocator.n_idle,
        )

    def forget(self) -> None:
        """Forget past requests: cached prefixes, what drafters and their budget learned; only between requests."""
        if self.budget:
            self.budget.clear()
        if self.cache:
            self.cache.clear()

    def check(self) -> None:
        """Raise AssertionError where blocks are held that no sequence accounts for, or counts disagree."""
        self.allocator.check([sequence.table for sequence in self._sequences.values()])
        if self.cache:
            self.cache.check()
        for sequence in self.scheduler.running:
            if not 0 <= sequence.n_cached < len(sequence.tokens) or sequence.n_cached > sequence.table.n_slots:
                raise AssertionError(f"sequence {sequence.id} has {sequence.n_cached} cached of {len(sequence.tokens)} tokens")

    def _make_budget(self, drafter: Drafter) -> Budget:
        return Budget(
            drafter,
            self.costs,
            self.stats,
            time.perf_counter,
            by_chance=self.acceptance.by_chance,
            chains=self.acceptance.rule.siblings == "one",
        )

    def _prompt_rows(self, n_decoding: int) -> int:
        """Prompt rows of a pass: as many as keep it within ``step_seconds`` if somebody waits for its next token."""
        most = self._config.prefill_rows
        if not n_decoding:
            return most
        return min(most, max(BLOCK_SIZE, self.costs.rows(self._config.step_seconds) - n_decoding))

    def _draft(self, grants: list[Grant]) -> Step:
        """Have drafts made where there is leave to verify them."""
        drafts: dict[int, Draft] = {}
        if self.budget:
            askers = [grant for grant in grants if grant.stop == len(grant.sequence.tokens)]
            rows = sum(grant.stop - grant.start for grant in grants)
            made = self.budget.propose([grant.sequence for grant in askers], [grant.nodes for grant in askers], rows)
            drafts = {grant.sequence.id: proposal for grant, proposal in zip(askers, made, strict=True)}
        return Step(tuple([Span(g.sequence, g.start, g.stop, drafts.get(g.sequence.id, NO_DRAFT)) for g in grants]))

    def _release(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        del self._sequences[sequence.id]
        if self.budget:
            self.budget.release(sequence)
