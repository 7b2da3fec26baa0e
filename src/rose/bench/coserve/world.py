"""One shared device in virtual time: a serving engine under a list of arrivals, and a rollout engine that always has work.

Everything but the loads is what production runs or the simulator already has: the device with its step loops, the co-serving rule that
asks the live policies, the batches. What is counted:

* Serving: each request's TTFT and TPOT (mean over its gaps), and each gap between two decode steps times the tokens it was
  a gap of. Nothing of the warm-up counts.
* Rollouts: see ``rose.bench.coserve.rollouts``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Sequence
from enum import Enum
from random import Random

import attrs
from attrs import validators as v

from rose.backends.paced.profiles import Profile, kv_pool_bytes, profile_named
from rose.bench.coserve.rollouts import PriorityBatch, PriorityLane, Rollouts, share_out
from rose.interfaces.device import StepWork
from rose.policies.admission import AdmissionConfig, Budget, Mode, Slo
from rose.policies.compute import ChunkConfig
from rose.policies.memory import MemoryConfig, possible_budget
from rose.simulation.batch import Batch, Job
from rose.simulation.device import Device, Idle, Lane, Rule, Turn
from rose.simulation.guest_memory import MemoryRule
from rose.simulation.loop import VirtualLoop, new_loop
from rose.simulation.serving_load import MAX_REQUEST_TOKENS
from rose.simulation.serving_site import Answer, ServingFeed
from rose.simulation.sharing import AloneRule, CoservingConfig, CoservingRule, shared_poker
from rose.simulation.traces import Arrival
from rose.simulation.world import ProfileTimes, alone, poker

_PAPER_HEADROOM = 0.2
_SHARE = 0.5


class CoservePolicy(Enum):
    """How a device is shared."""

    ALONE = "alone"  # serving has it to itself: the reference
    DEDICATED = "dedicated"  # the rollout engine has it to itself: what lent tokens are measured against
    UNGATED = "ungated"  # first come, first served, at step boundaries
    STATIC = "static"  # a fixed half of compute and memory each
    PRIORITY = "priority"  # rollouts of serving's own model in serving's batch, after all of serving's requests
    PAPER = "paper"  # the published rules
    SLO = "slo"
    QUIET = "quiet"


_MODES = {
    CoservePolicy.UNGATED: Mode.UNGATED,
    CoservePolicy.PAPER: Mode.PAPER,
    CoservePolicy.SLO: Mode.SLO,
    CoservePolicy.QUIET: Mode.QUIET,
}


@attrs.frozen(kw_only=True)
class DeviceSetup:
    """The device, its two engines and how far guesses of step times may be off.

    Attributes:
        serving, rollout: Profiles.
        admission: Serving's promise and how it is spent.
        chunk: Bounds of a rollout step.
        kv_memory_fraction: Of the GPU's memory, for weights and KV.
        headroom_bytes: Of the KV pool, free for serving.
        serving_chunk_tokens, serving_max_seqs: Of the serving engine.
        num_slots: Trajectories in flight in the rollout engine.
        workload: Of the trajectories, see ``rose.simulation.trajectories``.
        first_prompt_tokens: Of a trajectory, instead of the workload's own.
        max_turn_tokens: Longest answer of a turn.
        growth_tokens: What each trajectory is expected to grow by, kept free when one comes in.
        job_step_s: A step of the RL job: as long a cut budget of the published memory rule stays frozen.
        noise_fraction: Standard deviation of a step's time relative to its mean.
        guess_ratio: The profile's guesses relative to the truth; 0.5 is a profile that is 50 % too low.
        warm_up_s: Not counted.
    """

    serving: str = "h100:qwen2.5-7b"
    rollout: str = "h100:qwen3-8b"
    admission: AdmissionConfig = attrs.field(factory=AdmissionConfig)
    chunk: ChunkConfig = attrs.field(factory=ChunkConfig)
    kv_memory_fraction: float = attrs.field(default=0.9, validator=[v.gt(0), v.le(1)])
    headroom_bytes: int = attrs.field(default=1 << 30, validator=v.ge(0))
    serving_chunk_tokens: int = attrs.field(default=2048, validator=v.ge(64))
    serving_max_seqs: int = attrs.field(default=256, validator=v.ge(1))
    num_slots: int = attrs.field(default=16, validator=v.ge(1))
    workload: str = "swe"
    first_prompt_tokens: int = attrs.field(default=4096, validator=v.ge(1))
    max_turn_tokens: int = attrs.field(default=512, validator=v.ge(1))
    growth_tokens: int = attrs.field(default=4096, validator=v.ge(0))
    job_step_s: float = attrs.field(default=480.0, validator=v.gt(0))
    noise_fraction: float = attrs.field(default=0.0, validator=[v.ge(0), v.lt(1)])
    guess_ratio: float = attrs.field(default=1.0, validator=v.gt(0))
    warm_up_s: float = attrs.field(default=30.0, validator=v.ge(0))

    @property
    def slo(self) -> Slo:
        """What serving promises."""
        return self.admission.slo


@attrs.frozen(kw_only=True)
class Observed:
    """What one run showed, without its warm-up. Seconds, tokens.

    Attributes:
        answers: In order of arrival.
        gaps: ``(seconds between two tokens, tokens)`` of serving.
        yields_s: For arrivals at a serving engine without requests, while the guest had the device or could: until
            the prefill began.
        idle_s: Time during which serving had no request.
        net_tokens, decoded_tokens, thrown_tokens, num_evicted: Of the rollouts, see there.
        idle_used_s: Of it, the guest's (its steps and the host gaps after them).
        num_held_for_kv: Serving steps whose memory the guest still had, although serving's own use would have fitted.
    """

    answers: tuple[Answer, ...]
    gaps: tuple[tuple[float, int], ...]
    duration_s: float
    net_tokens: int = 0
    decoded_tokens: int = 0
    thrown_tokens: int = 0
    num_evicted: int = 0
    num_held_for_kv: int = 0
    yields_s: tuple[float, ...] = ()
    idle_s: float = 0.0
    idle_used_s: float = 0.0
    serving_busy_s: float = 0.0
    rollout_busy_s: float = 0.0
    kv_peak_fraction: float = 0.0


@attrs.define(eq=False)
class _Watch:
    """A rule that is looked over the shoulder: who had the device when, and how long an arrival waited for it."""

    rule: Rule
    owner: Lane
    guest: Lane | None
    pool_bytes: float
    yields_s: list[float] = attrs.field(factory=list)
    guest_spans: list[tuple[float, float]] = attrs.field(factory=list)
    num_held_for_kv: int = 0
    _arrived_s: float | None = None
    _begun_s: float = 0.0

    def choose(self, now_s: float) -> Turn | Idle:
        word = self.rule.choose(now_s)
        if isinstance(word, Turn):
            self._begun_s = now_s
            if word.lane is self.owner:
                if self._arrived_s is not None:
                    self.yields_s.append(now_s - self._arrived_s)
                    self._arrived_s = None
                self._check_memory()
        return word

    def _check_memory(self) -> None:
        if self.guest is None:
            return
        owner, guest = self.owner, self.guest
        num_new = owner.batch.num_decodes + min(owner.chunk_tokens, owner.batch.prompt_tokens_left)
        own_bytes = (owner.batch.kv_tokens_used + num_new) * owner.times.kv_bytes_per_token
        guest_bytes = guest.batch.kv_tokens_used * guest.times.kv_bytes_per_token
        if own_bytes <= self.pool_bytes < own_bytes + guest_bytes:
            self.num_held_for_kv += 1

    def note_step(self, lane: Lane, now_s: float) -> None:
        if lane is self.guest:
            self.guest_spans.append((self._begun_s, now_s + lane.times.host_gap_s))
        self.rule.note_step(lane, now_s)

    def note_arrival(self, now_s: float) -> None:
        """Hear of a prompt before it is in the batch."""
        if self.guest is not None and not len(self.owner.batch) and len(self.guest.batch):
            self._arrived_s = now_s


def longest_step_s(setup: DeviceSetup) -> float:
    """Return the longest rollout step that the policies let start: full memory, every slot decoding, one granule of a prompt."""
    profile = profile_named(setup.rollout)
    tokens = possible_budget(MemoryConfig(pool_bytes=kv_pool(setup), headroom_bytes=setup.headroom_bytes), math.inf)
    tokens //= profile.kv_bytes_per_token
    work = StepWork(
        setup.chunk.granule_tokens, setup.num_slots, tokens, setup.chunk.granule_tokens * MAX_REQUEST_TOKENS
    )
    return max(setup.chunk.max_step_s, profile.step_s(work))


def kv_pool(setup: DeviceSetup) -> int:
    """Return the KV memory of a device that holds both models, in bytes."""
    return kv_pool_bytes(setup.kv_memory_fraction, profile_named(setup.serving), profile_named(setup.rollout))


@attrs.define(eq=False)
class Site:
    """What one policy makes of a device: its lanes, and what to call when serving's requests changed."""

    loop: VirtualLoop
    owner: Lane | None
    guest: Lane | None
    poke: Callable[[bool], None]
    watch: _Watch | None
    rollouts: Rollouts | None
    job_step: Callable[[], None] = lambda: None
    note_answer: Callable[[Job, float], None] | None = None
    devices: tuple[Device, ...] = ()


