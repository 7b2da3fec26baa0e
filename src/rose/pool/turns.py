"""One turn across its attempts: what it has, what it still needs, how its pieces are joined.

Invariants:

* Every attempt has a fresh request id; a trajectory's id never reaches an engine.
* One budget: over all attempts a turn collects at most ``sampling.max_tokens`` tokens, or what the longest context of the engines
  leaves. The next attempt's prompt is the turn's prompt and every token so far, its ``max_tokens`` is the rest.
* ``logprobs`` is as long as ``token_ids``, each the log of a probability, or empty when not asked for. Spans cover labelled tokens in order, and
  neighbours of one version are one span.
* At most one attempt of a turn is open. A chunk of a closed attempt is discarded, whenever it comes.
* A turn is settled once: with one result or with one error.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import attrs

from rose.checks import shown
from rose.errors import EngineError
from rose.policies.routing import TurnView
from rose.policies.staleness import older
from rose.types import (
    EngineId,
    EngineRequest,
    Exactly,
    FinishReason,
    Hop,
    HopEnd,
    RequestId,
    RouteReason,
    TokenChunk,
    Turn,
    TurnResult,
    VersionConstraint,
    VersionSpan,
    WeightVersion,
)

if TYPE_CHECKING:
    from rose.pool.membership import Member
    from rose.pool.sources import TokenSource


_SEQUENCES, _INTEGERS, _NUMBERS = frozenset({tuple, list}), frozenset({int}), (float, int)
_FAILED = frozenset({HopEnd.LOST, HopEnd.REFUSED, HopEnd.STALLED})

Demand = tuple[VersionConstraint, bool, str | None, bool, bool]
"""What a turn asks of engines apart from room: versions, dedicated ones only, the run that it is pinned to if any, to begin, and
whether it waits for its version."""


@attrs.frozen(kw_only=True)
class Progress:
    """How far a trajectory was when its turn came.

    ``left_tokens``: what it is expected to make yet; ``num_context_tokens``: what its last engine may have kept of its prompt.
    """

    left_tokens: float = 0.0
    num_context_tokens: int = 0


@attrs.define(kw_only=True, eq=False)
class Attempt:
    """One request to one engine. ``is_open`` until it ended or the pool gave it up; ``is_started`` once it may be known there.

    ``version`` is what the engine's weights were when it was assigned.

    ``load_tokens``: the context of all the engine's turns and seats when this one came; ``num_fresh_tokens``: prompt tokens that the
    engine has to compute, as far as the pool knows. What is reserved for it there is given back as it was taken: ``kv_tokens``, which
    it may come to use, ``num_prompt_tokens`` and ``left_tokens`` (see ``Progress``).
    """

    record: TurnRecord
    member: Member
    request: EngineRequest
    reason: RouteReason
    number: int
    last_progress_s: float
    assigned_s: float = 0.0
    version: WeightVersion | None = None
    load_tokens: int = 0
    num_fresh_tokens: int = 0
    kv_tokens: int = 0
    num_prompt_tokens: int = 0
    left_tokens: float = 0.0
    num_tokens: int = 0
    is_open: bool = True
    is_started: bool = False

    @property
    def engine_id(self) -> EngineId:
        """Return the engine's id."""
        return self.member.engine_id


