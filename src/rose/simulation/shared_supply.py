"""Ways of supply in which serving keeps its GPUs: co-serving under leases, fixed partitions, switching models, whole idle GPUs.

What stands for a published system here is its rule alone, told in the class's docstring with what is assumed. None of them is
that system.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from functools import partial

import attrs

from rose.backends.paced.profiles import kv_pool_bytes
from rose.coserving.lender import LeaseChange, LeaseEvent, Lender
from rose.errors import ConfigError, EngineLostError
from rose.policies.admission import AdmissionConfig, Mode, Slo
from rose.policies.compute import ChunkConfig
from rose.policies.demand import DemandConfig, DemandTracker
from rose.policies.lending import LendingConfig
from rose.policies.memory import MemoryConfig, possible_budget
from rose.pool import Borrower, RolloutPool
from rose.simulation.device import Device, Lane
from rose.simulation.engine import ModelledEngine
from rose.simulation.guest_memory import MemoryRule
from rose.simulation.micro_profile import serving_p99_s
from rose.simulation.serving_load import capacity_rps
from rose.simulation.serving_site import ServingFeed
from rose.simulation.sharing import CoservingConfig, CoservingRule, SwitchRule, share_device, shared_poker
from rose.simulation.supply import Supply
from rose.simulation.world import Held, ProfileTimes, World, alone, poker
from rose.types import DeviceId, EngineId, EngineKind, JobId

_HEADROOM_BYTES = 2 << 30
_STEP_SHARE = 0.016 / 0.150
_LOAD_BYTES_PER_S = 25e9
_WAKE_S = 0.5
_LOAD_S = 0.1
_JOB = JobId("simulated")


def wake_s(world: World) -> float:
    """Return how long a pre-deployed model takes to become active: weights from host memory at 25 GB/s a GPU, and 0.5 s."""
    return _WAKE_S + world.rollout.weight_bytes / world.rollout.num_gpus / _LOAD_BYTES_PER_S


def check_pair(world: World) -> None:
    """Check that a rollout engine fits on a serving engine's GPUs.

    Raises:
        ConfigError: Their numbers of GPUs differ.
    """
    if world.rollout.num_gpus != world.serving.num_gpus:
        message = (
            f"rollout.profile = {world.rollout.name!r} takes {world.rollout.num_gpus} GPUs and serving.profile = "
            f"{world.serving.name!r} {world.serving.num_gpus}; an engine borrows the GPUs of one serving engine"
        )
        raise ConfigError(message)


@attrs.define(eq=False)
class SharedEngine:
    """A rollout engine beside a serving engine."""

    engine: ModelledEngine
    rule: CoservingRule
    held: Held | None = None


@attrs.define(eq=False)
class CoservingSupply(Supply):
    """The co-serving executor under leases: live lender, live borrower, live policies.

    Attributes:
        mode: How much of serving's slack is lent.
        memory_rule: How KV memory is shared.
        headroom_fraction: Of the KV pool, free for serving; ``None``: 2 GB a GPU.
        has_whole_chunks: Prefill in chunks of 512 tokens however long they take (the paper); otherwise a rollout step lasts at
            most 16 ms for a TPOT SLO of 150 ms, and in proportion.
        demand: How the job's demand is followed; ``None``: it holds all that it is granted for the whole phase.
    """

    mode: Mode = Mode.SLO
    memory_rule: MemoryRule = MemoryRule.HEADROOM
    headroom_fraction: float | None = None
    has_whole_chunks: bool = False
    demand: DemandConfig | None = attrs.field(factory=DemandConfig)
    _tracker: DemandTracker | None = None
    _parts: dict[DeviceId, SharedEngine] = attrs.field(factory=dict)
    _lender: Lender | None = None

    def build(self, world: World) -> None:
        """Make a serving engine and a rollout engine on each device that may be lent."""
        check_pair(world)
        for index in range(world.num_lent):
            self._parts[DeviceId(f"lent{index}")] = self._build_one(world, index)
        world.guests = [part.engine for part in self._parts.values()]
        self._lender = Lender(
            {device_id: part.rule.ledger for device_id, part in self._parts.items()},
            world.clock,
            LendingConfig(quota=world.num_lent),
            self.mode,
        )
        self._lender.subscribe(partial(self._account, world))
        self._tracker = None if self.demand is None else DemandTracker(self.demand)

    def _build_one(self, world: World, index: int) -> SharedEngine:
        pool_bytes = kv_pool_bytes(world.scenario.cluster.kv_memory_fraction, world.serving, world.rollout)
        headroom_bytes = _HEADROOM_BYTES * world.serving.num_gpus
        if self.headroom_fraction is not None:
            headroom_bytes = int(self.headroom_fraction * pool_bytes)
        memory = MemoryConfig(pool_bytes=pool_bytes, headroom_bytes=headroom_bytes)
        serving = world.scenario.serving
        step_s = math.inf if self.has_whole_chunks else _STEP_SHARE * serving.tpot_slo_s
        config = CoservingConfig(
            admission=AdmissionConfig(slo=Slo(ttft_s=serving.ttft_slo_s, tpot_s=serving.tpot_slo_s)),
            memory=memory,
            chunk=ChunkConfig(max_step_s=step_s),
            memory_rule=self.memory_rule,
        )
        owner = world.serving_lane(f"serving{index}", pool_bytes)
        guest = Lane(
            name=f"borrowed{index}",
            batch=world.job_batch(0, reserves_growth=True),
            times=ProfileTimes(world.rollout),
            chunk_tokens=config.chunk.max_tokens,
        )
        device, rule = share_device(world.loop, owner, guest, config, evict=lambda jobs: engine.evict(jobs))
        most_tokens = possible_budget(memory, math.inf) // world.rollout.kv_bytes_per_token
        engine = world.engine(guest.name, guest, device, is_local=False, most_tokens=most_tokens)
        world.feed(index, owner, shared_poker(device, rule)).on_answer = rule.note_answer
        return SharedEngine(engine, rule)

    @contextlib.asynccontextmanager
    async def lend(self, world: World, pool: RolloutPool) -> AsyncIterator[None]:
        """Borrow what the job has use for and the lender grants."""
        if self._lender is None or not self._parts:
            yield
            return
        for part in self._parts.values():
            part.rule.note_job_step()
        engines = {device_id: part.engine for device_id, part in self._parts.items()}
        async with Borrower(self._lender, pool, engines, job=_JOB, clock=world.clock, demand=self._tracker):
            yield

    def _account(self, world: World, event: LeaseEvent) -> None:
        """Keep a device's account; whenever it is granted its model has to become active."""
        part = self._parts[event.lease.device_id]
        if event.change is LeaseChange.GRANTED:
            part.engine.asleep_s = wake_s(world)
            part.held = world.hold(part.engine.asleep_s)
        elif event.change not in (LeaseChange.RENEWED, LeaseChange.REVOKING) and part.held is not None:
            world.let_go(part.held)


