"""What is simulated: one RL job, the serving cluster it may borrow from, the link between them. Configuration only.

``rose.config.load(Scenario, path)`` reads one from TOML; ``rose.simulation.presets`` has the named ones. Times in seconds,
sizes in bytes, tokens as the modelled models count them.
"""

from __future__ import annotations

import enum

import attrs

from rose import checks
from rose.errors import ConfigError
from rose.pool import WeightPull


class Algorithm(enum.Enum):
    """The outer loop of the job."""

    GRPO = "grpo"
    DAPO = "dapo"
    ASYNC = "async"


class DapoMode(enum.Enum):
    """How DAPO comes to enough groups whose rewards differ.

    ``rounds``: a batch, and more batches until there are enough. ``known``: as many groups as will be needed are known and started at
    once, all are waited for. ``inflight``: groups are started as soon as there is room, the step ends once enough are whole and
    drops the rest, which prefers short ones (a bias).
    """

    ROUNDS = "rounds"
    KNOWN = "known"
    INFLIGHT = "inflight"


class Tail(enum.Enum):
    """How "P75 of the trajectories are done by 30 % of the rollout time" is read, and so how the tail is fitted."""

    OWN_DURATION = "own-duration"
    END_TIME = "end-time"


class Layout(enum.Enum):
    """Whether each serving engine does prefill and decode, or half of them does either."""

    COLOCATED = "colocated"
    DISAGGREGATED = "pd"


@attrs.frozen(kw_only=True)
class ClusterConfig:
    """GPUs. Counts are GPUs, not engines; an engine takes as many as its profile names.

    Attributes:
        rollout_gpus: The job's own, for rollouts.
        training_gpus: The job's own, for training; they only count in prices and scale.
        borrowed_gpus: How many of serving's GPUs may be borrowed; that many serve.
        kv_memory_fraction: Share of a GPU's memory that weights and KV may take.
    """

    rollout_gpus: int = attrs.field(validator=checks.integer(1))
    training_gpus: int = attrs.field(validator=checks.integer(0))
    borrowed_gpus: int = attrs.field(validator=checks.integer(0))
    kv_memory_fraction: float = attrs.field(default=0.9, validator=checks.number(above=0, at_most=1))


@attrs.frozen(kw_only=True)
class ServingConfig:
    """The serving side.

    Attributes:
        profile: Model and GPU of a serving engine, see ``rose.backends.paced.PROFILES``.
        load_fraction: Requests a second of each engine as a share of its capacity; ignored when ``rate_rps`` is given.
        rate_rps: Requests a second of each engine.
        trace: File to replay (Azure, BurstGPT, ServeGen, Mooncake, Prometheus export); generated without one.
        trace_offset_s: Where in the trace to begin.
        layout: Colocated, or prefill and decode on different engines.
        ttft_slo_s, tpot_slo_s: What serving promises.
        max_seqs: Requests in a serving batch at most.
        chunk_tokens: Prompt tokens of one serving step at most.
        api_overhead_s: Added to every first token: what the engine's front end takes.
        operators: CSV of measured operator times (Vidur's columns) that replaces the roofline's linear part.
    """

    profile: str = attrs.field(validator=checks.text())
    load_fraction: float = attrs.field(default=0.3, validator=checks.number(above=0, at_most=2))
    rate_rps: float | None = attrs.field(default=None, validator=checks.optional(checks.number(above=0, at_most=1000)))
    trace: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))
    trace_offset_s: float = attrs.field(default=0.0, validator=checks.number(at_least=0))
    layout: Layout = attrs.field(default=Layout.COLOCATED, validator=checks.instance(Layout))
    ttft_slo_s: float = attrs.field(default=0.5, validator=checks.number(above=0))
    tpot_slo_s: float = attrs.field(default=0.15, validator=checks.number(above=0))
    max_seqs: int = attrs.field(default=256, validator=checks.integer(1))
    chunk_tokens: int = attrs.field(default=2048, validator=checks.integer(64))
    api_overhead_s: float = attrs.field(default=0.0, validator=checks.number(at_least=0, at_most=60))
    operators: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """The rollout side.

    Attributes:
        profile: Model and GPU of a rollout engine.
        workload: A named profile of trajectories, see ``rose.simulation.trajectories``; ignored with ``logs``.
        logs: JSON lines of one's own trajectories, resampled: ``{"turns": [{"prompt_tokens": n, "output_tokens": n,
            "env_s": s}, ...]}``.
        num_trajectories: Of one step (the batch).
        group_size: Trajectories of one group.
        max_context_tokens: Prompt and answers of a trajectory together.
        max_turn_tokens: Longest answer that a turn asks for.
        cap_per_gpu: Turns in flight on one GPU at most, where a policy has a cap.
        tail: Which reading of the paper's tail the lengths are fitted to.
        median_tokens: Tokens that the median trajectory generates; by default the workload's own.
        sigma: Spread (of the logarithm) of the generated tokens of trajectories; by default the workload's own.
        resolution_tokens: One token of the pool stands for this many modelled ones.
    """

    profile: str = attrs.field(validator=checks.text())
    workload: str = attrs.field(default="frozenlake", validator=checks.text())
    logs: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))
    num_trajectories: int = attrs.field(default=256, validator=checks.integer(1))
    group_size: int = attrs.field(default=16, validator=checks.integer(1))
    max_context_tokens: int = attrs.field(default=32_768, validator=checks.integer(64))
    max_turn_tokens: int = attrs.field(default=4096, validator=checks.integer(1))
    cap_per_gpu: int = attrs.field(default=16, validator=checks.integer(1))
    tail: Tail = attrs.field(default=Tail.OWN_DURATION, validator=checks.instance(Tail))
    median_tokens: float | None = attrs.field(default=None, validator=checks.optional(checks.number(above=0)))
    sigma: float | None = attrs.field(default=None, validator=checks.optional(checks.number(above=0)))
    resolution_tokens: int = attrs.field(default=16, validator=checks.integer(1))

    def __attrs_post_init__(self) -> None:
        """Check what goes together."""
        if self.num_trajectories % self.group_size:
            message = (
                f"rollout.num_trajectories = {self.num_trajectories} is no multiple of rollout.group_size = "
                f"{self.group_size}; groups are whole"
            )
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class LoopConfig:
    """The outer loop.

    Attributes:
        algorithm: See ``Algorithm``.
        num_steps: Steps simulated.
        train_s: What training one batch takes; ``None``: so that the fixed baseline has ``rollout_share``.
        rollout_share: The fixed baseline's share of a step spent in rollouts, where ``train_s`` is not given.
        max_staleness: Versions that an asynchronous loop may lag behind.
        dapo: DAPO: how groups are started.
        max_demand: DAPO: a step needs up to this many times the batch's groups.
    """

    algorithm: Algorithm = attrs.field(default=Algorithm.GRPO, validator=checks.instance(Algorithm))
    num_steps: int = attrs.field(default=1, validator=checks.integer(1))
    train_s: float | None = attrs.field(default=None, validator=checks.optional(checks.number(at_least=0, at_most=1e6)))
    rollout_share: float = attrs.field(default=0.8, validator=checks.number(above=0, at_most=1))
    max_staleness: int = attrs.field(default=1, validator=checks.integer(0))
    dapo: DapoMode = attrs.field(default=DapoMode.ROUNDS, validator=checks.instance(DapoMode))
    max_demand: float = attrs.field(default=5.7, validator=checks.number(at_least=1))


