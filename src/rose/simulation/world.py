"""The parts of one simulated world: modelled engines of the job, serving engines with their load, the relay between them.

A world is built anew for each run; everything in it lives on one virtual loop. Strategies (``rose.simulation.strategies``) put
the parts together; nothing here decides.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import cached_property

import attrs

from rose.backends.paced.profiles import Profile, kv_pool_bytes, profile_named
from rose.simulation.batch import Batch
from rose.simulation.device import Device, Lane
from rose.simulation.engine import EngineConfig, ModelledEngine
from rose.simulation.links import RelayedSync, SharedLink
from rose.simulation.loop import LoopClock, VirtualLoop
from rose.simulation.outcome import ServingOutcome
from rose.simulation.scenario import Layout, Scenario, check_engines
from rose.simulation.serving_load import ServingPlan, serving_profile
from rose.simulation.serving_site import ServingFeed, hand_over, summarise
from rose.simulation.sharing import AloneRule
from rose.simulation.sync import sync_cost
from rose.types import EngineId

WARM_UP_S = 30.0
LOAD_PERIOD_S = 900.0
_JOB_CHUNK_TOKENS = 2048
_MAX_SEQS = 256
_STALL_SHARE = 0.5


@attrs.frozen
class ProfileTimes:
    """A profile as devices ask it, optionally slowed down to a share of the GPU."""

    profile: Profile
    share: float = 1.0

    @property
    def host_gap_s(self) -> float:
        """From a step's end until the next can be ready."""
        return self.profile.host_gap_s

    @property
    def kv_bytes_per_token(self) -> int:
        """On all GPUs of the engine together."""
        return self.profile.kv_bytes_per_token

    @cached_property
    def _step(self) -> Callable[[int, int, float, float], float]:
        return self.profile.fast_step()

    def step_s(self, num_prefill: int, num_decodes: int, context_tokens: int, positions: float) -> float:
        """Return the time of one step."""
        return self._step(num_prefill, num_decodes, context_tokens, positions) / self.share

    @cached_property
    def _growth_s(self) -> float:
        return (self._step(0, 1, 1_000_000, 0.0) - self._step(0, 1, 0, 0.0)) / 1e6 / self.share

    def growth_s(self, num_decodes: int) -> float:
        """Return by how much a pure decode step is longer than the one before it."""
        return self._growth_s * num_decodes


@attrs.define(eq=False)
class Held:
    """An engine that is not the job's own, for as long as it was held; ``overhead_s`` of that it could not work."""

    num_gpus: int
    since_s: float
    overhead_s: float
    until_s: float | None = None


