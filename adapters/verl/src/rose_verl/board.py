"""What all processes of a job must know of each other: one small actor, made with the first front.

Life cycle of a version's step:

1. [TRAINER RANK 0] published a version and announces which step it is of, before the pool is asked to bring engines there. Nobody is woken, and no
   turn asks for it.
2. [DESK] whose turn comes back with tokens of a version that it has not heard of asks for all that is known.
3. [TRAINER RANK 0] had the pool bring its engines there, as far as they went, and notes the version, unless none is known to have it.
4. [BOARD] wakes every desk that waits for news.
5. [DESK] takes it in and asks for the next news, which says that it has. Turns from now on ask for that version at least.
6. [BOARD] when all desks have, or the slow ones ``ack_s``, the note is acknowledged, and the trainer's step goes on.

A trainer that fails between 1 and 3 leaves a version that has a step and that no turn asks for, which is right whether engines got it or not.

Invariants: the step of a version is known before engines are sent for it, and never changes; turns ask for noted versions only; news are numbered and
only added to; a desk that asks with what it has seen misses none; a desk that has died holds nobody up for more than ``ack_s``, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Mapping
from typing import Any

import attrs

from rose_verl.settings import Settings

_logger = logging.getLogger(__name__)
_ACK_S = 2.0
_POLL_S = 30.0
MAX_CALLS = 100_000
"""Of an actor at a time; Ray's default of 1000 would be a bound on the number of agent loop workers, and on turns through a front."""


@attrs.frozen(kw_only=True)
class News:
    """What a desk had not seen.

    Attributes:
        seen: Ask with this number next.
        steps: Steps by version number of the run, only those that are new.
        newest: The number of the newest version that was noted; ``None`` before the first.
        num_aborts: How often turns were to end so far.
        is_open: Whether turns may begin.
    """

    seen: int
    steps: Mapping[int, int]
    newest: int | None
    num_aborts: int
    is_open: bool


class Board:
    """The state, and the waiting for it. Its methods are called through Ray.

    Args:
        settings: Of the job.
        ack_s: How long a note waits for desks to take it in.
    """

    def __init__(self, settings: Settings, ack_s: float = _ACK_S) -> None:
        self._settings, self._ack_s = settings, ack_s
        self._run = f"verl-{uuid.uuid4().hex[:12]}"
        self._steps: dict[int, int] = {}  # by version number, also of those that were only announced
        self._noted: list[int] = []  # version numbers
        self._changes = [0]  # how many were noted at each number of news
        self._num_aborts, self._is_open = 0, True
        self._desks: dict[str, int] = {}
        self._changed = asyncio.Condition()

    async def settings(self) -> Settings:
        """Return the job's settings."""
        return self._settings

    async def run(self) -> str:
        """Return the name of this launch of the trainer."""
        return self._run

    async def announce(self, n: int, step: int | None) -> None:
        """Learn that version ``n`` holds the weights of a step; ``None``: of the step before, whose weights were pushed again."""
        if step is None:
            step = next(reversed(self._steps.values()), 0)
        self._steps.setdefault(int(n), int(step))

    async def note(self, n: int, step: int | None) -> None:
        """Let turns from now on ask for version ``n``. Arguments as of ``announce``; a step that was announced stays."""
        await self.announce(n, step)
        self._noted.append(int(n))
        await self._spread()

    async def abort(self) -> None:
        """End all turns that are under way, and begin none until ``resume``."""
        self._num_aborts += 1
        self._is_open = False
        await self._spread()

    async def resume(self) -> None:
        """Let turns begin again. Idempotent."""
        if not self._is_open:
            self._is_open = True
            await self._spread()

    async def news(self, desk: str, seen: int) -> News:
        """Return what a desk has not seen, as soon as there is something; after half a minute nothing.

        Args:
            desk: A name of the desk's own.
            seen: As of its last news, 0 at first.
        """
        async with self._changed:
            self._desks[desk] = seen
            self._changed.notify_all()
            if seen and seen == len(self._changes):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait_for(lambda: len(self._changes) > seen), _POLL_S)
            return self._since(seen)

    async def known(self) -> News:
        """Return all that is known, to whoever asks; the steps of announced versions too."""
        return attrs.evolve(self._since(0), steps=dict(self._steps))

    def _since(self, seen: int) -> News:
        start = self._changes[seen - 1] if seen else 0
        return News(
            seen=len(self._changes),
            steps={n: self._steps[n] for n in self._noted[start:]},
            newest=self._noted[-1] if self._noted else None,
            num_aborts=self._num_aborts,
            is_open=self._is_open,
        )

    async def _spread(self) -> None:
        """Wake the desks and wait until they know."""
        async with self._changed:
            self._changes.append(len(self._noted))
            number = len(self._changes)
            self._changed.notify_all()

            def all_know() -> bool:
                return all(seen >= number for seen in self._desks.values())

            try:
                await asyncio.wait_for(self._changed.wait_for(all_know), self._ack_s)
            except TimeoutError:
                late = [desk for desk, seen in self._desks.items() if seen < number]
                _logger.warning("%d of the job's processes did not take in news within %s s", len(late), self._ack_s)
                for desk in late:
                    del self._desks[desk]


def board_name() -> str:
    """Return the board's name in Ray: one a job."""
    import ray  # noqa: PLC0415

    return f"rose_board_{ray.get_runtime_context().get_job_id()}"


def make_board(settings: Settings) -> Any:
    """Return this job's board; made, if there is none. Whoever makes it keeps the handle: the board ends with it."""
    import ray  # noqa: PLC0415

    remote = ray.remote(Board).options(
        name=board_name(), get_if_exists=True, num_cpus=0, max_concurrency=MAX_CALLS, max_restarts=0
    )
    return remote.remote(settings)


def find_board() -> Any:
    """Return this job's board.

    Raises:
        ConfigError: There is none: no front was made, so this job's rollouts are not on a pool.
    """
    import ray  # noqa: PLC0415

    from rose.errors import ConfigError  # noqa: PLC0415

    try:
        return ray.get_actor(board_name())
    except ValueError as error:
        message = "this job has no front of a pool; set actor_rollout_ref.rollout.name=rose"
        raise ConfigError(message) from error
