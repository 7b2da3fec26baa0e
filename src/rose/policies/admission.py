"""Dual-SLO admission: may a rollout step start now on a device that a serving engine owns?

Pure. All times are seconds of one clock; every rule fails closed. The rule (paper section on co-serving admission,
sharpened by what was measured on real engines):

* Hold while any prompt of serving waits: its TTFT slack is the largest when nothing is put before it.
* Serving names one *deadline* by which it must have the device back. It is the nearest of a cap on the gap between two
  decode steps and of each decoding request's own mean pace. The cap leaves room for one whole prefill chunk of a prompt
  that may arrive the next moment (the arrival reserve), which matters more than the precision of predictions.
* A rollout step starts only if it and serving's next decode step both end before the deadline. Slack is saved up for
  whole steps; steps are never cut short to fit.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable

import attrs
from attrs import validators as v

from rose.errors import ConfigError

_MIN_ROLLOUT_STEP_S = 0.010
_RESERVE_PER_CHUNK = 1.15


class Mode(enum.Enum):
    """How much of serving's slack is lent. Live: the lender may change it while engines run."""

    SLO = "slo"  # fill up to the SLO
    QUIET = "quiet"  # serving's own latency hardly moves
    STRICT = "strict"  # only while serving has no request at all
    PAPER = "paper"  # the published rule: rollouts first while both slacks stay positive
    UNGATED = "ungated"  # first come, first served: the base line
    CLOSED = "closed"  # no rollout step