def run_case(
    setup: DeviceSetup, policy: CoservePolicy, arrivals: Sequence[Arrival], *, duration_s: float, seed: int
) -> Observed:
    """Run one policy on one list of arrivals.

    Args:
        setup: The device.
        policy: How it is shared.
        arrivals: Over the warm-up and ``duration_s`` after it; later ones are left out.
        duration_s: What counts.
        seed: Of the trajectories and the noise.

    Raises:
        ConfigError: The SLO leaves no room for serving's prefill chunk, or a profile is not known.
    """
    loop = new_loop()
    return loop.run(_run(loop, setup, policy, arrivals, duration_s, seed))


async def _run(
    loop: VirtualLoop,
    setup: DeviceSetup,
    policy: CoservePolicy,
    arrivals: Sequence[Arrival],
    duration_s: float,
    seed: int,
) -> Observed:
    site = build_site(loop, setup, policy, seed)
    begin_s, end_s = setup.warm_up_s, setup.warm_up_s + duration_s
    feed = None
    if site.owner is not None:
        feed = WatchedFeed(site, tuple(arrival for arrival in arrivals if arrival.at_s < end_s), math.inf)
        feed.start()
        if isinstance(site.owner.batch, PriorityBatch) and site.rollouts is not None:
            share_out(site.owner, feed, site.rollouts)
    poke_all(site)
    await asyncio.sleep(begin_s)
    before = reading(site)
    if site.owner is not None:
        site.owner.keeps_gaps = True
    site.job_step()
    while loop.time() < end_s:
        await asyncio.sleep(min(setup.job_step_s, end_s - loop.time()))
        site.job_step()
    for device in site.devices:
        device.fold()
    return observe(site, feed, before, begin_s, end_s)


