"""The end of a step: what was decided becomes text, and everything else is as if the rejected tokens had never been."""

from __future__ import annotations

from specdec.kv.pool import Pool
from specdec.kv.prefix import PrefixCache
from specdec.metrics.stats import Stats
from specdec.sampling import SamplingError
from specdec.tree import depths
from specdec.types import Delta, FinishReason, Sequence, Span, Verdict


class Committer:
    """Appends verdicts to sequences and rolls the cache back to what was accepted.

    Args:
        pool: where the accepted path is moved to.
        cache: is told of blocks that are full of committed tokens; None: there is none.
        stats: counters over all sequences.
    """

    def __init__(self, pool: Pool, cache: PrefixCache | None, stats: Stats) -> None:
        self._pool, self._cache, self._stats = pool, cache, stats

    def commit(self, span: Span, verdict: Verdict | SamplingError | None) -> Delta | None:
        """Append what was decided, token by token, up to the first that ends the sequence; then roll the cache back to it."""
        sequence, tree = span.sequence, span.draft.tree
        complete = span.complete
        if read := span.stop - span.start - complete:
            for stats in (self._stats, sequence.stats):
                stats.prompt_rows += read
                stats.prefill_passes += not complete
        if verdict is None:
            sequence.n_cached = span.stop
            if self._cache:
                self._cache.enter(sequence)
            return None
        if isinstance(verdict, SamplingError):
            return Delta(sequence.id, (), (), finish_reason="error", error=str(verdict), stats=sequence.stats)

        if not sequence.n_output:  # the prompt has just been read to its end
            sequence.stats.prompt_tokens = sequence.n_prompt
            self._stats.prompt_tokens += sequence.n_prompt
            self._stats.cached_tokens += sequence.stats.cached_tokens
        reason: FinishReason | None = None
        emitted = [*[tree.tokens[node] for node in verdict.path], verdict.token]
        for count, token in enumerate(emitted, start=1):
            sequence.tokens.append(token)
            sequence.history.append(token)
            if reason := self.ending(sequence, token):
                emitted = emitted[:count]
                break
        path = verdict.path[: len(emitted)]
        if path:
            sources, targets = [span.stop + node for node in path], list(range(span.stop, span.stop + len(path)))
            self._pool.move(sequence.table.blocks, sources, targets)
        # The last emitted token is pending, unless the sequence ended on a drafted one, whose row is then not needed.
        sequence.n_cached = len(sequence.tokens) - 1
        sequence.table.truncate(sequence.n_cached)
        if self._cache:
            self._cache.enter(sequence)
        depth = depths(tree)
        for stats in (self._stats, sequence.stats):
            stats.record_burst(span.draft, depth, path, len(emitted))
        first = sequence.n_output == len(emitted)
        return Delta(
            sequence.id,
            tuple(emitted),
            tuple([*[span.draft.sources[node] for node in path], None][: len(emitted)]),
            verdict.logprobs and verdict.logprobs[: len(emitted)],
            tuple(sequence.prompt_logprobs) if first and sequence.params.prompt_logprobs is not None else None,
            reason,
            stats=sequence.stats if reason else None,
        )

    @staticmethod
    def ending(sequence: Sequence, token: int) -> FinishReason | None:
        """Does this token, just committed, end the sequence?"""
        if token in sequence.end_tokens or (sequence.stopper and sequence.stopper.feed(token)):
            return "stop"
        return "length" if sequence.room == 0 else None
