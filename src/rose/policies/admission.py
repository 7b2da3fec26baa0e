"""Dual-SLO admission: may a rollout step start now on a device that a serving engine owns?

Pure. All times are seconds of one clock; every rule fails closed. The rule (paper section on co-serving admission,
sharpened by what was measured on real engines):

* Hold while any prompt of serving waits: its TTFT slack is the largest when nothing is put before it.
* Serving names one *deadline* by which it must have the device back. It is the nearest of a cap on the gap between two
  decode steps and of each decoding request's own mean pace, by the promise to its class. The cap leaves room for one whole prefill
  chunk of a prompt that may arrive the next moment (the arrival reserve), which matters more than the precision of
  predictions. In ``quiet`` a third bound comes from ``rose.policies.quiet``.
* A rollout step starts only if it and serving's next decode step both end before the deadline. Slack is saved up for
  whole steps; steps are never cut short to fit.

Where prefill and decode are on different devices, each keeps its half: on a prefill device nothing decodes, so that prompts alone
hold rollouts; on a decode device a request comes with its KV, so that there is no TTFT to keep and no prompt chunk to reserve for.
It holds rollouts until its serving engine has asked for its KV and again from the moment that the KV is there, not in between.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import attrs
from attrs import validators as v

from rose.errors import ConfigError
from rose.policies.quiet import OwnPaces, quiet_start_s

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

    def lends_more_than(self, other: Mode) -> bool:
        """Return whether it may let a step start that ``other`` holds."""
        return _BY_LENT.index(self) > _BY_LENT.index(other)


_BY_LENT = (Mode.CLOSED, Mode.STRICT, Mode.QUIET, Mode.SLO, Mode.PAPER, Mode.UNGATED)


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


class Role(enum.Enum):
    """What serving does on a device: everything, or one half of a disaggregated deployment."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"


class Decoding(NamedTuple):
    """One decoding request, as its serving engine accounts for it.

    Attributes:
        first_token_s: When its first token came.
        num_tokens: Tokens since then, that one included.
        own_s: Serving's own time (its steps and the host gaps after them) since the first token: what the request would have
            taken without rollouts.
        slo: The promise of its class.
    """

    first_token_s: float
    num_tokens: int
    own_s: float
    slo: Slo


@attrs.frozen(kw_only=True)
class AdmissionConfig:
    """How serving's promise becomes deadlines for rollout steps.

    Attributes:
        slo: The promise to requests that name no class.
        classes: Promises to requests of other classes, by name.
        role: What serving does on the device.
        quiet_stretch: Share by which ``quiet`` may stretch a request's own decode time.
        arrival_reserve_s: Kept free for the prefill chunk of a prompt that may arrive next. ``None``: the predicted
            time of serving's own largest chunk, plus 15 % for the decodes that share its step.
        gap_fill: Share of (TPOT SLO - reserve) that the gap between two serving steps may take. The rest is for lateness and
            for steps that take longer than predicted.
        pace_fill: Share of the TPOT SLO that a request's mean pace may take while at most ``full_pace_decodes`` decode.
        full_pace_decodes: With more of them that share falls in inverse proportion. Stretching lets batches grow (arrivals x
            residence), and every prompt's chunk shares its step with the whole batch: what is lent at a low load without harm
            would slow prompts down at a high one.
        stale_after_s: A serving engine that was silent for longer is not trusted.
        serving_kv_bound_fraction: Above this share of the KV pool in serving's use no compute is lent, because
            stretching its steps makes its requests stay, and hold their KV, for longer.
    """

    slo: Slo = attrs.field(factory=Slo)
    classes: Mapping[str, Slo] = attrs.field(factory=dict)
    role: Role = Role.BOTH
    quiet_stretch: float = attrs.field(default=0.10, validator=[v.ge(0), v.le(1)])
    arrival_reserve_s: float | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    gap_fill: float = attrs.field(default=0.95, validator=[v.gt(0), v.le(1)])
    pace_fill: float = attrs.field(default=0.9, validator=[v.gt(0), v.le(1)])
    full_pace_decodes: int = attrs.field(default=16, validator=v.ge(1))
    stale_after_s: float = attrs.field(default=1.0, validator=v.gt(0))
    serving_kv_bound_fraction: float = attrs.field(default=0.8, validator=[v.gt(0), v.le(1)])

    def slo_of(self, name: str | None) -> Slo:
        """Return the promise to the class ``name``; the default one where it has none of its own."""
        return self.slo if name is None else self.classes.get(name, self.slo)

    @property
    def tightest(self) -> Slo:
        """The smallest targets of all classes."""
        promises = (self.slo, *self.classes.values())
        return Slo(ttft_s=min(slo.ttft_s for slo in promises), tpot_s=min(slo.tpot_s for slo in promises))