class WatchedFeed(ServingFeed):
    """A feed that knows when its engine had no requests, and tells of a prompt before the engine hears of it."""

    def __init__(self, site: Site, arrivals: Sequence[Arrival], period_s: float) -> None:
        """Feed the serving engine of ``site``; arguments as of ``ServingFeed``."""
        if site.owner is None:
            message = "a site without a serving engine takes no requests"
            raise ValueError(message)
        super().__init__(site.owner, arrivals, period_s, site.poke, on_answer=site.note_answer)
        self.watch = site.watch
        self.idle_spans: list[tuple[float, float]] = []
        self._idle_since_s: float | None = 0.0
        self.kv_peak_tokens = 0

    def take(self, job: Job) -> None:
        """Take a request in."""
        now_s = self._loop.time()
        if self.watch is not None:
            self.watch.note_arrival(now_s)
        if self._idle_since_s is not None:
            self.idle_spans.append((self._idle_since_s, now_s))
            self._idle_since_s = None
        super().take(job)

    def hear(self, started: list[Job], ended: list[Job], now_s: float) -> None:
        """Note first and last tokens."""
        super().hear(started, ended, now_s)
        self.kv_peak_tokens = max(self.kv_peak_tokens, self.lane.batch.kv_tokens_used)
        if ended and not self._open:
            self._idle_since_s = now_s

    def close(self, now_s: float) -> None:
        """End a span of idle time that still lasts."""
        if self._idle_since_s is not None:
            self.idle_spans.append((self._idle_since_s, now_s))


