"""A process's own way to the pool: turns go from here straight to the engines.

Life cycle of a turn:

1. [DESK] waits until turns may begin, then asks the pool with the newest version that the board has told of.
2. [POOL] gives the whole result, whatever happened to engines meanwhile, or one error.
3. [DESK] puts the trainer's steps in place of versions. One that it has not heard of is asked of the board once, which knows it since it was published.

Invariants: one desk a process and event loop, shared by all trajectories in it; a turn that an abort ended is given back with its tokens;
a connection that was lost for good is made anew for the next turn, and the turn that met it runs again; once the pool had this job's
weights, one that knows of none is another one, started anew, and every turn ends with an error that says so.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.errors import RoseError, TransportError, TurnFailedError
from rose.frameworks import HeldPool, PoolSnapshot, WeightsWatch
from rose.types import AnyVersion, AtLeast, FinishReason, Turn, TurnResult, WeightVersion
from rose_verl.board import News
from rose_verl.fields import Answer, answer_of, sampling_of
from rose_verl.say import logger
from rose_verl.settings import Settings

_EMPTY = TurnResult(token_ids=(), logprobs=(), finish_reason=FinishReason.ABORTED, versions=(), hops=())
_WATCH_S = 10.0
"""How often turns that take long have the pool asked whether it is still the same."""
_desks: dict[asyncio.AbstractEventLoop, Desk] = {}


def desk_of(board: Any) -> Desk:
    """Return the desk of this process and event loop."""
    loop = asyncio.get_running_loop()
    desk = _desks.get(loop)
    if desk is None:
        for old in [one for one in _desks if one.is_closed()]:
            del _desks[old]
        desk = _desks[loop] = Desk(board)
    return desk


@attrs.define(eq=False)
class _UnderWay:
    """A turn at the pool."""

    task: asyncio.Task[TurnResult] | None = None
    is_aborted: bool = False


class Desk:
    """Runs turns. Make it by ``desk_of``.

    Args:
        board: The job's board, a Ray handle.
    """

    def __init__(self, board: Any) -> None:
        self._board = board
        self._name = uuid.uuid4().hex
        self._settings: Settings | None = None
        self._run = ""
        self._steps: dict[WeightVersion, int] = {}
        self._newest: int | None = None
        self._seen = self._num_aborts = 0
        self._is_open = asyncio.Event()
        self._knows = asyncio.Event()
        self._turns: set[_UnderWay] = set()
        self._pool: HeldPool | None = None
        self._watch: WeightsWatch | None = None
        self._listener: asyncio.Task[None] | None = None

    async def generate(
        self, *, trajectory_id: str, group_id: str, prompt_ids: Sequence[int], sampling_params: Mapping[str, Any]
    ) -> Answer:
        """Run one turn.

        Args:
            trajectory_id: Of the trajectory, the same for all its turns.
            group_id: Of the trajectories that are compared with each other.
            prompt_ids: All tokens so far.
            sampling_params: veRL's.

        Raises:
            RoseError: The pool could not finish it; or the request asks for what a pool has not.
        """
        await self._begin()
        settings = self._settings
        assert settings is not None  # noqa: S101 - the first news came
        sampling = sampling_of(sampling_params, len(prompt_ids), settings)
        await self._is_open.wait()
        turn = Turn(
            trajectory_id=trajectory_id,
            group_id=group_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            versions=AnyVersion() if self._newest is None else AtLeast(self._newest),
            deadline_s=settings.options.turn_timeout_s,
        )
        result = await self._run_turn(turn)
        if any(span.version not in self._steps for span in result.versions):
            self._take(await self._board.known.remote())
        if not result.token_ids and result.finish_reason is FinishReason.LENGTH:
            message = f"a prompt of {len(prompt_ids)} tokens leaves no room in the context of any engine of the pool"
            raise TurnFailedError(message, result.hops)
        now = None if self._newest is None else self._steps.get(WeightVersion(self._run, self._newest))
        return answer_of(result, steps=self._steps, now=now, has_logprobs=sampling.logprobs)

    def limit(self, sampling_params: Mapping[str, Any], num_prompt_tokens: int) -> int:
        """Return how many tokens such a turn may have; known once a turn has run.

        Raises:
            RequestRefusedError: As ``generate``.
        """
        assert self._settings is not None  # noqa: S101 - a turn has run
        return sampling_of(sampling_params, num_prompt_tokens, self._settings).max_tokens

    @property
    def num_turns(self) -> int:
        """Return how many turns are under way."""
        return len(self._turns)

    # Turns.

    async def _run_turn(self, turn: Turn) -> TurnResult:
        under_way = _UnderWay()
        self._turns.add(under_way)
        try:
            try:
                return await self._attempt(turn, under_way)
            except TransportError as error:
                logger().warning(
                    "the connection to the pool was lost, a turn of %s runs again: %s", turn.trajectory_id, error
                )
                return await self._attempt(turn, under_way)
        finally:
            self._turns.discard(under_way)

    async def _attempt(self, turn: Turn, under_way: _UnderWay) -> TurnResult:
        assert self._pool is not None  # noqa: S101 - the first news came
        assert self._watch is not None  # noqa: S101 - as above
        pool = await self._pool.get()
        if under_way.is_aborted:
            return _EMPTY
        under_way.task = asyncio.ensure_future(pool.generate(turn))
        try:
            return await self._watch.guard(under_way.task)
        except (asyncio.CancelledError, RoseError) as error:
            partial = _partial_if_aborted(under_way, error)
            if partial is not None:
                return partial
            if isinstance(error, TransportError):
                self._pool.give_up(pool)
            raise

    async def _snapshot(self) -> PoolSnapshot:
        assert self._pool is not None  # noqa: S101 - the first news came
        return await (await self._pool.get()).snapshot()

    # News.

    async def _begin(self) -> None:
        if self._listener is None or self._listener.done():
            self._listener = asyncio.ensure_future(self._listen())
        if not self._knows.is_set():
            waiter = asyncio.ensure_future(self._knows.wait())
            try:
                await asyncio.wait({self._listener, waiter}, return_when="FIRST_COMPLETED")
            finally:
                waiter.cancel()
            if not self._knows.is_set():
                self._listener.result()

    async def _listen(self) -> None:
        """Take in news for as long as there is a board."""
        self._settings, self._run = await self._board.settings.remote(), await self._board.run.remote()
        if self._pool is None:
            self._pool = HeldPool(self._settings.place)
            self._watch = WeightsWatch(
                snapshot=self._snapshot,
                launch=self._run,
                patience_s=0.0,
                pause_s=_WATCH_S,
                advice="start this job again, from its last checkpoint",
                tell=lambda message: logger().error("%s", message),
            )
        while True:
            self._take(await self._board.news.remote(self._name, self._seen), is_own=True)
            self._knows.set()

    def _take(self, news: News, *, is_own: bool = False) -> None:
        self._steps |= {WeightVersion(self._run, n): step for n, step in news.steps.items()}
        if news.newest is not None:
            self._newest = max(news.newest, -1 if self._newest is None else self._newest)
        if not is_own:
            return
        self._seen = news.seen
        if news.num_aborts > self._num_aborts:
            for turn in self._turns:
                turn.is_aborted = True
                if turn.task is not None:
                    turn.task.cancel()
        self._num_aborts = news.num_aborts
        if news.is_open:
            self._is_open.set()
        else:
            self._is_open.clear()


def _partial_if_aborted(under_way: _UnderWay, error: BaseException) -> TurnResult | None:
    """Return what a turn had that an abort ended; ``None`` where its caller's cancellation or the pool did."""
    caller = asyncio.current_task()
    if not under_way.is_aborted or (caller is not None and caller.cancelling()):
        return None
    return getattr(error, "partial", None) or _EMPTY
