"""Where a strategy's extra engines come from. One class a way; each is built into a world once and lends phase by phase.

Life cycle: ``build`` makes the engines and the serving side -> for each rollout phase ``lend(pool)`` is entered when the phase
begins and left when it is over; inside it engines join and leave the pool as the way of supply has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from random import Random

import attrs

from rose.errors import EngineLostError
from rose.pool import RolloutPool
from rose.simulation.world import World
from rose.types import EngineKind


class Supply(ABC):
    """A way to more engines than the job's own.

    Attributes:
        slot_share: How many trajectories one of its engines is given, as a share of what one of the job's own takes. An operator
            who knows that an engine has half a GPU gives it half as many.
        is_remote: Its engines are in another cluster, so that every version of the weights crosses the thin link.
    """

    slot_share: float = 1.0
    is_remote: bool = True

    def build(self, world: World) -> None:
        """Make what is there before the job begins."""

    @abstractmethod
    def lend(self, world: World, pool: RolloutPool) -> contextlib.AbstractAsyncContextManager[None]:
        """Let engines come and go while the context lasts."""


class NoSupply(Supply):
    """The job has its own engines and no more."""

    is_remote = False

    @contextlib.asynccontextmanager
    async def lend(self, world: World, pool: RolloutPool) -> AsyncIterator[None]:  # noqa: ARG002
        """Lend nothing."""
        yield


@attrs.frozen(kw_only=True)
class RentedSupply(Supply):
    """Whole GPUs rented by the minute: spot instances, serverless functions. Serving has no part in it.

    Attributes:
        name: Of the engines.
        boot_s: From asking to an engine that can serve: machine or container, process, weights.
        mean_up_s: Mean time until an instance is taken away; exponential. ``None``: never.
        limit_s: Longest life of one. ``None``: none.
        mean_down_s: Mean time until another is to be had; exponential.
        warning_s: Between the notice and the end; no turns go there meanwhile.
    """

    name: str
    boot_s: float
    mean_up_s: float | None = None
    limit_s: float | None = None
    mean_down_s: float = 0.0
    warning_s: float = 0.0

    @contextlib.asynccontextmanager
    async def lend(self, world: World, pool: RolloutPool) -> AsyncIterator[None]:
        """Keep as many engines as there are GPUs to rent."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._keep(world, pool, slot)) for slot in range(world.num_lent)]
            try:
                yield
            finally:
                for task in tasks:
                    task.cancel()

    async def _keep(self, world: World, pool: RolloutPool, slot: int) -> None:
        """Rent one engine after the other."""
        rng = Random(f"{world.seed}/{self.name}/{slot}/{len(world.windows)}")
        if self.mean_up_s is not None and self.mean_down_s and rng.random() > self.availability:
            await asyncio.sleep(rng.expovariate(1 / self.mean_down_s))
        for life in itertools.count():
            life_s = min(
                rng.expovariate(1 / self.mean_up_s) if self.mean_up_s is not None else float("inf"),
                self.limit_s if self.limit_s is not None else float("inf"),
            )
            await self._live(world, pool, f"{self.name}{slot}.{len(world.windows)}.{life}", life_s)
            if self.mean_down_s:
                await asyncio.sleep(rng.expovariate(1 / self.mean_down_s))

    @property
    def availability(self) -> float:
        """Share of the time for which an instance is to be had."""
        return 1.0 if self.mean_up_s is None else self.mean_up_s / (self.mean_up_s + self.mean_down_s)

    async def _live(self, world: World, pool: RolloutPool, name: str, life_s: float) -> None:
        held = world.hold(min(self.boot_s, life_s))
        try:
            await asyncio.sleep(min(self.boot_s, life_s))
            if life_s <= self.boot_s:
                return
            engine = world.whole_engine(name, is_local=False)
            world.guests.append(engine)
            await pool.add_engine(engine, EngineKind.BORROWED)
            try:
                await _sleep_long(life_s - self.boot_s - self.warning_s)
            finally:
                with contextlib.suppress(EngineLostError):
                    await pool.remove_engine(engine.engine_id, "its instance is taken away", timeout_s=0.0)
            await asyncio.sleep(self.warning_s)
            engine.die("its instance was taken away")
        finally:
            world.let_go(held)


async def _sleep_long(duration_s: float) -> None:
    """Sleep, also without an end."""
    if duration_s == float("inf"):
        await asyncio.get_running_loop().create_future()
    await asyncio.sleep(max(0.0, duration_s))