def poke_all(site: Site) -> None:
    """Let the devices of a site look for work."""
    for device in site.devices:
        device.poke()


def reading(site: Site) -> tuple[float, ...]:
    """Return the counters of a site at this moment."""
    rollouts, owner, guest = site.rollouts, site.owner, site.guest
    counts = (0, 0, 0, 0) if rollouts is None else rollouts.counts()
    return (*counts, 0.0 if owner is None else owner.busy_s, 0.0 if guest is None else guest.busy_s)


def observe(
    site: Site,
    feed: WatchedFeed | None,
    before: tuple[float, ...],
    begin_s: float,
    end_s: float,
) -> Observed:
    """Return what a site showed since ``begin_s``, when its counters were ``before``."""
    after = reading(site)
    net, decoded, thrown, evicted, serving_s, rollout_s = (b - a for a, b in zip(before, after, strict=True))
    answers: tuple[Answer, ...] = ()
    gaps: tuple[tuple[float, int], ...] = ()
    idle_s = idle_used_s = peak = 0.0
    watch = site.watch
    if feed is not None and site.owner is not None:
        feed.close(end_s)
        seen = [answer for answer in (*feed.answers, *feed.unanswered(end_s)) if begin_s <= answer.arrived_s < end_s]
        answers = tuple(sorted(seen, key=lambda answer: (answer.arrived_s, answer.ttft_s)))
        gaps = tuple(site.owner.gaps)
        idle = [(max(a, begin_s), b) for a, b in feed.idle_spans if b > begin_s]
        idle_s = sum(b - a for a, b in idle)
        idle_used_s = 0.0 if watch is None else _overlap_s(idle, watch.guest_spans)
        peak = feed.kv_peak_tokens / site.owner.batch.kv_tokens
    return Observed(
        answers=answers,
        gaps=gaps,
        duration_s=end_s - begin_s,
        net_tokens=int(net),
        decoded_tokens=int(decoded),
        thrown_tokens=int(thrown),
        num_evicted=int(evicted),
        num_held_for_kv=0 if watch is None else watch.num_held_for_kv,
        yields_s=() if watch is None else tuple(watch.yields_s),
        idle_s=idle_s,
        idle_used_s=idle_used_s,
        serving_busy_s=serving_s,
        rollout_busy_s=rollout_s,
        kv_peak_fraction=peak,
    )


def _overlap_s(first: Sequence[tuple[float, float]], second: Sequence[tuple[float, float]]) -> float:
    """Return how long both of two sorted lists of spans hold."""
    total, j = 0.0, 0
    for begin, end in first:
        while j < len(second) and second[j][1] <= begin:
            j += 1
        k = j
        while k < len(second) and second[k][0] < end:
            total += max(0.0, min(end, second[k][1]) - max(begin, second[k][0]))
            k += 1
    return total


def build_site(loop: VirtualLoop, setup: DeviceSetup, policy: CoservePolicy, seed: int) -> Site:
    """Return the lanes of one device as ``policy`` has them.

    Raises:
        ConfigError: The SLO leaves no room for serving's prefill chunk, or a profile is not known.
    """
    if policy is CoservePolicy.ALONE:
        owner = _owner(setup, kv_pool(setup), seed)
        device = alone(loop, owner)
        return Site(loop, owner, None, poker(device), None, None, devices=(device,))
    if policy is CoservePolicy.DEDICATED:
        guest, device, rollouts = _alone_rollouts(loop, setup, seed)
        return Site(loop, None, guest, lambda _: None, None, rollouts, devices=(device,))
    if policy is CoservePolicy.STATIC:
        pool_bytes = int(kv_pool(setup) * (1 - _SHARE))
        owner = _owner(setup, pool_bytes, seed, share=1 - _SHARE)
        guest, device, rollouts = _alone_rollouts(loop, setup, seed, share=_SHARE, pool_bytes=pool_bytes)
        own_device = alone(loop, owner)
        return Site(loop, owner, guest, poker(own_device), None, rollouts, devices=(own_device, device))
    if policy is CoservePolicy.PRIORITY:
        return _build_priority(loop, setup, seed)
    return _build_shared(loop, setup, policy, seed)


