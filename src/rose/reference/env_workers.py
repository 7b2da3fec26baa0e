"""Environments in processes of their own: CPU only, many episodes a process, JSON lines between them.

Life cycle of an episode
    1. [POOL] ``reset`` gives the trajectory to the process with the fewest episodes.
    2. [POOL] requests made in the same turn of the event loop travel as one line, ``[["reset", id, seed], ["step", id, text], ...]``.
    3. [WORKER] plays them in order and answers one line with as many results; an environment that raises spoils its own result only.
    4. [WORKER] forgets an episode once it is done, or when told to ``drop`` it.

Invariants: a trajectory stays on one process; a dead process fails the episodes it had and no others, and is started again for the
next ones as often as allowed; nothing is pickled.
"""

from __future__ import annotations

import asyncio
import functools
import json
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TextIO

import attrs

from rose.errors import EnvironmentFailedError
from rose.reference.environment import Environment, Step, load_environment
from rose.reference.worker_process import WorkerProcess, take_over_stdout

_QUIET = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


@attrs.define
class _Lane:
    """One worker process with the requests that wait for its next line."""

    process: WorkerProcess
    num_episodes: int = 0
    pending: list[tuple[list[object], asyncio.Future[Any]]] = attrs.field(factory=list)


class EnvironmentPool:
    """Runs many episodes of ``spec`` over a few processes. Use as an async context manager.

    Args:
        spec: ``module:Class`` of the environment.
        num_processes: How many processes share the episodes.
        timeout_s: Longest wait for one answer; a process that is later is ended, and its episodes fail.
        max_restarts: How often processes that died are started again, all together.

    Raises:
        ConfigError: ``spec`` names no environment.
    """

    def __init__(self, spec: str, *, num_processes: int = 2, timeout_s: float = 60.0, max_restarts: int = 0) -> None:
        load_environment(spec)
        self._spec, self._timeout_s = spec, timeout_s
        self._num_processes = num_processes
        self._lanes: list[_Lane] = []
        self._lane_of: dict[str, _Lane] = {}
        self._num_restarts_left = max_restarts
        self._restarting = asyncio.Lock()

    async def __aenter__(self) -> Self:
        try:
            for i in range(self._num_processes):
                self._lanes.append(_Lane(await self._start(i)))
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _start(self, number: int) -> WorkerProcess:
        return await WorkerProcess.start(
            __name__,
            [self._spec],
            name=f"environment worker {number}",
            error_type=EnvironmentFailedError,
            environ=_QUIET,
        )

    async def _restart_dead(self) -> None:
        async with self._restarting:
            for number, lane in enumerate(self._lanes):
                if lane.process.has_ended and self._num_restarts_left:
                    self._num_restarts_left -= 1
                    await lane.process.close()
                    self._lanes[number] = _Lane(await self._start(number))

    async def reset(self, trajectory_id: str, seed: int) -> str:
        """Start an episode and return its first observation.

        Raises:
            EnvironmentFailedError: No process is left, or the environment raised.
        """
        await self._restart_dead()
        living = [lane for lane in self._lanes if not lane.process.has_ended]
        if not living:
            message = (
                f"no environment process of {self._spec} is running; it was not started, was closed, or all have died"
            )
            raise EnvironmentFailedError(message)
        if trajectory_id in self._lane_of:
            message = f"episode {trajectory_id} is already running; give every trajectory its own id"
            raise EnvironmentFailedError(message)
        lane = min(living, key=lambda lane: lane.num_episodes)
        self._lane_of[trajectory_id] = lane
        lane.num_episodes += 1
        try:
            return str(await self._ask(lane, ["reset", trajectory_id, seed]))
        except BaseException:
            self._forget(trajectory_id)
            raise

    async def step(self, trajectory_id: str, text: str | None) -> Step:
        """Play one turn; ``None`` is a turn without an action.

        Raises:
            EnvironmentFailedError: The episode is unknown, its process died, or the environment raised.
        """
        lane = self._lane_of.get(trajectory_id)
        if lane is None:
            message = f"episode {trajectory_id} is not running; reset it first"
            raise EnvironmentFailedError(message)
        try:
            observation, reward, is_done = await self._ask(lane, ["step", trajectory_id, text])
        except EnvironmentFailedError:
            self._forget(trajectory_id)
            raise
        if is_done:
            self._forget(trajectory_id)
        return Step(observation=observation, reward=reward, is_done=is_done)

    async def drop(self, trajectory_id: str) -> None:
        """Give an unfinished episode up; a no-op for unknown ones and dead processes."""
        lane = self._lane_of.get(trajectory_id)
        if lane is None:
            return
        self._forget(trajectory_id)
        if not lane.process.has_ended:
            _post(lane, ["drop", trajectory_id, None]).cancel()  # nobody waits for the answer

    async def close(self) -> None:
        """End the processes; episodes under way fail. Idempotent."""
        lanes, self._lanes = self._lanes, []
        self._lane_of.clear()
        for lane in lanes:
            await lane.process.close()

    def _forget(self, trajectory_id: str) -> None:
        lane = self._lane_of.pop(trajectory_id, None)
        if lane is not None:
            lane.num_episodes -= 1

    async def _ask(self, lane: _Lane, request: list[object]) -> Any:
        try:
            async with asyncio.timeout(self._timeout_s):
                return await _post(lane, request)
        except TimeoutError as error:
            lane.process.kill()
            await lane.process.close()
            operation, trajectory_id, _ = request
            message = (
                f"{self._spec}: no answer to {operation} of {trajectory_id} within {self._timeout_s:g} s; "
                f"{lane.process.name} was ended"
            )
            raise EnvironmentFailedError(message) from error