@attrs.frozen(kw_only=True)
class LinkConfig:
    """Between the clusters, and what a version of the weights is.

    Attributes:
        gbps: Of the thin link.
        local_gbps: Inside a cluster, a GPU's own.
        latency_s: Of one blob.
        changed_fraction: Share of the weights' bits that a step changes.
        model: Whose tensors travel, see ``rose.simulation.sync``; by default the rollout profile's.
        weight_pull: When borrowed engines fetch a version: always, or when their loans are likely to pay for the bytes.
    """

    gbps: float = attrs.field(default=100.0, validator=checks.number(above=0, at_most=1e6))
    local_gbps: float = attrs.field(default=200.0, validator=checks.number(above=0))
    latency_s: float = attrs.field(default=0.002, validator=checks.number(at_least=0, at_most=60))
    changed_fraction: float = attrs.field(default=0.02, validator=checks.number(at_least=0, at_most=1))
    model: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))
    weight_pull: WeightPull = attrs.field(default=WeightPull.ALWAYS, validator=checks.instance(WeightPull))


@attrs.frozen(kw_only=True)
class PriceConfig:
    """Dollars an hour of one GPU, by how it is had."""

    dedicated: float = attrs.field(default=2.5, validator=checks.number(at_least=0))
    borrowed: float = attrs.field(default=0.6, validator=checks.number(at_least=0))
    spot: float = attrs.field(default=1.0, validator=checks.number(at_least=0))
    serverless: float = attrs.field(default=4.0, validator=checks.number(at_least=0))


@attrs.frozen(kw_only=True)
class Scenario:
    """Everything that a simulation needs but the policy and the seed.

    Attributes:
        name: Printed with every figure.
        assumptions: What is assumed and not given by a source, one line each.
    """

    name: str = attrs.field(default="own", validator=checks.text())
    cluster: ClusterConfig
    serving: ServingConfig
    rollout: RolloutConfig
    loop: LoopConfig = attrs.field(factory=LoopConfig, validator=checks.instance(LoopConfig))
    link: LinkConfig = attrs.field(factory=LinkConfig, validator=checks.instance(LinkConfig))
    prices: PriceConfig = attrs.field(factory=PriceConfig, validator=checks.instance(PriceConfig))
    assumptions: tuple[str, ...] = ()


def check_engines(what: str, num_gpus: int, gpus_per_engine: int) -> int:
    """Return how many engines ``num_gpus`` make.

    Raises:
        ConfigError: They make none, or GPUs are left over.
    """
    if num_gpus % gpus_per_engine:
        message = f"{what} = {num_gpus} is no multiple of the {gpus_per_engine} GPUs of one engine; whole engines only"
        raise ConfigError(message)
    return num_gpus // gpus_per_engine
