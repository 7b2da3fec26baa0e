"""A recorded live run, simulated: the same arrivals, trajectories, devices and settings, with modelled engines in place of real ones."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator

import attrs

from rose.backends.paced.profiles import Profile, profile_named
from rose.coserving.lender import Lender
from rose.errors import ConfigError
from rose.policies.admission import Mode
from rose.policies.memory import possible_budget
from rose.policies.routing import RoutingConfig
from rose.pool import Borrower, PoolConfig, RolloutPool
from rose.simulation.batch import Batch
from rose.simulation.device import Device, Lane
from rose.simulation.engine import EngineConfig, ModelledEngine
from rose.simulation.loop import LoopClock, VirtualLoop, new_loop
from rose.simulation.rollouts import TrajectoryRecord, TrajectoryRunner, TrajectorySlots
from rose.simulation.run_record import DeviceRecord, RunRecord
from rose.simulation.serving_site import Answer, ServingFeed
from rose.simulation.sharing import AloneRule, CoservingConfig, CoservingRule, share_device, shared_poker
from rose.simulation.traces import Arrival
from rose.simulation.trajectories import TrajectoryPlan, TurnPlan
from rose.simulation.world import ProfileTimes
from rose.types import DeviceId, EngineId, JobId

_DRAIN_POLL_S = 0.05
_SETTLE_S = 5.0  # live budgets have grown before a run begins


@attrs.frozen(kw_only=True)
class RunPrediction:
    """What the simulation says of one arm.

    Attributes:
        requests: What each serving request saw, those answered by the end.
        rollout_s: To the end of the last trajectory; ``None`` without rollouts.
        num_tokens: Modelled tokens of the trajectories.
        borrowed_tokens: Of those, made on borrowed engines.
        window_tokens: Made by the end of the serving load, on all engines.
    """

    requests: tuple[Answer, ...]
    rollout_s: float | None
    num_tokens: int
    borrowed_tokens: int
    window_tokens: int


def simulate_run(
    record: RunRecord,
    arm: str,
    *,
    serving: Profile | None = None,
    rollout: Profile | None = None,
    api_overhead_s: float = 0.0,
    missed_turns: float = 0.0,
    seed: int = 0,
) -> RunPrediction:
    """Simulate one arm of a recorded run.

    Args:
        record: The run.
        arm: One of its arms.
        serving: Profile in place of the record's, a fitted one for instance.
        rollout: The same for rollout engines.
        api_overhead_s: What a serving engine's front end adds to each first token.
        missed_turns: See ``CoservingConfig``.
        seed: Of the pool's jitter.

    Raises:
        ConfigError: The record has no such arm.
    """
    runs = [run for run in record.runs if run.arm == arm]
    if not runs:
        message = f"the run has no arm {arm!r}; it has {', '.join(record.arms)}"
        raise ConfigError(message)
    loop = new_loop()
    replay = _Replay(
        record=record,
        loop=loop,
        serving=serving or profile_named(record.serving.profile),
        rollout=rollout or profile_named(record.rollout.profile),
        api_overhead_s=api_overhead_s,
        missed_turns=missed_turns,
        mode=runs[0].mode,
        has_rollouts=any(run.rollout_s is not None for run in runs),
    )
    return loop.run(replay.play(seed))


@attrs.define(eq=False, kw_only=True)
class _Replay:
    record: RunRecord
    loop: VirtualLoop
    serving: Profile
    rollout: Profile
    api_overhead_s: float
    missed_turns: float
    mode: Mode | None
    has_rollouts: bool
    started: dict[int, float] = attrs.field(factory=dict)
    dedicated: list[ModelledEngine] = attrs.field(factory=list)
    borrowed: dict[DeviceId, ModelledEngine] = attrs.field(factory=dict)
    rules: dict[DeviceId, CoservingRule] = attrs.field(factory=dict)
    feeds: list[ServingFeed] = attrs.field(factory=list)

    async def play(self, seed: int) -> RunPrediction:
        for device in self.record.devices:
            if device.serving_engine is None:
                self._add_dedicated(device)
            else:
                self._add_shared(device)
        clock = LoopClock(self.loop)
        cap = self.record.rollout.cap_per_engine
        slots = TrajectorySlots(None)
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=cap))
        pool = RolloutPool(
            self.dedicated if self.has_rollouts else [], config=config, clock=clock, on_event=slots.hear, seed=seed
        )
        async with pool, self._borrowing(pool, clock), asyncio.TaskGroup() as tasks:
            begun_s = self.loop.time()
            for feed in self.feeds:
                feed.start()
            window = tasks.create_task(self._tokens_at(begun_s + self.record.window_s))
            records = await self._roll_out(pool, slots) if self.has_rollouts else []
            rollout_s = self.loop.time() - begun_s if records else None
            window_tokens = await window
            for feed in self.feeds:
                feed.stop()
            while any(len(feed.lane.batch) for feed in self.feeds):  # noqa: ASYNC110 - virtual time costs nothing
                await asyncio.sleep(_DRAIN_POLL_S)
        return RunPrediction(
            requests=tuple(answer for feed in self.feeds for answer in feed.answers),
            rollout_s=rollout_s,
            num_tokens=sum(record.num_tokens for record in records) * self.record.tokens_per_token,
            borrowed_tokens=sum(engine.num_tokens for engine in self.borrowed.values()),
            window_tokens=window_tokens,
        )

    async def _roll_out(self, pool: RolloutPool, slots: TrajectorySlots) -> list[TrajectoryRecord]:
        longest = max(turn.output_tokens for script in self.record.trajectories for turn in script.turns)
        runner = TrajectoryRunner(
            generate=pool.generate,
            started=self.started,
            resolution_tokens=1,
            max_turn_tokens=longest,
            slots=slots,
            asks_exactly=True,
        )
        return await runner.run_all(self._plans())

    def _plans(self) -> list[TrajectoryPlan]:
        return [
            TrajectoryPlan(
                trajectory_id=script.trajectory_id,
                group_id=script.group_id,
                turns=tuple(TurnPlan(turn.new_tokens, turn.output_tokens, turn.env_s) for turn in script.turns),
            )
            for script in self.record.trajectories
        ]

    @contextlib.asynccontextmanager
    async def _borrowing(self, pool: RolloutPool, clock: LoopClock) -> AsyncIterator[None]:
        if self.mode is None:
            yield
            return
        ledgers = {device_id: rule.ledger for device_id, rule in self.rules.items()}
        async with Borrower(
            Lender(ledgers, clock, mode=self.mode), pool, self.borrowed, job=JobId("replay"), clock=clock
        ):
            await asyncio.sleep(_SETTLE_S)
            yield

    async def _tokens_at(self, at_s: float) -> int:
        await asyncio.sleep(at_s - self.loop.time())
        for engine in (*self.dedicated, *self.borrowed.values()):
            await engine.snapshot()
        return sum(engine.num_tokens for engine in (*self.dedicated, *self.borrowed.values()))

    def _add_dedicated(self, device: DeviceRecord) -> None:
        lane = self._rollout_lane(device.rollout_engine, self.record.memory.pool_bytes)
        self.dedicated.append(self._engine(lane, Device(self.loop, AloneRule(lane))))

    def _add_shared(self, device: DeviceRecord) -> None:
        record, setup = self.record, self.record.serving
        pool_bytes = record.memory.pool_bytes
        owner = Lane(
            name=device.serving_engine or device.name,
            batch=Batch(
                max_seqs=setup.max_seqs, kv_tokens=pool_bytes // self.serving.kv_bytes_per_token, has_cache=False
            ),
            times=ProfileTimes(self.serving),
            chunk_tokens=setup.chunk_tokens,
        )
        guest = self._rollout_lane(device.rollout_engine, 0, reserves_growth=True)
        config = CoservingConfig(
            admission=record.admission,
            memory=record.memory,
            chunk=record.rollout.chunk,
            missed_turns=self.missed_turns,
        )
        shared, rule = share_device(self.loop, owner, guest, config, evict=lambda jobs: engine.evict(jobs))
        most = possible_budget(record.memory, math.inf) // guest.times.kv_bytes_per_token
        engine = self._engine(guest, shared, most_tokens=most)
        self.borrowed[DeviceId(device.name)] = engine
        self.rules[DeviceId(device.name)] = rule
        arrivals = [Arrival(a.at_s, a.prompt_tokens, a.output_tokens) for a in record.arrivals[device.name]]
        feed = ServingFeed(owner, arrivals, math.inf, shared_poker(shared, rule), api_overhead_s=self.api_overhead_s)
        feed.on_answer = rule.note_answer
        self.feeds.append(feed)

    def _rollout_lane(self, name: str, pool_bytes: float, *, reserves_growth: bool = False) -> Lane:
        setup, times = self.record.rollout, ProfileTimes(self.rollout)
        batch = Batch(
            max_seqs=setup.max_seqs,
            kv_tokens=int(pool_bytes // times.kv_bytes_per_token),
            reserves_growth=reserves_growth,
        )
        return Lane(name=name, batch=batch, times=times, chunk_tokens=setup.chunk.max_tokens)

    def _engine(self, lane: Lane, device: Device, *, most_tokens: int | None = None) -> ModelledEngine:
        config = EngineConfig(resolution_tokens=1, flush_s=1.0, refuses_above_tokens=most_tokens)
        return ModelledEngine(EngineId(lane.name), lane, device, config, started=self.started)