@attrs.define(eq=False)
class World:
    """Everything that a strategy builds with.

    Attributes:
        started: Trajectory number -> when its first request reached an engine.
        guests: Engines that are not the job's own, those that left included.
        held: What they cost.
        windows: Phases of rollouts, ``(begin, end)``.
    """

    scenario: Scenario
    seed: int
    loop: VirtualLoop
    stall_s: float = 2.0
    started: dict[int, float] = attrs.field(factory=dict)
    dedicated: list[ModelledEngine] = attrs.field(factory=list)
    guests: list[ModelledEngine] = attrs.field(factory=list)
    feeds: list[ServingFeed] = attrs.field(factory=list)
    held: list[Held] = attrs.field(factory=list)
    windows: list[tuple[float, float]] = attrs.field(factory=list)

    @cached_property
    def clock(self) -> LoopClock:
        """The world's clock."""
        return LoopClock(self.loop)

    @cached_property
    def rollout(self) -> Profile:
        """Model and GPUs of a rollout engine."""
        return profile_named(self.scenario.rollout.profile)

    @cached_property
    def serving(self) -> Profile:
        """Model and GPUs of a serving engine."""
        return serving_profile(self.scenario.serving)

    @cached_property
    def num_dedicated(self) -> int:
        """Engines of the job."""
        return check_engines("cluster.rollout_gpus", self.scenario.cluster.rollout_gpus, self.rollout.num_gpus)

    @cached_property
    def num_lent(self) -> int:
        """Serving engines whose GPUs may be borrowed."""
        return check_engines("cluster.borrowed_gpus", self.scenario.cluster.borrowed_gpus, self.rollout.num_gpus)

    @cached_property
    def relay(self) -> RelayedSync:
        """The weights' way."""
        link, cluster = self.scenario.link, self.scenario.cluster
        cost = sync_cost(
            link.model or self.rollout.name.partition(":")[2],
            num_training_ranks=max(1, cluster.training_gpus),
            gpus_per_engine=self.rollout.num_gpus,
            changed_fraction=link.changed_fraction,
        )
        shared = SharedLink(gbps=link.gbps, latency_s=link.latency_s)
        return RelayedSync(run="sim", cost=cost, link=shared, local_gbps=link.local_gbps)

    @cached_property
    def plan(self) -> ServingPlan:
        """The serving load, engine by engine."""
        return ServingPlan.of(self.scenario.serving, duration_s=LOAD_PERIOD_S, seed=self.seed)

    # -- engines

    def job_batch(self, pool_bytes: float, *, reserves_growth: bool = False) -> Batch:
        """Return the batch of a rollout engine."""
        return Batch(
            max_seqs=_MAX_SEQS,
            kv_tokens=int(pool_bytes // self.rollout.kv_bytes_per_token),
            reserves_growth=reserves_growth,
        )

    def engine(
        self,
        name: str,
        lane: Lane,
        device: Device,
        *,
        is_local: bool,
        most_tokens: int | None = None,
        hides_kv: bool = False,
    ) -> ModelledEngine:
        """Return a rollout engine on ``lane``."""
        config = EngineConfig(
            resolution_tokens=self.scenario.rollout.resolution_tokens,
            flush_s=_STALL_SHARE * self.stall_s,
            is_local=is_local,
            refuses_above_tokens=most_tokens,
            hides_kv=hides_kv,
        )
        return ModelledEngine(
            EngineId(name),
            lane,
            device,
            config,
            relay=self.relay,
            version=self.relay.version,
            started=self.started,
        )

    def whole_engine(self, name: str, *, is_local: bool = True, hides_kv: bool = False) -> ModelledEngine:
        """Return a rollout engine that has its GPUs to itself."""
        pool_bytes = kv_pool_bytes(self.scenario.cluster.kv_memory_fraction, self.rollout)
        lane = Lane(
            name=name,
            batch=self.job_batch(pool_bytes),
            times=ProfileTimes(self.rollout),
            chunk_tokens=_JOB_CHUNK_TOKENS,
        )
        return self.engine(name, lane, alone(self.loop, lane), is_local=is_local, hides_kv=hides_kv)

    def serving_lane(self, name: str, pool_bytes: float, *, share: float = 1.0) -> Lane:
        """Return the step loop of a serving engine."""
        config = self.scenario.serving
        batch = Batch(
            max_seqs=config.max_seqs,
            kv_tokens=int(pool_bytes // self.serving.kv_bytes_per_token),
            has_cache=False,
        )
        return Lane(
            name=name,
            batch=batch,
            times=ProfileTimes(self.serving, share),
            chunk_tokens=config.chunk_tokens,
        )

    def feed(self, index: int, lane: Lane, on_change: Callable[[bool], None]) -> ServingFeed:
        """Send serving engine ``index`` its load."""
        feed = ServingFeed(
            lane,
            self.plan.engine(index),
            LOAD_PERIOD_S,
            on_change,
            api_overhead_s=self.scenario.serving.api_overhead_s,
        )
        self.feeds.append(feed)
        return feed

    def start_serving(self) -> None:
        """Let the load come; with prefill and decode apart, engines work in pairs."""
        if self.scenario.serving.layout is Layout.DISAGGREGATED:
            pair_up(self.feeds, self._transfer_s)
        for feed in self.feeds:
            feed.start()

    def _transfer_s(self, num_tokens: int) -> float:
        gbps = self.scenario.link.local_gbps * self.serving.num_gpus
        return num_tokens * self.serving.kv_bytes_per_token * 8 / (gbps * 1e9)

    def open_window(self) -> None:
        """Let serving's gaps between tokens count from now on."""
        for feed in self.feeds:
            feed.lane.keeps_gaps = True

    def close_window(self, begun_s: float) -> None:
        """End the phase of rollouts that began at ``begun_s``."""
        self.windows.append((begun_s, self.loop.time()))
        for feed in self.feeds:
            feed.lane.keeps_gaps = False

    def summarise(self) -> ServingOutcome | None:
        """Return what serving's users saw during the rollouts."""
        if not self.feeds:
            return None
        return summarise(
            self.feeds,
            self.windows,
            ttft_slo_s=self.scenario.serving.ttft_slo_s,
            tpot_slo_s=self.scenario.serving.tpot_slo_s,
            now_s=self.loop.time(),
        )

    # -- accounts

    def hold(self, overhead_s: float) -> Held:
        """Note that one more engine is held, and for how long it cannot work yet."""
        held = Held(self.rollout.num_gpus, self.loop.time(), overhead_s)
        self.held.append(held)
        return held

    def let_go(self, held: Held) -> None:
        """Note that an engine is given back."""
        if held.until_s is None:
            held.until_s = self.loop.time()


def alone(loop: asyncio.AbstractEventLoop, lane: Lane) -> Device:
    """Return a device that ``lane`` has to itself."""
    return Device(loop, AloneRule(lane))


def poker(device: Device) -> Callable[[bool], None]:
    """Return what a feed calls when a serving engine's requests changed, where nothing else has to know."""
    return lambda _has_started: device.poke()


def pair_up(feeds: Sequence[ServingFeed], transfer_s: Callable[[int], float]) -> None:
    """Let engines 0, 2, 4... prefill for their right neighbour, with the load of both; one left over does both itself."""
    for prefill, decode in zip(feeds[::2], feeds[1::2], strict=False):
        arrivals = sorted([*prefill.arrivals, *decode.arrivals], key=lambda arrival: arrival.at_s)
        prefill.arrivals, decode.arrivals = arrivals, ()
        hand_over(prefill, decode, transfer_s)