@contextlib.asynccontextmanager
async def _whole_phase(world: World, pool: RolloutPool, engines: list[ModelledEngine]) -> AsyncIterator[None]:
    """Let engines be in the pool for a whole phase, from when their model is loaded."""
    held = [world.hold(wake_s(world)) for _ in engines]

    async def join(engine: ModelledEngine) -> None:
        await asyncio.sleep(wake_s(world))
        await pool.add_engine(engine, EngineKind.BORROWED)

    try:
        async with asyncio.TaskGroup() as group:
            joins = [group.create_task(join(engine)) for engine in engines]
            try:
                yield
            finally:
                for task in joins:
                    task.cancel()
    finally:
        for each in held:
            world.let_go(each)
        await asyncio.gather(*(_take_out(pool, engine) for engine in engines))


async def _take_out(pool: RolloutPool, engine: ModelledEngine) -> None:
    with contextlib.suppress(EngineLostError):  # it has not joined yet
        await pool.remove_engine(engine.engine_id, "the phase is over")


@attrs.define(eq=False)
class PartitionSupply(Supply):
    """A fixed split of each GPU between serving and rollouts: compute and KV memory by the same share, all the time.

    Assumed: a step on a share s of a GPU takes 1/s of its time. With ``is_profiled`` the share is chosen for each serving engine
    by a micro-profile before the job (in the manner of Ekya): serving alone on the rest, for one minute of its load, must keep
    nine tenths of its SLO at P99; the largest share of a list that passes is taken.
    """

    share: float = 0.5
    is_profiled: bool = False
    _engines: list[ModelledEngine] = attrs.field(factory=list)

    def build(self, world: World) -> None:
        """Make both engines of each device, each on its own share."""
        check_pair(world)
        share = self.slot_share = profiled_share(world) if self.is_profiled else self.share
        pool_bytes = kv_pool_bytes(world.scenario.cluster.kv_memory_fraction, world.serving, world.rollout)
        for index in range(world.num_lent):
            owner = world.serving_lane(f"serving{index}", pool_bytes * (1 - share), share=1 - share)
            device = alone(world.loop, owner)
            world.feed(index, owner, poker(device))
            lane = Lane(
                name=f"part{index}",
                batch=world.job_batch(pool_bytes * share),
                times=ProfileTimes(world.rollout, share),
                chunk_tokens=512,
            )
            self._engines.append(world.engine(lane.name, lane, alone(world.loop, lane), is_local=False))
        world.guests = list(self._engines)

    @contextlib.asynccontextmanager
    async def lend(self, world: World, pool: RolloutPool) -> AsyncIterator[None]:
        """Let every rollout part work."""
        async with _whole_phase(world, pool, self._engines):
            yield