@attrs.frozen(kw_only=True)
class Slo:
    """What serving promises: time to first token, and mean time per output token of each request."""

    ttft_s: float = attrs.field(default=0.5)
    tpot_s: float = attrs.field(default=0.150)

    @ttft_s.validator
    @tpot_s.validator
    def _check(self, attribute: attrs.Attribute[float], value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            message = f"SLO {attribute.name} must be a positive number of seconds; got {value}; set the latency that serving promises"
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class AdmissionConfig:
    """How serving's promise becomes deadlines for rollout steps.

    Attributes:
        slo: The promise.
        arrival_reserve_s: Kept free for the prefill chunk of a prompt that may arrive next. ``None``: the predicted
            time of serving's own largest chunk, plus 15 % for the decodes that share its step.
        gap_fill: Share of (TPOT SLO - reserve) that the gap between two serving steps may take. 0.6 leaves the rest to
            serving's own decode step and to lateness; more was not measured to lend more.
        pace_fill: Share of the TPOT SLO that a request's mean pace may take. 0.4 keeps the P99 of requests at about a
            third of the SLO, since the P99 carries the prefills of others as well.
        quiet_gap_s, quiet_pace_s: The same two limits in ``quiet`` mode: serving's own P99 between tokens and per
            request on a dedicated device.
        stale_after_s: A serving engine that was silent for longer is not trusted.
        serving_kv_bound_fraction: Above this share of the KV pool in serving's use no compute is lent, because
            stretching its steps makes its requests stay, and hold their KV, for longer.
    """

    slo: Slo = attrs.field(factory=Slo)
    arrival_reserve_s: float | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    gap_fill: float = attrs.field(default=0.6, validator=[v.gt(0), v.le(1)])
    pace_fill: float = attrs.field(default=0.4, validator=[v.gt(0), v.le(1)])
    quiet_gap_s: float = attrs.field(default=0.030, validator=v.gt(0))
    quiet_pace_s: float = attrs.field(default=0.015, validator=v.gt(0))
    stale_after_s: float = attrs.field(default=1.0, validator=v.gt(0))
    serving_kv_bound_fraction: float = attrs.field(default=0.8, validator=[v.gt(0), v.le(1)])


@attrs.frozen(kw_only=True)
class ServingState:
    """What a serving engine says of itself after each step. Counts of requests; seconds; modelled bytes.

    Attributes:
        num_arrived, num_admitted: Prompts that reached the process and that its step loop has taken over since start.
        num_waiting: Prompts taken over whose prefill is not done.
        oldest_arrival_s: When the oldest waiting prompt arrived; ``nan`` without one.
        last_step_end_s: When the last step ended.
        deadline_s: When serving must be decoding again; ``inf`` when nothing decodes.
        next_decode_s: How long its next decode step takes at most.
        heartbeat_s: When the process was last alive.
    """

    num_arrived: int
    num_admitted: int
    num_running: int
    num_waiting: int
    kv_used_bytes: float
    kv_pool_bytes: float
    oldest_arrival_s: float
    last_step_end_s: float
    deadline_s: float
    next_decode_s: float
    heartbeat_s: float

    @property
    def num_prompts_waiting(self) -> int:
        """Prompts without a first token, those still on their way to the step loop included."""
        return max(0, self.num_arrived - self.num_admitted) + self.num_waiting


@attrs.frozen(kw_only=True)
class Budget:
    """What the lender allows on one device.

    ``fencing_token`` grows with every lease of the device; ``expires_s`` may be ``inf``.
    """

    mode: Mode = Mode.SLO
    kv_cap_bytes: float = math.inf
    fencing_token: int = 0
    expires_s: float = 0.0
    is_granted: bool = False


class HoldReason(enum.Enum):
    """Why a rollout step may not start. Closed list."""

    UNREADABLE = "unreadable"
    LEASE_MISSING = "lease_missing"
    LEASE_EXPIRED = "lease_expired"
    LEASE_FENCED = "lease_fenced"
    GATE_CLOSED = "gate_closed"
    STALE = "stale"
    PROMPT_WAITS = "prompt_waits"
    SERVING_BUSY = "serving_busy"
    NO_SLACK = "no_slack"
    SERVING_KV = "serving_kv"
    DEVICE_BUSY = "device_busy"


@attrs.frozen
class Start:
    """The step may start."""


@attrs.frozen
class Hold:
    """The step may not start now."""

    reason: HoldReason


Decision = Start | Hold
START = Start()


@attrs.frozen
class Targets:
    """The two limits that a mode sets: largest gap between serving steps, and mean pace of a request, in seconds."""

    gap_s: float
    pace_s: float


def targets(config: AdmissionConfig, mode: Mode, reserve_s: float) -> Targets:
    """Return the limits in force; ``reserve_s`` is the arrival reserve as resolved by ``arrival_reserve_s``."""
    gap_s = config.gap_fill * (config.slo.tpot_s - reserve_s)
    pace_s = config.pace_fill * config.slo.tpot_s
    if mode is Mode.QUIET:
        return Targets(min(gap_s, config.quiet_gap_s), min(pace_s, config.quiet_pace_s))
    return Targets(gap_s, pace_s)


def arrival_reserve_s(config: AdmissionConfig, prefill_chunk_s: float, chunk_tokens: int, where: str) -> float:
    """Return the arrival reserve, refusing an SLO that leaves no room for it.

    Args:
        config: The admission settings.
        prefill_chunk_s: Predicted time of serving's largest prefill chunk.
        chunk_tokens: Its size, for the message.
        where: Names the engine or the setting, for the message.

    Raises:
        ConfigError: One serving prefill chunk and one rollout step do not fit into the TPOT SLO together.
    """
    reserve_s = config.arrival_reserve_s
    if reserve_s is None:
        reserve_s = _RESERVE_PER_CHUNK * prefill_chunk_s
    if config.slo.tpot_s < max(reserve_s, prefill_chunk_s) + _MIN_ROLLOUT_STEP_S:
        message = (
            f"{where}: a TPOT SLO of {config.slo.tpot_s:g} s leaves no room for one serving prefill chunk of "
            f"{chunk_tokens} tokens ({prefill_chunk_s:.3f} s, reserve {reserve_s:.3f} s) and a rollout step; "
            "lower serving's max_num_batched_tokens, raise slo.tpot_s, or set mode to strict"
        )
        raise ConfigError(message)
    return reserve_s


def decode_deadline_s(limits: Targets, last_step_end_s: float, decoding: Iterable[tuple[float, int]]) -> float:
    """Return when serving must be decoding again.

    Args:
        limits: The limits in force.
        last_step_end_s: End of the last serving step.
        decoding: For each decoding request, when its first token came and how many tokens it has.
    """
    deadline_s = math.inf
    for first_token_s, num_tokens in decoding:
        deadline_s = min(deadline_s, first_token_s + limits.pace_s * num_tokens)
    return deadline_s if deadline_s == math.inf else min(deadline_s, last_step_end_s + limits.gap_s)


def check_lease(budget: Budget | None, highest_token: int, now_s: float) -> HoldReason | None:
    """Return why the lease does not allow work, or ``None`` when it does.

    ``highest_token`` is the largest fencing token that the engine has seen; a smaller one is an outdated lender's.
    """
    if budget is None:
        return HoldReason.UNREADABLE
    if budget.fencing_token < highest_token:
        return HoldReason.LEASE_FENCED
    if not budget.is_granted:
        return HoldReason.LEASE_MISSING
    return HoldReason.LEASE_EXPIRED if now_s >= budget.expires_s else None


def decide(  # noqa: PLR0911 - one return a rule
    config: AdmissionConfig, mode: Mode, serving: ServingState | None, step_s: float, now_s: float
) -> Decision:
    """Return whether a rollout step that takes at most ``step_s`` may start at ``now_s``.

    ``serving`` is ``None`` when its section could not be read. The lease is checked apart, by ``check_lease``.
    """
    if mode is Mode.CLOSED:
        return Hold(HoldReason.GATE_CLOSED)
    if mode is Mode.UNGATED:
        return START
    distrust = _distrust(config, serving, now_s)
    if distrust is not None or serving is None:
        return Hold(distrust or HoldReason.UNREADABLE)
    num_waiting = serving.num_prompts_waiting
    if not num_waiting and not serving.num_running:
        return START
    if mode is Mode.STRICT:
        return Hold(HoldReason.SERVING_BUSY)
    if mode is Mode.PAPER:
        return _decide_as_published(config, serving, step_s, now_s)
    if num_waiting:
        return Hold(HoldReason.PROMPT_WAITS)
    return START if slack_s(serving, now_s) >= step_s else Hold(HoldReason.NO_SLACK)


def _distrust(config: AdmissionConfig, serving: ServingState | None, now_s: float) -> HoldReason | None:
    if serving is None:
        return HoldReason.UNREADABLE
    if now_s - serving.heartbeat_s > config.stale_after_s:
        return HoldReason.STALE
    if serving.kv_used_bytes > config.serving_kv_bound_fraction * serving.kv_pool_bytes:
        return HoldReason.SERVING_KV
    return None


def _decide_as_published(config: AdmissionConfig, serving: ServingState, step_s: float, now_s: float) -> Decision:
    """Return whether both slacks stay positive after the step; nothing is kept for a prompt that may arrive during it."""
    decode_slack_s = serving.last_step_end_s + config.slo.tpot_s - serving.next_decode_s - now_s
    prefill_slack_s = math.inf
    if serving.num_prompts_waiting and not math.isnan(serving.oldest_arrival_s):
        prefill_slack_s = serving.oldest_arrival_s + config.slo.ttft_s - (config.arrival_reserve_s or 0.0) - now_s
    return START if min(decode_slack_s, prefill_slack_s) > step_s else Hold(HoldReason.NO_SLACK)


def slack_s(serving: ServingState, now_s: float) -> float:
    """Return how long the device may be away from serving from ``now_s`` on; ``inf`` when nothing decodes."""
    return serving.deadline_s - serving.next_decode_s - now_s


YIELDING_MODES = (Mode.SLO, Mode.QUIET, Mode.PAPER)
"""Modes in which serving waits for a rollout engine that is between two steps."""


def should_yield(
    config: AdmissionConfig, mode: Mode, own: ServingState, wants_until_s: float, step_s: float, now_s: float
) -> bool:
    """Return whether serving, about to start a step, leaves the device to a rollout engine that is between two steps.

    Without this, "rollout first while slack lasts" would become strict alternation: the rollout engine's host work
    between steps lets serving in every time. Serving waits only for a step that ``decide`` would let start, and never with a
    prompt of its own to compute.

    Args:
        config: The admission settings.
        mode: The mode in force.
        own: Serving's own state.
        wants_until_s: Until when the rollout engine expects to ask for the device.
        step_s: How long its next step takes.
        now_s: The time.
    """
    if mode not in YIELDING_MODES or now_s >= wants_until_s or own.num_prompts_waiting:
        return False
    return decide(config, mode, own, step_s, now_s) == START