def _post(lane: _Lane, request: list[object]) -> asyncio.Future[Any]:
    """Put a request on the process's next line."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()
    if not lane.pending:
        loop.call_soon(_flush, lane)
    lane.pending.append((request, future))
    return future


def _flush(lane: _Lane) -> None:
    """Send what has gathered as one line."""
    batch, lane.pending = lane.pending, []
    reply = lane.process.post([request for request, _ in batch])
    reply.add_done_callback(functools.partial(_hand_out, [future for _, future in batch]))


def _hand_out(futures: Sequence[asyncio.Future[Any]], reply: asyncio.Future[Any]) -> None:
    error = reply.exception()
    results = [{"error": str(error)}] * len(futures) if error else reply.result()
    for future, result in zip(futures, results, strict=True):
        if future.done():
            continue
        if "error" in result:
            future.set_exception(EnvironmentFailedError(result["error"]))
        else:
            future.set_result(result["ok"])


class _Episodes:
    """The worker's side: the episodes of one process."""

    def __init__(self, kind: type[Environment]) -> None:
        self._kind = kind
        self._running: dict[str, Environment] = {}

    def play(self, batch: Sequence[Sequence[Any]]) -> list[dict[str, object]]:
        """Play requests in order; one result each."""
        return [self._play(*request) for request in batch]

    def _play(self, operation: str, trajectory_id: str, argument: Any) -> dict[str, object]:
        try:
            return {"ok": getattr(self, f"_{operation}")(trajectory_id, argument)}
        except Exception as error:  # noqa: BLE001 - a user's environment may raise anything; it is this episode's result
            self._running.pop(trajectory_id, None)
            return {
                "error": f"{self._kind.__name__}.{operation} of {trajectory_id} raised {type(error).__name__}: {error}"
            }

    def _reset(self, trajectory_id: str, seed: int) -> str:
        environment = self._running[trajectory_id] = self._kind()
        return environment.reset(seed)

    def _step(self, trajectory_id: str, text: str | None) -> tuple[str, float, bool]:
        step = self._running[trajectory_id].step(text)
        if step.is_done:
            del self._running[trajectory_id]
        return step.observation, step.reward, step.is_done

    def _drop(self, trajectory_id: str, _: None) -> None:
        self._running.pop(trajectory_id, None)


def serve(spec: str, answers: TextIO) -> None:
    """Answer request lines from standard input until it ends."""
    episodes = _Episodes(load_environment(spec))
    for line in sys.stdin:
        answers.write(json.dumps({"ok": episodes.play(json.loads(line))}, separators=(",", ":")) + "\n")
        answers.flush()


if __name__ == "__main__":
    serve(sys.argv[1], take_over_stdout())
