"""One turn across its attempts: what it has, what it still needs, how its pieces are joined.

Invariants:

* Every attempt has a fresh request id; a trajectory's id never reaches an engine.
* One budget: over all attempts a turn collects at most ``sampling.max_tokens`` tokens. The next attempt's prompt is the
  turn's prompt and every token so far, its ``max_tokens`` is the rest.
* ``logprobs`` is as long as ``token_ids``, or empty when not asked for. Spans cover labelled tokens in order, and
  neighbours of one version are one span.
* At most one attempt of a turn is open. A chunk of a closed attempt is discarded, whenever it comes.
* A turn is settled once: with one result or with one error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from rose.errors import EngineError
from rose.policies.routing import TurnView
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


Demand = tuple[VersionConstraint, bool, str | None, bool]
"""What a turn asks of engines apart from room: versions, dedicated ones only, the run that it is pinned to if any, to begin."""


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

    ``load_tokens``: the context of all the engine's turns when this one came; ``num_fresh_tokens``: prompt tokens that the engine
    has to compute, as far as the pool knows.
    """

    record: TurnRecord
    member: Member
    request: EngineRequest
    reason: RouteReason
    number: int
    last_progress_s: float
    assigned_s: float = 0.0
    load_tokens: int = 0
    num_fresh_tokens: int = 0
    num_tokens: int = 0
    is_open: bool = True
    is_started: bool = False

    @property
    def engine_id(self) -> EngineId:
        """Return the engine's id."""
        return self.member.engine.engine_id

    @property
    def max_kv_tokens(self) -> int:
        """Return how many tokens of KV memory the request may come to use."""
        return len(self.request.prompt_ids) + self.request.sampling.max_tokens


@attrs.define(kw_only=True, eq=False)
class TurnRecord:
    """A turn that is in the pool's hands. ``waiter`` belongs to the caller of the state core.

    It ``is_suspect`` once an engine failed it with an error that says as much about the request as about the engine.
    """

    turn: Turn
    number: int
    order: tuple[int, int, int]
    arrived_s: float
    queued_s: float
    affinity: EngineId | None = None
    waiter: Any = None
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
        """Return what is left of the turn's token budget."""
        return self.turn.sampling.max_tokens - len(self.token_ids)

    @property
    def num_busy(self) -> int:
        """Return how many attempts met a busy answer."""
        return sum(hop.ended is HopEnd.BUSY for hop in self.hops)

    @property
    def num_fruitless(self) -> int:
        """Return how many attempts gave no token, busy answers not counted."""
        return sum(hop.num_tokens == 0 and hop.ended is not HopEnd.BUSY for hop in self.hops)

    @property
    def versions(self) -> VersionConstraint:
        """Return which versions the next attempt may run on."""
        return self.turn.versions if self.pinned is None else Exactly(self.pinned.n)

    @property
    def demand(self) -> Demand:
        """Return what the next attempt asks of engines apart from room."""
        run = None if self.pinned is None else self.pinned.run
        return self.versions, self.is_dedicated_only, run, self.affinity is None

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
        if not self.token_ids:
            return EngineRequest(request_id=request_id, prompt_ids=self.turn.prompt_ids, sampling=sampling)
        done = len(self.token_ids)
        seed = None if sampling.seed is None else sampling.seed + done
        return EngineRequest(
            request_id=request_id,
            prompt_ids=(*self.turn.prompt_ids, *self.token_ids),
            sampling=attrs.evolve(sampling, max_tokens=sampling.max_tokens - done, seed=seed),
        )

    def take(self, chunk: TokenChunk, version: WeightVersion | None) -> int:
        """Append a chunk's tokens, at most what the budget leaves; returns how many were taken.

        Raises:
            EngineError: The log-probs do not match the tokens; nothing was taken.
        """
        token_ids = chunk.token_ids
        taken = min(len(token_ids), self.num_left_tokens)
        if self.turn.sampling.logprobs:
            if len(chunk.logprobs) != len(token_ids):
                message = f"{len(token_ids)} tokens came with {len(chunk.logprobs)} log-probs"
                raise EngineError(message)
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
        return FinishReason.LENGTH if self.num_left_tokens == 0 else None

    def result(self, finish_reason: FinishReason) -> TurnResult:
        """Return the turn's result with what it has collected."""
        return TurnResult(
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=finish_reason,
            versions=tuple(self.spans),
            hops=tuple(self.hops),
        )