@attrs.define(kw_only=True, eq=False)
class TurnRecord:
    """A turn that is in the pool's hands. ``waiter`` belongs to the caller of the state core, ``source`` to its shell.

    It ``is_suspect`` once an engine failed it with an error that says as much about the request as about the engine. ``oldest`` is the
    oldest version of the tokens that the trajectory had before.
    """

    turn: Turn
    number: int
    order: tuple[int, int, int]
    arrived_s: float
    queued_s: float
    affinity: EngineId | None = None
    oldest: WeightVersion | None = None
    max_context_tokens: int | None = None
    waiter: Any = None
    source: TokenSource | None = None
    token_ids: list[int] = attrs.field(factory=list)
    logprobs: list[float] = attrs.field(factory=list)
    spans: list[VersionSpan] = attrs.field(factory=list)
    hops: list[Hop] = attrs.field(factory=list)
    attempt: Attempt | None = None
    progress: Progress = attrs.field(factory=Progress)
    avoid: set[EngineId] = attrs.field(factory=set)
    moved_by: HopEnd | None = None
    pinned: WeightVersion | None = None
    is_dedicated_only: bool = False
    is_suspect: bool = False
    last_error: str = ""

    @property
    def num_left_tokens(self) -> int:
        """Return what is left of the turn's token budget and of the context; at most 0 once there is no room."""
        left, limit = self.turn.sampling.max_tokens - len(self.token_ids), self.max_context_tokens
        return left if limit is None else min(left, limit - self.num_prompt_tokens)

    @property
    def num_busy(self) -> int:
        """Return how many attempts met a busy answer."""
        return sum(hop.ended is HopEnd.BUSY for hop in self.hops)

    @property
    def num_fruitless(self) -> int:
        """Return how many attempts gave no token, busy answers not counted."""
        return sum(hop.num_tokens == 0 and hop.ended is not HopEnd.BUSY for hop in self.hops)

    @property
    def num_fruitless_in_a_row(self) -> int:
        """Return how many attempts failed one after the other without a token, busy answers and evictions not counted."""
        count = 0
        for hop in reversed(self.hops):
            if hop.num_tokens or hop.ended not in _FAILED:
                break
            count += 1
        return count

    @property
    def oldest_so_far(self) -> WeightVersion | None:
        """Return the oldest version of the trajectory's tokens, those of this turn included."""
        oldest = self.oldest
        for span in self.spans:
            oldest = older(oldest, span.version)
        return oldest

    @property
    def versions(self) -> VersionConstraint:
        """Return which versions the next attempt may run on."""
        return self.turn.versions if self.pinned is None else Exactly(self.pinned.n)

    @property
    def demand(self) -> Demand:
        """Return what the next attempt asks of engines apart from room."""
        run = None if self.pinned is None else self.pinned.run
        return self.versions, self.is_dedicated_only, run, self.affinity is None, self.turn.waits_for_version

    @property
    def num_prompt_tokens(self) -> int:
        """Return how long the next attempt's prompt is."""
        return len(self.turn.prompt_ids) + len(self.token_ids)

    def view(self) -> TurnView:
        """Return what the routing policy needs to know."""
        return TurnView(
            versions=self.versions,
            num_prompt_tokens=self.num_prompt_tokens,
            num_new_tokens=self.num_left_tokens,
            num_left_tokens=self.progress.left_tokens,
            affinity=self.affinity,
            avoid=self.avoid,
            moved_by=self.moved_by,
            is_dedicated_only=self.is_dedicated_only,
        )

    def next_request(self, request_id: RequestId) -> EngineRequest:
        """Return the request that continues the turn.

        A seed moves on with the tokens made, or a continuation would draw with the random numbers of its beginning.
        """
        sampling = self.turn.sampling
        done, left = len(self.token_ids), self.num_left_tokens
        if left == sampling.max_tokens:
            return EngineRequest.begin(self.turn, request_id)
        seed = None if sampling.seed is None else sampling.seed + done
        return EngineRequest(
            request_id=request_id,
            prompt_ids=self.turn.prompt_ids + tuple(self.token_ids),
            sampling=attrs.evolve(sampling, max_tokens=left, seed=seed),
        )

    def take(self, chunk: TokenChunk, version: WeightVersion | None) -> int:
        """Append a chunk's tokens, at most what the budget leaves; returns how many were taken.

        Raises:
            EngineError: The log-probs do not match the tokens or are no log-probs; nothing was taken.
        """
        token_ids = chunk.token_ids
        taken = min(len(token_ids), max(0, self.num_left_tokens))
        if self.turn.sampling.logprobs:
            if len(chunk.logprobs) != len(token_ids):
                message = f"{len(token_ids)} tokens came with {len(chunk.logprobs)} log-probs"
                raise EngineError(message)
            check_logprobs(chunk.logprobs)
            self.logprobs.extend(chunk.logprobs[:taken])
        self._extend_spans(version, len(self.token_ids), len(self.token_ids) + taken)
        self.token_ids.extend(token_ids[:taken])
        return taken

    def _extend_spans(self, version: WeightVersion | None, start: int, end: int) -> None:
        if version is None or start == end:
            return
        last = self.spans[-1] if self.spans else None
        if last is not None and last.version == version and last.end == start:
            self.spans[-1] = VersionSpan(version=version, start=last.start, end=end)
        else:
            self.spans.append(VersionSpan(version=version, start=start, end=end))

    def finish_reason_so_far(self) -> FinishReason | None:
        """Return why the turn is complete although its engine did not say so, or ``None`` when it is not."""
        if self.token_ids and self.token_ids[-1] in self.turn.sampling.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_left_tokens <= 0 else None

    def result(self, finish_reason: FinishReason) -> TurnResult:
        """Return the turn's result with what it has collected."""
        return TurnResult(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            versions=tuple(self.spans),
            hops=tuple(self.hops),
        )


def check_chunk(chunk: TokenChunk) -> None:
    """Refuse what is no chunk of tokens: an engine's mistake must end its attempt, not be found in the middle of the pool.

    Raises:
        EngineError: It is none; says what it is.
    """
    given: Any = chunk
    if not isinstance(given, TokenChunk):
        message = f"it gave {shown(given)} in place of a TokenChunk"
        raise EngineError(message)
    fields: tuple[Any, ...] = given.token_ids, given.logprobs, given.version, given.finish_reason
    ids, logprobs, version, reason = fields
    if type(ids) not in _SEQUENCES or type(logprobs) not in _SEQUENCES:
        message = f"token_ids and logprobs of a TokenChunk are tuples, got {shown(ids)} and {shown(logprobs)}"
    elif not set(map(type, ids)) <= _INTEGERS:
        wrong = next(token for token in ids if type(token) is not int)
        message = f"token ids are plain integers (an array's tolist() gives them), got {shown(wrong)}"
    elif version is not None and not isinstance(version, WeightVersion):
        message = f"the version of a TokenChunk is a WeightVersion or None, got {shown(version)}"
    elif reason is not None and not isinstance(reason, FinishReason):
        message = f"the finish_reason of a TokenChunk is a FinishReason or None, got {shown(reason)}"
    else:
        return
    raise EngineError(message)


def check_logprobs(logprobs: tuple[float, ...]) -> None:
    """Refuse what is no log of a probability; a missing one must never be filled in.

    Raises:
        EngineError: One is none, or no plain number.
    """
    value: Any
    for value in logprobs:
        if not isinstance(value, _NUMBERS) or not -math.inf < value <= 0:
            message = (
                f"a token came with a log-prob that is no log of a probability, a plain number <= 0: {shown(value)}"
            )
            raise EngineError(message)