_SHARES = (0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1)
_PROFILE_S = 60.0
_PROFILE_MARGIN = 0.9


def profiled_share(world: World) -> float:
    """Return the largest share of ``_SHARES`` beside which the first serving engine keeps nine tenths of its SLO for a minute."""
    config = world.scenario.serving
    for share in _SHARES:
        ttft_s, tpot_s = serving_p99_s(world.scenario, world.seed, speed=1 - share, duration_s=_PROFILE_S)
        if ttft_s <= _PROFILE_MARGIN * config.ttft_slo_s and tpot_s <= _PROFILE_MARGIN * config.tpot_slo_s:
            return share
    return _SHARES[-1]


@attrs.define(eq=False)
class SwitchSupply(Supply):
    """One model on the GPU at a time, switched by demand (in the manner of ServerlessLLM, or of Prism with ``is_resident``).

    Assumed: loading a model takes its weights from host memory at 25 GB/s a GPU and 0.1 s; the rollout model comes in when
    serving is idle, or when its requests have waited ``patience_s``, and stays until one of serving's has waited its TTFT SLO.
    Then its KV memory is given up, its requests compute their prefixes again. With ``is_resident`` both models' weights stay, so that
    nothing is loaded, and both share one pool of KV memory. Such an engine is given a fiftieth
    of the trajectories of one of the job's own.
    """

    patience_s: float = 1.5
    is_resident: bool = False
    slot_share: float = 0.02
    _engines: list[ModelledEngine] = attrs.field(factory=list)

    def build(self, world: World) -> None:
        """Make both engines of each device."""
        check_pair(world)
        fraction = world.scenario.cluster.kv_memory_fraction
        load_s = [_LOAD_S + p.weight_bytes / p.num_gpus / _LOAD_BYTES_PER_S for p in (world.serving, world.rollout)]
        for index in range(world.num_lent):
            owner = world.serving_lane(f"serving{index}", kv_pool_bytes(fraction, world.serving))
            resident = (world.serving, world.rollout) if self.is_resident else (world.rollout,)
            guest = Lane(
                name=f"switched{index}",
                batch=world.job_batch(kv_pool_bytes(fraction, *resident)),
                times=ProfileTimes(world.rollout),
                chunk_tokens=2048,
            )
            rule = SwitchRule(
                owner,
                guest,
                load_owner_s=0.0 if self.is_resident else load_s[0],
                load_guest_s=0.0 if self.is_resident else load_s[1],
                patience_s=self.patience_s,
                wait_s=world.scenario.serving.ttft_slo_s,
            )
            device = Device(world.loop, rule)
            self._engines.append(world.engine(guest.name, guest, device, is_local=False))
            world.feed(index, owner, poker(device))
        world.guests = list(self._engines)

    @contextlib.asynccontextmanager
    async def lend(self, world: World, pool: RolloutPool) -> AsyncIterator[None]:
        """Let the rollout models come in when serving is idle."""
        async with _whole_phase(world, pool, self._engines):
            yield


