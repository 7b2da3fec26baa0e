"""Turns of ROLL's requests on a pool: each under ROLL's own request id, so that it can be aborted by it.

Invariants:

* A request that is aborted ends with a result of the tokens that it has by then, never with an error, whenever the abort comes.
* A request that is cancelled (its asyncio task) passes the cancellation on.
* An error of the pool passes with ``partial``, the whole turn so far; a patient request asks again first.
* A pool that had weights and has none any more, because it was started anew, ends turns after ``give_up_s``, whoever asked for them and how often.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any

import attrs

from rose.errors import RoseError
from rose.frameworks import PoolSnapshot, WeightsWatch
from rose.types import FinishReason, Sampling, Turn, TurnResult
from rose_roll.options import RoseOptions
from rose_roll.partials import NOTHING, ended, join, remaining
from rose_roll.patience import MENDABLE, Patience
from rose_roll.versions import Versions

_logger = logging.getLogger("rose_roll")
_LOOK_S = 15.0
FINISH_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.EVICTED: "abort",
}


@attrs.frozen(kw_only=True)
class Request:
    """One sequence that ROLL asks for."""

    request_id: str
    trajectory_id: str
    group_id: str
    prompt_ids: tuple[int, ...]
    sampling: Sampling


@attrs.define(eq=False)
class _Live:
    """A request under way: what its turn has from earlier tries, and the try."""

    request: Request
    done: TurnResult
    is_aborted: bool = False
    task: asyncio.Task[TurnResult] = attrs.field(init=False)


class Desk:
    """Runs requests on a pool. Use it on the pool's event loop.

    Args:
        pool: An open pool, of this process or another (``PoolPlace.connect``).
        options: Deadlines and pauses.
        versions: What turns ask for.
    """

    def __init__(self, pool: Any, *, options: RoseOptions, versions: Versions) -> None:
        self._pool = pool
        self._options = options
        self.versions = versions
        self._live: dict[str, _Live] = {}
        self._asking = asyncio.Lock()
        self._watch = WeightsWatch(
            snapshot=self._snapshot,
            launch=None,  # the learner's affair; who asks for turns is never told
            patience_s=options.give_up_s,
            pause_s=min(_LOOK_S, options.give_up_s / 4),
            advice="start this job again from its last checkpoint (resume_from_checkpoint)",
        )

    async def close(self) -> None:
        """Watch over its turns no more. They are the pool's to end."""
        await self._watch.close()

    @property
    def num_live(self) -> int:
        """Return how many requests are under way."""
        return len(self._live)

    def live_ids(self) -> list[str]:
        """Return the ids of the requests that are under way."""
        return list(self._live)

    async def run(
        self, request: Request, *, done: TurnResult = NOTHING, patience: Patience | None = None
    ) -> TurnResult:
        """Run a request to its end, or until it is aborted.

        Args:
            request: What to run.
            done: What its turn has already.
            patience: For how long failures that may mend are tried again; ``None``: not at all.

        Returns:
            The whole turn, ``done`` included.

        Raises:
            RoseError: The pool gave the turn up; ``partial`` is the whole turn so far, ``done`` included.
        """
        live = _Live(request, done)
        live.task = asyncio.ensure_future(self._tries(live, patience))
        self._live[request.request_id] = live
        try:
            return await live.task
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if not live.is_aborted or (current is not None and current.cancelling()):
                raise
            return join(live.done, getattr(error, "partial", None) or NOTHING)
        finally:
            live.task.cancel()
            del self._live[request.request_id]

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """End requests with the tokens that they have; all of them without ids. Unknown ones are passed over.

        Returns:
            How many that were.
        """
        ids = list(self._live) if request_ids is None else request_ids
        wanted = [self._live[one] for one in ids if one in self._live]
        for live in wanted:
            live.is_aborted = True
            live.task.cancel()
        return len(wanted)

    async def begin_step(self, step: int) -> None:
        """Ask the pool for its version in a new step of ROLL. Where the pool is away, the step's turns ask, and wait for it."""
        self.versions.owe(step)
        try:
            await self._refresh()
        except MENDABLE as error:
            _logger.warning("the pool was not asked for its weights when step %d began: %s", step, error)

    async def _tries(self, live: _Live, patience: Patience | None) -> TurnResult:
        while True:
            left = remaining(live.request.sampling, live.done)
            if left is None:
                return ended(live.done, live.request.sampling)
            try:
                return join(live.done, await self._try(live, left))
            except RoseError as error:
                error.partial = join(live.done, error.partial or NOTHING)
                if patience is None or not isinstance(error, MENDABLE):
                    raise
                live.done = patience.mend(error, live.done)
            await asyncio.sleep(self._options.retry_s)

    async def _try(self, live: _Live, left: Sampling) -> TurnResult:
        await self._refresh()
        turn = Turn(
            trajectory_id=live.request.trajectory_id,
            group_id=live.request.group_id,
            prompt_ids=live.request.prompt_ids + live.done.token_ids,
            sampling=left,
            versions=self.versions.constraint(),
            deadline_s=self._options.deadline_s,
        )
        return await self._watch.guard(asyncio.ensure_future(self._pool.generate(turn)))

    async def _refresh(self) -> None:
        """Ask the pool for its version where what is known is old: one turn asks, the others wait for the answer."""
        async with self._asking:
            if self.versions.is_old():
                version = (await self._snapshot()).version
                self._watch.note(version)
                self.versions.note(version)

    async def _snapshot(self) -> PoolSnapshot:
        found = self._pool.snapshot()
        snapshot: PoolSnapshot = await found if asyncio.iscoroutine(found) else found
        return snapshot
