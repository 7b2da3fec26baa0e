"""Kills a part of a chaos site and measures how long it takes until that part is well again."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import os
import random
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence

import attrs

from rose.bench.chaos.load import ServingLoad
from rose.bench.chaos.site import Device, Site
from rose.errors import EngineLostError, LedgerError, RoseError

_POLL_S = 0.05
_DRAWS = 3


class Victim(enum.Enum):
    """What is killed. ``STOPPED_ROLLOUT`` gets SIGSTOP, all others SIGKILL."""

    EXECUTOR = "executor"
    ROLLOUT = "rollout engine"
    STOPPED_ROLLOUT = "rollout engine, stopped"
    SERVING = "serving engine"
    LENDER = "lender"


class ServingPart(enum.Enum):
    """Which processes of a serving engine die: all, the one that answers clients, or the one that has the model."""

    ALL = "all"
    SERVER = "server"
    ENGINE = "engine"


@attrs.define(eq=False)
class Kill:
    """One kill. Times on the event loop's clock.

    Attributes:
        victim: What.
        device: Where; empty for the lender.
        part: Which processes of a serving engine.
        at_s: When.
        well_s: When the victim was well again; ``None`` before.
    """

    victim: Victim
    device: str
    at_s: float
    part: str = ""
    well_s: float | None = None

    @property
    def recovery_s(self) -> float | None:
        """How long the recovery took."""
        return None if self.well_s is None else self.well_s - self.at_s


class Killer:
    """Kills parts of one site, each only while it is well.

    Args:
        site: Whose.
        loads: The load on each device's serving engine, which tells when that answers again.
        seed: Of what is killed.
    """

    def __init__(self, site: Site, loads: Mapping[str, ServingLoad], seed: int) -> None:
        self._site = site
        self._loads = loads
        self._rng = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()
        self.kills: list[Kill] = []

    async def kill_any(self) -> Kill | None:
        """Kill a random part; ``None`` when all that were drawn are not well, so that what still stands is not killed over and over."""
        for _ in range(_DRAWS):
            victim, name = self._rng.choice(list(Victim)), self._rng.choice(list(self._site.devices))
            if kill := await self.kill(victim, name):
                return kill
        return None

    async def kill(self, victim: Victim, name: str, part: ServingPart | None = None) -> Kill | None:
        """Kill one part; ``None`` when it is not there to be killed."""
        device = self._site.devices[name]
        kill = Kill(victim, "" if victim is Victim.LENDER else name, 0.0)
        if any(self._disables(earlier, kill) for earlier in self.kills):
            return None
        if victim is Victim.SERVING:
            part = part or self._rng.choice(list(ServingPart))
            kill.part = part.value
        is_well = await self._prepared(victim, device)
        pids = self._pids(kill, device)
        if not pids:
            return None
        kill.at_s = asyncio.get_running_loop().time()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP if victim is Victim.STOPPED_ROLLOUT else signal.SIGKILL)
        self.kills.append(kill)
        task = asyncio.create_task(self._follow(kill, is_well))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return kill

    async def wait_until_well(self, timeout_s: float) -> list[Kill]:
        """Wait until all victims are well again; returns those that are not after ``timeout_s``."""
        if self._tasks:
            await asyncio.wait(set(self._tasks), timeout=timeout_s)
        for task in list(self._tasks):
            task.cancel()
        return [kill for kill in self.kills if kill.well_s is None]

    @staticmethod
    def _disables(earlier: Kill, kill: Kill) -> bool:
        """Return whether the victim is not well yet since an earlier kill."""
        if earlier.well_s is not None or earlier.device != kill.device:
            return False
        rollouts = (Victim.ROLLOUT, Victim.STOPPED_ROLLOUT)
        if kill.victim in rollouts:
            return earlier.victim in (*rollouts, Victim.EXECUTOR)
        return earlier.victim is kill.victim

    def _pids(self, kill: Kill, device: Device) -> Sequence[int]:
        try:
            if kill.victim is Victim.LENDER:
                pid = self._site.lender.pid
            elif kill.victim is Victim.EXECUTOR:
                pid = device.executor.pid
            elif kill.victim is Victim.SERVING:
                pids = {"server": device.serving_pid() or 0, "engine": device.ledger.usage().pid}
                wanted = list(pids.values()) if kill.part == ServingPart.ALL.value else [pids[kill.part]]
                return wanted if all(wanted) else ()
            else:
                pid = device.ledger.rollout().pid
        except LedgerError:
            return ()
        return () if not pid else (pid,)

    async def _prepared(self, victim: Victim, device: Device) -> Callable[[Kill], Awaitable[bool]]:
        """Return what tells that a victim is well again, from what it is now."""
        if victim is Victim.LENDER:
            lender, pid = self._site.lender, self._site.lender.pid

            async def lender_is_well(_: Kill) -> bool:
                return lender.pid not in (None, pid) and await self._site.is_lender_well()

            return lender_is_well
        if victim is Victim.EXECUTOR:
            executor_pid = device.executor.pid

            async def executor_is_well(_: Kill) -> bool:
                return device.executor.pid not in (None, executor_pid) and await device.is_well()

            return executor_is_well
        if victim is Victim.SERVING:
            load = self._loads[device.name]

            async def serving_is_well(kill: Kill) -> bool:
                return load.first_answer_s(kill.at_s) is not None

            return serving_is_well
        incarnation = await device.incarnation()

        async def rollout_is_well(_: Kill) -> bool:
            return await device.incarnation() not in (None, incarnation)

        return rollout_is_well

    async def _follow(self, kill: Kill, is_well: Callable[[Kill], Awaitable[bool]]) -> None:
        while True:
            with contextlib.suppress(RoseError):
                if await is_well(kill):
                    break
            await asyncio.sleep(_POLL_S)
        kill.well_s = asyncio.get_running_loop().time()


def must(kill: Kill | None) -> Kill:
    """Return a kill that must have been possible.

    Raises:
        EngineLostError: It was not.
    """
    if kill is None:
        message = "there was nothing to kill"
        raise EngineLostError(message)
    return kill
