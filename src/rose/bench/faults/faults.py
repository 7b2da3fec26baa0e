"""What goes wrong in a site, and when: planned by a seed over the progress of the run, so that slow and fast machines see the same."""

from __future__ import annotations

import asyncio
import enum
import random
import signal
from collections.abc import Callable, Sequence

import attrs

from rose.bench.faults.kept_engine import KeptEngine
from rose.bench.faults.site import Site
from rose.types import DeviceId, EngineId

_POLL_S = 0.005
_SQUEEZED_FRACTION = 0.98
_SQUEEZE_S = 1.0


class FaultKind(enum.Enum):
    """What goes wrong."""

    KILL = "engine killed"
    """SIGKILL for the process of any engine."""
    STOP = "engine stopped"
    """SIGSTOP for the process of any engine, for longer than a stall; then SIGCONT."""
    REVOKE = "lease revoked"
    """The lender ends a lease at once."""
    ASK_BACK = "device asked back"
    """The lender asks a device back, with a grace."""
    SQUEEZE = "serving takes memory"
    """Serving needs nearly all KV memory of a device for a while."""


_OF_BORROWED = frozenset({FaultKind.REVOKE, FaultKind.ASK_BACK, FaultKind.SQUEEZE})


@attrs.frozen(kw_only=True)
class PlannedFault:
    """What happens once ``at_turn`` turns of the run are over, to the engine of this number (among those that it can happen to)."""

    kind: FaultKind
    at_turn: int
    number: int


@attrs.define(kw_only=True)
class DoneFault:
    """What happened: to which engine, with how many turns of it in flight, when (seconds of the run)."""

    kind: FaultKind
    engine_id: EngineId
    num_in_flight: int
    at_s: float


def plan_faults(num_faults: int, num_turns: int, *, seed: int) -> tuple[PlannedFault, ...]:
    """Spread faults over the middle of a run of ``num_turns`` turns: all kinds as often as each other, in random order."""
    rng = random.Random(seed)
    kinds = [kind for _ in range(-(-num_faults // len(FaultKind))) for kind in FaultKind][:num_faults]
    rng.shuffle(kinds)
    return tuple(
        PlannedFault(kind=kind, at_turn=(i + 1) * num_turns // (num_faults + 2), number=rng.randrange(1 << 16))
        for i, kind in enumerate(kinds)
    )


class Faulter:
    """Carries out a plan in one site.

    Args:
        site: Where.
        plan: What, in the order of ``at_turn``.
        num_done: Tells how many turns are over.
        stop_s: How long a stopped engine stands still.
    """

    def __init__(self, site: Site, plan: Sequence[PlannedFault], num_done: Callable[[], int], *, stop_s: float) -> None:
        self._site = site
        self._plan = plan
        self._num_done = num_done
        self._stop_s = stop_s
        self.done: list[DoneFault] = []

    async def run(self) -> None:
        """Do all of the plan; what was stopped or squeezed is as before when this ends or is cancelled."""
        began_s = asyncio.get_running_loop().time()
        async with asyncio.TaskGroup() as group:
            for fault in self._plan:
                while self._num_done() < fault.at_turn:  # noqa: ASYNC110 - the turns are tasks of their own
                    await asyncio.sleep(_POLL_S)
                engine = await self._busy_engine(fault)
                now_s = asyncio.get_running_loop().time() - began_s
                self.done.append(
                    DoneFault(
                        kind=fault.kind,
                        engine_id=engine.engine_id,
                        num_in_flight=self._in_flight(engine),
                        at_s=round(now_s, 2),
                    )
                )
                group.create_task(self._do(fault.kind, engine))
                await asyncio.sleep(0)

    async def _busy_engine(self, fault: PlannedFault) -> KeptEngine:
        """Return an engine that is well and has turns, as soon as there is one to which this can happen."""
        kinds = self._site.borrowed.values() if fault.kind in _OF_BORROWED else self._site.engines
        engines = list(kinds)
        first = fault.number % len(engines)
        order = engines[first:] + engines[:first]
        while not any(map(self._is_target, order)):  # noqa: ASYNC110 - as above
            await asyncio.sleep(_POLL_S)
        return next(filter(self._is_target, order))

    def _is_target(self, engine: KeptEngine) -> bool:
        return engine.is_well.is_set() and not engine.is_hurt and self._in_flight(engine) > 0

    def _in_flight(self, engine: KeptEngine) -> int:
        views = self._site.pool.snapshot().engines
        return sum(view.num_in_flight for view in views if view.engine_id == engine.engine_id)

    async def _do(self, kind: FaultKind, engine: KeptEngine) -> None:
        device_id = DeviceId(engine.engine_id)
        match kind:
            case FaultKind.KILL:
                engine.send(signal.SIGKILL)
            case FaultKind.STOP:
                await self._stop(engine)
            case FaultKind.REVOKE:
                self._site.lender.revoke(device_id, reason="fault")
            case FaultKind.ASK_BACK:
                self._site.lender.revoke(device_id, grace_s=self._site.lender.config.grace_s, reason="fault")
            case FaultKind.SQUEEZE:
                await self._squeeze(engine, device_id)

    async def _stop(self, engine: KeptEngine) -> None:
        engine.is_hurt = True
        engine.send(signal.SIGSTOP)
        try:
            await asyncio.sleep(self._stop_s)
        finally:
            engine.send(signal.SIGCONT)
            engine.is_hurt = False

    async def _squeeze(self, engine: KeptEngine, device_id: DeviceId) -> None:
        engine.is_hurt = True
        self._site.serving.use(device_id, _SQUEEZED_FRACTION)
        try:
            await asyncio.sleep(_SQUEEZE_S)
        finally:
            self._site.serving.use(device_id, 0.0)
            engine.is_hurt = False