@attrs.frozen(kw_only=True)
class ServingState:
    """What a serving engine says of itself after each step. Counts of requests; seconds; modelled bytes.

    Attributes:
        num_arrived, num_admitted: Prompts that reached the process and that its step loop has taken over since start.
        num_waiting: Prompts taken over whose prefill is not done; without those whose KV is on its way from elsewhere.
        oldest_arrival_s: When the oldest waiting prompt arrived; ``nan`` without one.
        last_step_end_s: When the last step ended.
        deadline_s: When serving must be decoding again; ``inf`` when nothing decodes.
        next_decode_s: How long its next decode step takes at most.
        heartbeat_s: When the process was last alive; ``inf`` for one that always is.
        first_token_deadline_s: By when the prefill of the most urgent waiting prompt must begin; ``inf`` without one.
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
    first_token_deadline_s: float = math.inf

    @property
    def num_prompts_waiting(self) -> int:
        """Prompts without a first token, those still on their way to the step loop included."""
        return max(0, self.num_arrived - self.num_admitted) + self.num_waiting

    def is_heard(self, now_s: float, stale_after_s: float) -> bool:
        """Return whether serving was alive within ``stale_after_s``. A heartbeat that is as far ahead is of another boot or clock."""
        age_s = now_s - self.heartbeat_s
        return age_s <= stale_after_s and (age_s >= -stale_after_s or age_s == -math.inf)


@attrs.frozen(kw_only=True)
class Budget:
    """What the lender allows on one device.

    ``fencing_token`` grows with every lease of the device; ``expires_s`` may be ``inf``. ``holder`` is the key of the job that holds the
    lease (``rose.policies.lending.job_key``), 0 where it is no job's in particular.
    """

    mode: Mode = Mode.SLO
    kv_cap_bytes: float = math.inf
    fencing_token: int = 0
    expires_s: float = 0.0
    is_granted: bool = False
    holder: int = 0


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


def arrival_reserve_s(config: AdmissionConfig, prefill_chunk_s: float, chunk_tokens: int, where: str) -> float:
    """Return the arrival reserve, refusing an SLO that leaves no room for it.

    Args:
        config: The admission settings.
        prefill_chunk_s: Predicted time of serving's largest prefill chunk.
        chunk_tokens: Its size, for the message.
        where: Names the engine or the setting, for the message.

    Returns:
        Seconds; 0 on a device that only prefills or only decodes.

    Raises:
        ConfigError: One serving prefill chunk and one rollout step do not fit into the tightest SLO together: into the TPOT where
            the device decodes, into the TTFT where it only prefills.
    """
    tightest, chunk = config.tightest, f"one serving prefill chunk of {chunk_tokens} tokens ({prefill_chunk_s:.3f} s"
    if config.role is Role.PREFILL:
        if tightest.ttft_s < prefill_chunk_s + _MIN_ROLLOUT_STEP_S:
            message = f"{where}: a TTFT SLO of {tightest.ttft_s:g} s leaves no room for {chunk}) and a rollout step; {_REMEDY}ttft_s"
            raise ConfigError(message)
        return 0.0
    if config.role is Role.DECODE:
        prefill_chunk_s, chunk = 0.0, "a decode step"
    reserve_s = config.arrival_reserve_s
    if reserve_s is None:
        reserve_s = _RESERVE_PER_CHUNK * prefill_chunk_s
    if tightest.tpot_s < max(reserve_s, prefill_chunk_s) + _MIN_ROLLOUT_STEP_S:
        detail = f"{chunk}, reserve {reserve_s:.3f} s)" if config.role is Role.BOTH else chunk
        message = f"{where}: a TPOT SLO of {tightest.tpot_s:g} s leaves no room for {detail} and a rollout step; {_REMEDY}tpot_s"
        raise ConfigError(message)
    return 0.0 if config.role is Role.DECODE else reserve_s


_REMEDY = "lower serving's max_num_batched_tokens or raise slo."


def decode_deadline_s(
    config: AdmissionConfig,
    mode: Mode,
    reserve_s: float,
    last_step_end_s: float,
    decoding: Iterable[Decoding],
    *,
    next_decode_s: float = 0.0,
    paces: OwnPaces | None = None,
) -> float:
    """Return when serving must be decoding again; ``inf`` when nothing decodes.

    Args:
        config: The admission settings.
        mode: The mode in force.
        reserve_s: The arrival reserve as resolved by ``arrival_reserve_s``.
        last_step_end_s: End of the last serving step.
        decoding: The decoding requests.
        next_decode_s: How long the next decode step takes at most; for ``quiet``.
        paces: What serving learned of its own requests; for ``quiet``, which lends next to nothing without.
    """
    if config.role is Role.PREFILL:
        return math.inf
    decoding = list(decoding)
    deadline_s = gap_s = pace_s = math.inf
    slo: Slo | None = None
    crowding = max(1.0, len(decoding) / config.full_pace_decodes)
    for first_token_s, num_tokens, _, promise in decoding:
        if promise is not slo:
            slo, pace_s = promise, config.pace_fill * promise.tpot_s / crowding
            gap_s = min(gap_s, config.gap_fill * (promise.tpot_s - reserve_s))
        due_s = first_token_s + pace_s * num_tokens
        if due_s < deadline_s:  # noqa: PLR1730 - half of the cost of min(), for every request after every step
            deadline_s = due_s
    if mode is Mode.QUIET:
        start_s = quiet_start_s(config.quiet_stretch, paces or OwnPaces(), decoding)
        deadline_s = min(deadline_s, next_decode_s + start_s)
    return min(deadline_s, last_step_end_s + gap_s)


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
    if not serving.num_prompts_waiting and not serving.num_running:
        return START
    if mode is Mode.STRICT:
        return Hold(HoldReason.SERVING_BUSY)
    if mode is Mode.PAPER:
        return _decide_as_published(config, serving, step_s, now_s)
    if serving.num_prompts_waiting:
        return Hold(HoldReason.PROMPT_WAITS)
    return START if slack_s(serving, now_s) >= step_s else Hold(HoldReason.NO_SLACK)


def _distrust(config: AdmissionConfig, serving: ServingState | None, now_s: float) -> HoldReason | None:
    if serving is None:
        return HoldReason.UNREADABLE
    if not serving.is_heard(now_s, config.stale_after_s):
        return HoldReason.STALE
    if serving.kv_used_bytes > config.serving_kv_bound_fraction * serving.kv_pool_bytes:
        return HoldReason.SERVING_KV
    return None


def _decide_as_published(config: AdmissionConfig, serving: ServingState, step_s: float, now_s: float) -> Decision:
    """Return whether both slacks stay positive after the step; nothing is kept for a prompt that may arrive during it."""
    decode_slack_s = prefill_slack_s = math.inf
    if config.role is not Role.PREFILL:
        decode_slack_s = serving.last_step_end_s + config.slo.tpot_s - serving.next_decode_s - now_s
    if serving.num_prompts_waiting and config.role is not Role.DECODE:
        if serving.first_token_deadline_s < math.inf:
            prefill_slack_s = serving.first_token_deadline_s - now_s
        elif not math.isnan(serving.oldest_arrival_s):
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