def _owner(setup: DeviceSetup, pool_bytes: float, seed: int, *, share: float = 1.0) -> Lane:
    profile = profile_named(setup.serving)
    kv_tokens = int(pool_bytes // profile.kv_bytes_per_token)
    return Lane(
        name="serving",
        batch=Batch(max_seqs=setup.serving_max_seqs, kv_tokens=kv_tokens, has_cache=False),
        times=ProfileTimes(profile, share),
        chunk_tokens=setup.serving_chunk_tokens,
        noise=_noise(setup, f"serving noise {seed}"),
    )


def _guest(setup: DeviceSetup, pool_bytes: float, seed: int, *, share: float = 1.0) -> Lane:
    profile: Profile = profile_named(setup.rollout)
    kv_tokens = int(pool_bytes // profile.kv_bytes_per_token)
    return Lane(
        name="rollouts",
        batch=Batch(max_seqs=setup.num_slots, kv_tokens=kv_tokens, reserves_growth=True),
        times=ProfileTimes(profile, share),
        chunk_tokens=setup.chunk.max_tokens,
        noise=_noise(setup, f"rollout noise {seed}"),
    )


def _noise(setup: DeviceSetup, key: str) -> Callable[[float], float] | None:
    if not setup.noise_fraction:
        return None
    rng, sigma = Random(key), math.sqrt(math.log1p(setup.noise_fraction**2))
    return lambda step_s: step_s * rng.lognormvariate(-sigma * sigma / 2, sigma)


def _alone_rollouts(
    loop: VirtualLoop, setup: DeviceSetup, seed: int, *, share: float = 1.0, pool_bytes: float | None = None
) -> tuple[Lane, Device, Rollouts]:
    pool = kv_pool_bytes(setup.kv_memory_fraction, profile_named(setup.rollout)) if pool_bytes is None else pool_bytes
    guest = _guest(setup, pool, seed, share=share)
    device = alone(loop, guest)
    return guest, device, Rollouts(guest, setup, seed, device.poke)


def _build_shared(loop: VirtualLoop, setup: DeviceSetup, policy: CoservePolicy, seed: int) -> Site:
    pool_bytes, is_paper = kv_pool(setup), policy is CoservePolicy.PAPER
    headroom = int(_PAPER_HEADROOM * pool_bytes) if is_paper else setup.headroom_bytes
    config = CoservingConfig(
        admission=setup.admission,
        memory=MemoryConfig(pool_bytes=pool_bytes, headroom_bytes=headroom),
        chunk=attrs.evolve(setup.chunk, max_step_s=math.inf) if is_paper else setup.chunk,
        memory_rule=MemoryRule.PUBLISHED if is_paper else MemoryRule.HEADROOM,
        guess_ratio=setup.guess_ratio,
        learns=(bool(setup.noise_fraction) or setup.guess_ratio != 1) and not is_paper,
    )
    owner, guest = _owner(setup, pool_bytes, seed), _guest(setup, 0, seed)
    rule = CoservingRule(owner, guest, config, evict=lambda jobs: rollouts.evict(jobs))
    watch = _Watch(rule, owner, guest, pool_bytes)
    device = Device(loop, watch)
    rollouts = Rollouts(guest, setup, seed, device.poke)
    rule.ledger.publish_budget(Budget(mode=_MODES[policy], fencing_token=1, expires_s=math.inf, is_granted=True))
    poke = shared_poker(device, rule)
    return Site(loop, owner, guest, poke, watch, rollouts, rule.note_job_step, rule.note_answer, (device,))


def _build_priority(loop: VirtualLoop, setup: DeviceSetup, seed: int) -> Site:
    profile = profile_named(setup.serving)
    pool_bytes = kv_pool_bytes(setup.kv_memory_fraction, profile)
    batch = PriorityBatch(
        max_seqs=setup.serving_max_seqs + setup.num_slots, kv_tokens=int(pool_bytes // profile.kv_bytes_per_token)
    )
    lane = PriorityLane(
        name="serving",
        batch=batch,
        times=ProfileTimes(profile),
        chunk_tokens=setup.serving_chunk_tokens,
        noise=_noise(setup, f"serving noise {seed}"),
    )
    device = Device(loop, AloneRule(lane))
    rollouts = Rollouts(lane, setup, seed, device.poke)
    return Site(loop, lane, None, poker(device), None, rollouts, devices=(device,))
