"""Settings of a RolloutPool. Times are seconds on the pool's clock."""

from __future__ import annotations

import enum

import attrs

from rose import checks
from rose.policies.concurrency import ConcurrencyConfig
from rose.policies.routing import RoutingConfig
from rose.policies.weight_pull import PullConfig


class ResumePolicy(enum.Enum):
    """What becomes of a turn that an engine aborted without being asked by the pool.

    ``on``: it goes on elsewhere with the tokens it has. ``off``: it ends as aborted with the tokens it has.
    ``same_version``: it goes on at the version of its last token only, and ends as aborted once no engine holds that.
    """

    ON = "on"
    OFF = "off"
    SAME_VERSION = "same_version"


class WeightPull(enum.Enum):
    """When borrowed engines fetch a new version. ``always``: at once. ``economic``: when their loans are likely to pay for the bytes."""

    ALWAYS = "always"
    ECONOMIC = "economic"


@attrs.frozen(kw_only=True)
class PoolConfig:
    """How a pool treats its turns and engines.

    Attributes:
        routing: Limits of the routing policy.
        concurrency: How the turns in flight on one engine follow its KV memory, below ``routing.cap_per_engine``.
        stall_s: A turn that got no token for this long is moved. Time in which the pool updates the engine is not counted.
        first_token_s: A turn that has no token yet may wait this long for the prompts before it, as long as its engine makes tokens
            for other turns.
        max_hops: Attempts of one turn that may end without a single token, busy answers not counted. Those that gave tokens
            are bounded by the turn's own budget of tokens.
        max_busy: Busy answers that one turn may meet.
        retry_s: How long a turn rests after its second attempt in a row that failed without a token; doubles up to ``retry_max_s``.
        retry_max_s: The longest of these rests.
        max_group_failures: Turns of one group that may be refused in a row (or fail on errors that say as much about the turn as
            about the engine) before the group is dropped: its turns fail at once, without a request.
        group_drop_s: How long a dropped group stays dropped; then one turn of it is tried again.
        no_engine_timeout_s: A turn fails when no engine took turns for this long while it waited; ``None``: it waits for ever.
        starve_s: A turn that waited this long for KV memory, while smaller ones passed it, gets an engine that takes no others until
            it has room; those of trajectories that it has only if that takes six times as long.
        resume_after_abort: What becomes of a turn that an engine aborted by itself.
        busy_s: How long a busy or evicting engine is left alone at first; doubles up to ``busy_max_s`` while it repeats.
        busy_max_s: The longest of these pauses.
        circuit_s: How long an engine that failed a request is left alone at first; doubles up to ``circuit_max_s``.
        circuit_max_s: The longest of these pauses.
        jitter_fraction: Each pause or rest is stretched by a random share of up to this.
        reading_interval_s: How often the load and health of each engine are read.
        reading_timeout_s: An engine that does not answer such a reading for this long is lost.
        rejoin_s: A lost dedicated engine is read again after this time, doubled up to ``rejoin_max_s`` while it does not answer; one that
            does joins anew, stale until its weights are acknowledged. ``None``: it stays lost. Borrowed ones are the borrower's.
        rejoin_max_s: The longest of these times.
        stage_timeout_s: How long staging a weight update may take on one engine, and planning it, that on the event loop's time.
        activate_timeout_s: How long activating it may take.
        weight_pull: When borrowed engines fetch a new version, where the source of the weights knows what that costs.
        pull: Terms of ``economic``.
        ack_lease_s: How long an engine without a lease is promised what it needs to catch up, where acknowledgements are told to
            publishers.
        close_timeout_s: How long closing the pool waits for aborts, on the event loop's time.
        max_trajectories: How many trajectories (and groups) the pool remembers for affinity and order.
    """

    routing: RoutingConfig = attrs.field(factory=RoutingConfig, validator=checks.instance(RoutingConfig))
    concurrency: ConcurrencyConfig = attrs.field(
        factory=ConcurrencyConfig, validator=checks.instance(ConcurrencyConfig)
    )
    stall_s: float = attrs.field(default=2.0, validator=checks.number(above=0))
    first_token_s: float = attrs.field(default=20.0, validator=checks.number(above=0))
    max_hops: int = attrs.field(default=16, validator=checks.integer(1))
    max_busy: int = attrs.field(default=64, validator=checks.integer(1))
    retry_s: float = attrs.field(default=0.1, validator=checks.number(above=0))
    retry_max_s: float = attrs.field(default=5.0, validator=checks.number(above=0))
    max_group_failures: int = attrs.field(default=3, validator=checks.integer(1))
    group_drop_s: float = attrs.field(default=300.0, validator=checks.number(above=0))
    no_engine_timeout_s: float | None = attrs.field(default=600.0, validator=checks.optional(checks.number(above=0)))
    starve_s: float = attrs.field(default=10.0, validator=checks.number(above=0))
    resume_after_abort: ResumePolicy = attrs.field(default=ResumePolicy.ON, validator=checks.instance(ResumePolicy))
    busy_s: float = attrs.field(default=0.05, validator=checks.number(above=0))
    busy_max_s: float = attrs.field(default=2.0, validator=checks.number(above=0))
    circuit_s: float = attrs.field(default=5.0, validator=checks.number(above=0))
    circuit_max_s: float = attrs.field(default=60.0, validator=checks.number(above=0))
    jitter_fraction: float = attrs.field(default=0.25, validator=checks.number(at_least=0, at_most=1))
    reading_interval_s: float = attrs.field(default=0.5, validator=checks.number(above=0))
    reading_timeout_s: float = attrs.field(default=30.0, validator=checks.number(above=0))
    rejoin_s: float | None = attrs.field(default=5.0, validator=checks.optional(checks.number(above=0)))
    rejoin_max_s: float = attrs.field(default=60.0, validator=checks.number(above=0))
    stage_timeout_s: float = attrs.field(default=300.0, validator=checks.number(above=0))
    activate_timeout_s: float = attrs.field(default=60.0, validator=checks.number(above=0))
    weight_pull: WeightPull = attrs.field(default=WeightPull.ALWAYS, validator=checks.instance(WeightPull))
    pull: PullConfig = attrs.field(factory=PullConfig, validator=checks.instance(PullConfig))
    ack_lease_s: float = attrs.field(default=300.0, validator=checks.number(above=0))
    close_timeout_s: float = attrs.field(default=5.0, validator=checks.number(above=0))
    max_trajectories: int = attrs.field(default=100_000, validator=checks.integer(1))

    def __attrs_post_init__(self) -> None:
        for first, longest in (("busy_s", "busy_max_s"), ("circuit_s", "circuit_max_s"), ("retry_s", "retry_max_s")):
            least, most = getattr(self, first), getattr(self, longest)
            if most < least:
                message = f"{longest} must be at least {first}, which is {least}, got {most}"
                raise ValueError(message)
