"""A client's turns on the direct path: what it has of each, what it told the pool. Sync, without I/O.

Invariants:

* A call is delivered once: its result, its error or its cancellation, whichever comes first.
* What the client keeps of a turn begins with what the pool keeps: ``begin`` drops the rest.
* A result is given before the pool's word only if that word can be no other: the engine ended the turn itself or went beyond what it was asked for, every token is
  labelled with a version that the turn may have, and the pool has chosen that engine.
* Nothing is told, or kept for the caller, of a head start that the pool did not take over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import attrs

from rose.errors import EngineError, RoseError, TurnFailedError
from rose.policies.staleness import is_admissible
from rose.pool import direct
from rose.pool.sources import chunks_from
from rose.pool.turns import TurnRecord, check_chunk
from rose.pool.wire import error_from_plain, error_to_plain
from rose.types import EngineId, EngineRequest, FinishReason, Hop, HopEnd, TokenChunk, Turn, TurnResult


@attrs.define(eq=False)
class RemoteCall:
    """One turn of a client.

    Attributes:
        turn_id: The client's id of it.
        record: Its tokens over all attempts.
        waiter: What its caller waits for.
        start: The attempt that is made.
        end: How that attempt's stream ended; ``None`` while it goes on.
        task: What streams.
    """

    turn_id: str
    record: TurnRecord
    waiter: asyncio.Future[TurnResult]
    start: direct.Start | None = None
    end: FinishReason | Mapping[str, Any] | None = None
    task: asyncio.Task[None] | None = None
    _num_told: int = 0
    _has_told_end: bool = False
    _is_labelled: bool = True

    @classmethod
    def of(cls, turn_id: str, turn: Turn, waiter: asyncio.Future[TurnResult]) -> RemoteCall:
        """Return the call of a new turn."""
        return cls(turn_id, TurnRecord(turn=turn, number=0, order=(0, 0, 0), arrived_s=0.0, queued_s=0.0), waiter)

    @property
    def is_ahead(self) -> bool:
        """Whether the attempt is a head start that the pool did not take over yet."""
        return self.start is not None and self.start.attempt == direct.AHEAD

    @property
    def ahead(self) -> direct.Ahead | None:
        """Return the head start that the pool did not take over yet, ``None`` where there is none."""
        one = self.start
        if one is None or not self.is_ahead:
            return None
        return direct.Ahead(engine_id=EngineId(one.engine_id), version=one.version)

    def is_making(self, start: direct.Start) -> bool:
        """Tell whether an attempt is the one under way: by its request, since numbers begin anew with a pool that was started anew."""
        one = self.start
        if one is None or one.request_id != start.request_id:
            return False
        return not self.is_ahead or one.address == start.address  # a lease or a start of the engine that is over now

    def begin(self, start: direct.Start) -> EngineRequest | None:
        """Begin an attempt; returns the request, or ``None`` when it is the one under way, of which the pool wants to hear again."""
        self._num_told, self._has_told_end = start.num_kept, False
        if self.is_making(start):
            self.start = start
            return None
        record = self.record
        self._keep(start.num_kept)
        record.hops[:] = start.hops
        self.start, self.end = start, None
        record.max_context_tokens = record.num_prompt_tokens + start.max_tokens
        return record.next_request(start.request_id)

    def _keep(self, num: int) -> None:
        record = self.record
        del record.token_ids[num:], record.logprobs[num:]
        record.spans[:] = [attrs.evolve(span, end=min(span.end, num)) for span in record.spans if span.start < num]
        self._is_labelled = self._is_labelled or not num

    def drop_ahead(self) -> None:
        """End a head start and forget what it made."""
        self.stop()
        self._keep(0)
        self.start = self.end = None

    def take(self, chunk: TokenChunk) -> bool:
        """Take a chunk; returns whether the pool must hear of it at once: the stream is over, or should be."""
        assert self.start is not None  # noqa: S101 - a stream has begun
        try:
            check_chunk(chunk)
            if chunk.token_ids:
                version = self.start.version if chunk.version is None else chunk.version
                self._is_labelled = self._is_labelled and (chunk.version is not None or self.start.version is None)
                is_allowed = is_admissible(self.start.versions, version, self.start.run)
                num_taken = self.record.take(chunk, chunk.version)
                if not is_allowed:
                    return True  # without an end: what comes of it is the pool's to say
                if num_taken < len(chunk.token_ids):  # the pool, which hears of those only, could not say it
                    self.end = chunk.finish_reason or FinishReason.LENGTH
                    return True
        except EngineError as error:
            self.fail(error)
            return True
        self.end = chunk.finish_reason
        return self.end is not None

    def fail(self, error: RoseError) -> None:
        """Note that the attempt's stream raised."""
        self.end = error_to_plain(error)

    def deliver(self) -> bool:
        """Give the caller the result if the attempt's end settles the turn beyond doubt; returns whether it did."""
        start = self.start
        is_over = isinstance(self.end, FinishReason) and self.end in {FinishReason.STOP, FinishReason.LENGTH}
        if start is None or self.is_ahead or not is_over or not self._is_labelled or self.waiter.done():
            return False
        hop = Hop(
            engine_id=EngineId(start.engine_id),
            reason=start.reason,
            num_tokens=len(self.record.token_ids) - sum(hop.num_tokens for hop in self.record.hops),
            ended=HopEnd.FINISHED,
        )
        self.record.hops.append(hop)
        self.waiter.set_result(self.record.result(FinishReason(self.end)))
        return True

    def news(self) -> list[Any] | None:
        """Return a report of what the pool was not told yet, ``None`` when there is nothing."""
        record, start = self.record, self._num_told
        has_end = self.end is not None and not self._has_told_end
        if self.start is None or self.is_ahead or (start >= len(record.token_ids) and not has_end):
            return None
        chunks = chunks_from(record.token_ids, record.logprobs, record.spans, start)
        self._num_told, self._has_told_end = len(record.token_ids), self.end is not None
        report = direct.Report(
            turn_id=self.turn_id, attempt=self.start.attempt, start=start, chunks=chunks, end=self.end
        )
        return direct.report_to_wire(report)

    def settle(self, outcome: Mapping[str, Any]) -> None:
        """Take the pool's word; a no-op for a caller that has its result."""
        self.stop()
        if self.waiter.done():
            return
        if "error" in outcome:
            error = error_from_plain(outcome)
            error.partial = self.partial()
            self.waiter.set_exception(error)
            return
        if outcome["num_tokens"] > len(self.record.token_ids):
            message = f"the pool settled a turn with {outcome['num_tokens']} tokens, {len(self.record.token_ids)} came; run it again"
            self.waiter.set_exception(TurnFailedError(message))
            return
        self.waiter.set_result(direct.result_from(outcome, self.record.token_ids, self.record.logprobs))

    def partial(self) -> TurnResult:
        """Return what there is of the turn, as an aborted result."""
        if self.is_ahead:
            self.drop_ahead()
        return self.record.result(FinishReason.ABORTED)

    def stop(self) -> None:
        """End the stream, which ends the request at the engine."""
        if self.task is not None:
            self.task.cancel()
            self.task = None