@attrs.define(eq=False)
class WholeSupply(Supply):
    """Whole idle GPUs, lent and taken back (in the manner of Lyra).

    Assumed: once a minute serving keeps as many engines as its arrivals of the last minute need at ``target_load`` of their
    capacity, at least one; the others' requests go to those, and a GPU whose requests are done is lent after ``boot_s``. GPUs
    are taken back at once when more are needed; serving's model needs ``boot_s`` to come back.
    """

    target_load: float = 0.7
    boot_s: float = 20.0
    period_s: float = 60.0
    _feeds: list[ServingFeed] = attrs.field(factory=list)
    _lent: dict[int, asyncio.Task[None]] = attrs.field(factory=dict)
    _back_s: dict[int, float] = attrs.field(factory=dict)
    _lives: int = 0

    def build(self, world: World) -> None:
        """Make the serving engines."""
        fraction = world.scenario.cluster.kv_memory_fraction
        for index in range(world.num_lent):
            owner = world.serving_lane(f"serving{index}", kv_pool_bytes(fraction, world.serving))
            device = alone(world.loop, owner)
            self._feeds.append(world.feed(index, owner, poker(device)))

    @contextlib.asynccontextmanager
    async def lend(self, world: World, pool: RolloutPool) -> AsyncIterator[None]:
        """Lend what the last minute left idle, minute by minute."""
        async with asyncio.TaskGroup() as group:
            task = group.create_task(self._follow(world, pool, group))
            try:
                yield
            finally:
                task.cancel()
                for index in list(self._lent):
                    self._lent.pop(index).cancel()
                self._redirect(world.loop.time())

    async def _follow(self, world: World, pool: RolloutPool, group: asyncio.TaskGroup) -> None:
        capacity = capacity_rps(world.serving)
        while True:
            rate = sum(feed.rate_rps(self.period_s) for feed in self._feeds)
            num_kept = min(len(self._feeds), max(1, math.ceil(rate / (self.target_load * capacity))))
            for index in range(len(self._feeds) - 1, -1, -1):
                if index >= num_kept and index not in self._lent:
                    self._lent[index] = group.create_task(self._lend_one(world, pool, index))
                elif index < num_kept and index in self._lent:
                    self._lent.pop(index).cancel()
            self._redirect(world.loop.time())
            await asyncio.sleep(self.period_s)

    def _redirect(self, now_s: float) -> None:
        """Send the requests of engines whose model is not on its GPU to the others."""
        here = [
            feed
            for index, feed in enumerate(self._feeds)
            if index not in self._lent and now_s >= self._back_s.get(index, 0.0)
        ]
        for index, feed in enumerate(self._feeds):
            feed.redirect = None if feed in here else here[index % len(here)]

    async def _lend_one(self, world: World, pool: RolloutPool, index: int) -> None:
        feed = self._feeds[index]
        held: Held | None = None
        engine_id: EngineId | None = None
        self._lives += 1
        try:
            while len(feed.lane.batch):  # noqa: ASYNC110 - virtual time costs nothing
                await asyncio.sleep(0.5)
            held = world.hold(self.boot_s)
            await asyncio.sleep(self.boot_s)
            engine = world.whole_engine(f"whole{index}.{self._lives}", is_local=False)
            engine_id = engine.engine_id
            world.guests.append(engine)
            await pool.add_engine(engine, EngineKind.BORROWED)
            await asyncio.get_running_loop().create_future()
        finally:
            if held is not None:
                world.let_go(held)
                self._back_s[index] = back_s = world.loop.time() + self.boot_s
                world.loop.call_at(back_s, self._redirect, back_s)
            self._redirect(world.loop.time())
            if engine_id is not None:
                with contextlib.suppress(EngineLostError):
                    await pool.remove_engine(engine_id, "serving takes its GPU back", timeout_s=0.0)
