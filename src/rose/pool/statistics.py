"""What became of a pool's turns and tokens, in counts.

Invariants: counts only grow; every token of a result with a label is counted under one version and one staleness, once, when its turn is
delivered; every attempt under one reason, every attempt that ended before its turn under one way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import attrs

from rose.policies.staleness import staleness
from rose.pool.turns import Attempt
from rose.types import FinishReason, HopEnd, RouteReason, TurnResult, WeightVersion


@attrs.frozen(kw_only=True)
class PoolStatistics:
    """Counts since the pool was made.

    Attributes:
        finished: Delivered turns by how they ended.
        failed: Turns that ended in an error, by its name, or were ``cancelled``.
        num_partial_tokens: Tokens that those had.
        attempts: Requests to engines by the reason of the choice.
        moves: Attempts that ended before their turn, by how.
        num_prompt_tokens: Prompt tokens of all attempts.
        reprefilled_tokens: Those of them that another engine had cached, by the reason of the choice.
        tokens_by_version: Tokens of delivered turns by the version that made them.
        tokens_by_staleness: The same tokens by how many versions the pool was ahead when they were delivered; those of another run
            are under -1.
        oldest_by_staleness: Delivered turns by the staleness of their oldest token.
    """

    finished: Mapping[FinishReason, int]
    failed: Mapping[str, int]
    num_partial_tokens: int
    attempts: Mapping[RouteReason, int]
    moves: Mapping[HopEnd, int]
    num_prompt_tokens: int
    reprefilled_tokens: Mapping[RouteReason, int]
    tokens_by_version: Mapping[WeightVersion, int]
    tokens_by_staleness: Mapping[int, int]
    oldest_by_staleness: Mapping[int, int]


class Recorder:
    """Counts as things happen."""

    def __init__(self) -> None:
        self._finished: Counter[FinishReason] = Counter()
        self._failed: Counter[str] = Counter()
        self._num_partial_tokens = 0
        self._attempts: Counter[RouteReason] = Counter()
        self._moves: Counter[HopEnd] = Counter()
        self._num_prompt_tokens = 0
        self._reprefilled: Counter[RouteReason] = Counter()
        self._by_version: Counter[WeightVersion] = Counter()
        self._by_staleness: Counter[int] = Counter()
        self._oldest: Counter[int] = Counter()

    def assigned(self, attempt: Attempt) -> None:
        """Note a request to an engine."""
        record = attempt.record
        self._attempts[attempt.reason] += 1
        num_prompt_tokens = record.num_prompt_tokens
        self._num_prompt_tokens += num_prompt_tokens
        if record.hops:
            has_prefix, num_cached_tokens = record.hops[-1].engine_id == attempt.engine_id, num_prompt_tokens
        else:
            has_prefix, num_cached_tokens = record.affinity == attempt.engine_id, record.progress.num_context_tokens
        if not has_prefix and num_cached_tokens:
            self._reprefilled[attempt.reason] += min(num_cached_tokens, num_prompt_tokens)

    def moved(self, ended: HopEnd) -> None:
        """Note an attempt that ended before its turn."""
        self._moves[ended] += 1

    def finished(self, result: TurnResult, latest: WeightVersion | None) -> None:
        """Note a delivered turn, while the pool is at ``latest``."""
        self._finished[result.finish_reason] += 1
        found: list[int] = []
        for span in result.versions:
            ahead = staleness(span.version, latest)
            found.append(int(ahead) if ahead < float("inf") else -1)
            self._by_version[span.version] += span.end - span.start
            self._by_staleness[found[-1]] += span.end - span.start
        if found:
            self._oldest[-1 if -1 in found else max(found)] += 1

    def failed(self, name: str, num_tokens: int) -> None:
        """Note a turn that ended without a result."""
        self._failed[name] += 1
        self._num_partial_tokens += num_tokens

    def read(self) -> PoolStatistics:
        """Return the counts, as copies."""
        return PoolStatistics(
            finished=dict(self._finished),
            failed=dict(self._failed),
            num_partial_tokens=self._num_partial_tokens,
            attempts=dict(self._attempts),
            moves=dict(self._moves),
            num_prompt_tokens=self._num_prompt_tokens,
            reprefilled_tokens=dict(self._reprefilled),
            tokens_by_version=dict(self._by_version),
            tokens_by_staleness=dict(self._by_staleness),
            oldest_by_staleness=dict(self._oldest),
        )
