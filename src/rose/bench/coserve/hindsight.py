"""How much of a serving device's time could have been lent quietly: the best schedule found with all arrivals and lengths known.

Three things, all on the same arrivals and with the same whole rollout steps of one length, pure and deterministic:

* ``replay``: a serving engine step by step. A rule is asked, between any two of serving's steps while no prompt waits, whether a rollout
  step goes first. A device without requests makes rollout steps one after the other. A rollout step that runs is never cut short.
* ``find_hindsight``: a schedule that knows the future.
* ``compare_quiet``: serving alone, the live ``quiet`` rule (``rose.policies.quiet``) and hindsight, as one row of figures.

**Method.** For fixed serving steps and fixed delays that each request may have, the most rollout steps are those that are made as
early as possible: of two feasible schedules whose first steps differ, the later first step can be moved to the earlier place,
because requests that are open there and not later have no other step to bear (each delay budget covers one run of consecutive steps).
So the greedy rule with known budgets is the optimum, and what is left to choose are the budgets. They are set by rank: the k-th fastest
request, counting serving's own time, may become as slow as the promise lets the k-th fastest of serving alone be. Since delays change
batches and own times, this is repeated from the last replay's own times and with budgets scaled down until the promise is kept;
the schedule that lends most of those that keep it counts.

**Promises.** ``QUANTILES``: no quantile of the TPOT from the median up grows by more than the stretch (``quiet``'s own promise). ``TWO_POINTS``:
only the median and the P99 are held; it lends more, by slowing the upper half of the requests to the P99. Both hold the P99 of the TTFT within 5 % or one rollout step.

**Fairness.** It is the best that was *found*. It holds rollouts while a prompt waits and makes at most one rollout step between two of
serving's, as every rule here; it knows arrivals, lengths and serving alone's quantiles, which no live rule does. Beside it stands the
naive share *idle + busy x (1 - 1/(1 + s))*, which counts neither that fast requests may be slowed more than others nor that a
rollout step costs serving only what it takes beyond the host gap; the best schedule can pass it.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import attrs
from attrs import validators as v

from rose.observe.latency import percentile
from rose.policies.admission import Decoding, Slo
from rose.policies.quiet import OwnPaces, quiet_start_s
from rose.simulation.batch import Batch, Job
from rose.simulation.device import StepTimes
from rose.simulation.traces import Arrival

_ROUNDS = 8
_SCALES = (1.0, 0.985, 0.97, 0.955, 0.94)
_TTFT_GROWTH = 1.05
_MAX_P99_TTFT_STEP_S = 0.020


@attrs.frozen(kw_only=True)
class QuietSetup:
    """The device and the promise.

    Attributes:
        times: Of serving's steps.
        chunk_tokens, max_seqs, kv_tokens: Of the serving engine.
        rollout_s: Length of a rollout step.
        rollout_gap_s: Host gap after one.
        stretch: By how much quantiles of the TPOT may grow.
    """

    times: StepTimes
    chunk_tokens: int = attrs.field(default=2048, validator=v.ge(1))
    max_seqs: int = attrs.field(default=256, validator=v.ge(1))
    kv_tokens: int = attrs.field(default=700_000, validator=v.ge(1))
    rollout_s: float = attrs.field(default=0.012, validator=v.gt(0))
    rollout_gap_s: float = attrs.field(default=0.0015, validator=v.ge(0))
    stretch: float = attrs.field(default=0.10, validator=[v.ge(0), v.le(1)])


class Promise(enum.Enum):
    """What of the TPOT hindsight has to keep."""

    QUANTILES = "quantiles"
    TWO_POINTS = "two_points"


@attrs.frozen
class Moment:
    """What a rule sees: when serving's next step would start after a rollout step, its own time so far, who decodes."""

    start_s: float
    own_s: float
    batch: Batch


class Rule:
    """Says whether a rollout step goes before serving's next step; this one never lets it."""

    def allows(self, moment: Moment) -> bool:
        """Return whether the rollout step is made."""
        del moment
        return False

    def note_end(self, job: Job, own_s: float, elapsed_s: float) -> None:
        """Hear that a request ended, its own time and the time since its first token."""


class LiveQuiet(Rule):
    """The rule that engines ask in production."""

    def __init__(self, stretch: float) -> None:
        """Begin without experience."""
        self._stretch, self._slo = stretch, Slo()
        self._paces = OwnPaces()

    def allows(self, moment: Moment) -> bool:
        """Return whether every request stays within its allowance."""
        batch, own_s, slo = moment.batch, moment.own_s, self._slo
        decoding = (
            Decoding(job.first_token_s, batch.made_tokens(job), own_s - job.own_at_first_s, slo)
            for job in batch.decoding()
        )
        return moment.start_s <= quiet_start_s(self._stretch, self._paces, decoding)

    def note_end(self, job: Job, own_s: float, elapsed_s: float) -> None:
        """Learn from a request."""
        self._paces.observe(own_s=own_s, elapsed_s=elapsed_s, num_tokens=job.output_tokens)


class KnownBudgets(Rule):
    """A rollout step is made as soon as no request's total delay passes what it may have."""

    def __init__(self, budgets_s: Sequence[float], *, host_gap_s: float) -> None:
        """Take the delay that each request may have, by index, and the host gap after each of serving's steps."""
        self._budgets_s, self._host_gap_s = budgets_s, host_gap_s

    def allows(self, moment: Moment) -> bool:
        """Return whether nobody's budget is passed."""
        # own time counts the gap after a request's first token, the moment of that token does not
        budgets_s, clock_s = self._budgets_s, moment.start_s - moment.own_s - self._host_gap_s
        return all(
            clock_s <= job.first_token_s - job.own_at_first_s + budgets_s[int(job.job_id)]
            for job in moment.batch.decoding()
        )


@attrs.frozen(kw_only=True)
class Replay:
    """What one replay showed. Shares are of the time from 0 to the last answer's end.

    Attributes:
        ttft_s: Of each request.
        tpot_s: Of each request; ``nan`` for answers of one token.
        own_s: Serving's own time between each request's first and last token.
        lent_s: Rollout steps made while serving had requests.
        idle_s: Time without any request, and of it used: the rollout engine's steps and the host gaps after them.
    """

    ttft_s: tuple[float, ...]
    tpot_s: tuple[float, ...]
    own_s: tuple[float, ...]
    span_s: float
    lent_s: float
    idle_s: float
    idle_used_s: float

    @property
    def share(self) -> float:
        """Share of the time that rollouts had."""
        return (self.lent_s + self.idle_used_s) / self.span_s

    def tpot_at(self, q: float) -> float:
        """Return a percentile of the TPOT."""
        return percentile([pace for pace in self.tpot_s if not math.isnan(pace)], q) or 0.0

    def ttft_at(self, q: float) -> float:
        """Return a percentile of the TTFT."""
        return percentile(self.ttft_s, q) or 0.0


class _Replayer:
    """One pass over the arrivals; see ``replay``."""

    def __init__(self, setup: QuietSetup, arrivals: Sequence[Arrival], rule: Rule | None) -> None:
        self.setup, self.rule = setup, rule
        self.jobs = [
            Job(
                job_id=str(i),
                prompt_tokens=arrival.prompt_tokens,
                output_tokens=arrival.output_tokens,
                max_output_tokens=arrival.output_tokens,
                arrived_s=arrival.at_s,
            )
            for i, arrival in enumerate(arrivals)
        ]
        self.batch = Batch(max_seqs=setup.max_seqs, kv_tokens=setup.kv_tokens, has_cache=False)
        self.num_arrived = 0
        self.now_s = self.own_s = self.ready_s = self.guest_ready_s = 0.0
        self.lent_s = self.idle_s = self.idle_used_s = 0.0
        self.ttft_s = [math.nan] * len(arrivals)
        self.tpot_s = [math.nan] * len(arrivals)
        self.request_own_s = [0.0] * len(arrivals)

    def run(self) -> Replay:
        while True:
            self._take_arrivals()
            if not self.batch.is_running:
                if self.num_arrived == len(self.jobs):
                    break
                self._idle(self.jobs[self.num_arrived].arrived_s)
            elif not self._lend():
                self._serve()
        return Replay(
            ttft_s=tuple(self.ttft_s),
            tpot_s=tuple(self.tpot_s),
            own_s=tuple(self.request_own_s),
            span_s=self.now_s,
            lent_s=self.lent_s,
            idle_s=self.idle_s,
            idle_used_s=self.idle_used_s,
        )

    def _take_arrivals(self) -> None:
        while self.num_arrived < len(self.jobs) and self.jobs[self.num_arrived].arrived_s <= self.now_s:
            self.batch.add(self.jobs[self.num_arrived])
            self.num_arrived += 1
        self.batch.admit()

    def _idle(self, until_s: float) -> None:
        """Make rollout steps one after the other until a request comes; the last one runs on."""
        since_s, self.now_s = self.now_s, until_s
        self.idle_s += until_s - since_s
        begin_s = max(since_s, self.guest_ready_s)
        if self.rule is None or begin_s >= until_s:
            return
        period_s = self.setup.rollout_s + self.setup.rollout_gap_s
        num_steps = math.ceil((until_s - begin_s) / period_s)
        end_s = begin_s + num_steps * period_s - self.setup.rollout_gap_s
        self.idle_used_s += until_s - begin_s
        self.guest_ready_s = end_s + self.setup.rollout_gap_s
        self.now_s = max(until_s, end_s)

    def _lend(self) -> bool:
        """Make a rollout step if the rule lets one go before serving's next step."""
        begin_s = max(self.now_s, self.guest_ready_s)
        if self.rule is None or self.batch.num_prompts or (begin_s > self.now_s and begin_s >= self.ready_s):
            return False
        end_s = begin_s + self.setup.rollout_s
        if not self.rule.allows(Moment(max(end_s, self.ready_s), self.own_s, self.batch)):
            return False
        self.now_s, self.guest_ready_s = end_s, end_s + self.setup.rollout_gap_s
        self.lent_s += self.setup.rollout_s
        return True

    def _serve(self) -> None:
        """Make one step of serving's."""
        if self.ready_s > self.now_s:
            self.now_s = self.ready_s
            self._take_arrivals()
        batch, times = self.batch, self.setup.times
        batch.relieve()
        num_decodes, context = batch.num_decodes, batch.decode_context_tokens
        plan = batch.plan_step(self.setup.chunk_tokens) if batch.has_prefill else None
        step_s = times.step_s(plan.num_tokens if plan else 0, num_decodes, context, plan.positions if plan else 0.0)
        self.now_s += step_s
        self.ready_s = self.now_s + times.host_gap_s
        self.own_s += step_s + times.host_gap_s
        started, ended = ([], batch.advance(1)) if plan is None else batch.finish_step(plan)
        for job in started:
            if job.first_token_s < 0:
                job.first_token_s, job.own_at_first_s = self.now_s, self.own_s
                self.ttft_s[int(job.job_id)] = self.now_s - job.arrived_s
        for job in ended:
            self._end(job)

    def _end(self, job: Job) -> None:
        elapsed_s, own_s, index = self.now_s - job.first_token_s, self.own_s - job.own_at_first_s, int(job.job_id)
        if job.output_tokens > 1:
            self.tpot_s[index] = elapsed_s / (job.output_tokens - 1)
            self.request_own_s[index] = own_s
        if self.rule is not None:
            self.rule.note_end(job, own_s, elapsed_s)


def replay(setup: QuietSetup, arrivals: Sequence[Arrival], rule: Rule | None) -> Replay:
    """Serve ``arrivals`` (in order), lending as ``rule`` says; ``None``: serving alone."""
    return _Replayer(setup, arrivals, rule).run()


def keeps_promise(setup: QuietSetup, alone: Replay, shared: Replay) -> bool:
    """Return whether the median and the P99 of the TPOT and the P99 of the TTFT stay within their bounds."""
    grown = 1 + setup.stretch
    ttft_s = max(_TTFT_GROWTH * alone.ttft_at(99), alone.ttft_at(99) + min(setup.rollout_s, _MAX_P99_TTFT_STEP_S))
    return shared.ttft_at(99) <= ttft_s and all(shared.tpot_at(q) <= grown * alone.tpot_at(q) for q in (50, 99))


def find_hindsight(
    setup: QuietSetup, arrivals: Sequence[Arrival], alone: Replay, promise: Promise = Promise.QUANTILES
) -> Replay:
    """Return the schedule that lends most of those found that keep the promise; see the module's text.

    Without any, it is the one that uses idle time alone.
    """
    known = functools.partial(KnownBudgets, host_gap_s=setup.times.host_gap_s)
    indices = [i for i, pace_s in enumerate(alone.tpot_s) if not math.isnan(pace_s)]
    best = replay(setup, arrivals, known([0.0] * len(arrivals)))
    for scale in _SCALES:
        limits_s = [scale * limit_s for limit_s in _limits_s(setup, alone, promise)]
        own_s: Sequence[float] = alone.own_s
        has_kept = False
        for _ in range(_ROUNDS):
            shared = replay(setup, arrivals, known(_budgets_s(arrivals, indices, own_s, limits_s)))
            own_s = shared.own_s
            if keeps_promise(setup, alone, shared):
                has_kept = True
                best = max(best, shared, key=lambda found: found.share)
        if has_kept:
            break
    return best


def _limits_s(setup: QuietSetup, alone: Replay, promise: Promise) -> list[float]:
    """Return, in order of rank, how slow each request may become."""
    paces_s = sorted(pace_s for pace_s in alone.tpot_s if not math.isnan(pace_s))
    median_s, p99_s = alone.tpot_at(50), alone.tpot_at(99)
    if promise is Promise.QUANTILES:
        return [(1 + setup.stretch) * max(pace_s, median_s) for pace_s in paces_s]
    middle = len(paces_s) // 2
    return [(1 + setup.stretch) * (median_s if rank <= middle else p99_s) for rank in range(len(paces_s))]


def _budgets_s(
    arrivals: Sequence[Arrival], indices: Sequence[int], own_s: Sequence[float], limits_s: Sequence[float]
) -> list[float]:
    """Return the delay that each request may have, given its own time and the limit at its rank."""
    gaps = [arrival.output_tokens - 1 for arrival in arrivals]
    budgets_s = [math.inf] * len(arrivals)
    ranked = sorted(indices, key=lambda i: own_s[i] / gaps[i])
    for limit_s, i in zip(limits_s, ranked, strict=True):
        budgets_s[i] = max(0.0, limit_s * gaps[i] - own_s[i])
    return budgets_s


def compare_quiet(setup: QuietSetup, arrivals: Sequence[Arrival]) -> dict[str, Any]:
    """Run serving alone, the live ``quiet`` rule and hindsight on ``arrivals``.

    Returns:
        Shares of the device's time that rollouts had (``quiet_share``, ``hindsight_share``, ``hindsight_two_points_share``) beside
        ``bound_share`` (idle + busy x (1 - 1/(1 + s))), ``quiet_over_hindsight``, ``idle_fraction`` and ``idle_used_fraction``; under
        ``growth`` what each of the three added to quantiles (TPOT relative, TTFT P99 in ms). JSON-able.
    """
    alone = replay(setup, arrivals, None)
    quiet = replay(setup, arrivals, LiveQuiet(setup.stretch))
    idle = alone.idle_s / alone.span_s
    hindsight = find_hindsight(setup, arrivals, alone, Promise.QUANTILES)
    # who keeps all quantiles keeps the two as well
    looser = max(find_hindsight(setup, arrivals, alone, Promise.TWO_POINTS), hindsight, key=lambda run: run.share)
    runs = {"quiet": quiet, "hindsight": hindsight, "hindsight_two_points": looser}
    return {
        "num_requests": len(arrivals),
        "rollout_step_ms": setup.rollout_s * 1e3,
        "bound_share": idle + (1 - idle) * (1 - 1 / (1 + setup.stretch)),
        **{f"{name}_share": run.share for name, run in runs.items()},
        "quiet_over_hindsight": quiet.share / hindsight.share if hindsight.share else 1.0,
        "idle_fraction": idle,
        "idle_used_fraction": quiet.idle_used_s / quiet.idle_s if quiet.idle_s else 1.0,
        "growth": {name: _growth(alone, run) for name, run in runs.items()},
    }


def _growth(alone: Replay, run: Replay) -> dict[str, float]:
    tpot = {f"tpot_p{q}": run.tpot_at(q) / alone.tpot_at(q) - 1 if alone.tpot_at(q) else 0.0 for q in (50, 75, 90, 99)}
    return {
        **tpot,
        "ttft_p50_ms": (run.ttft_at(50) - alone.ttft_at(50)) * 1e3,
        "ttft_p99_ms": (run.ttft_at(99) - alone.ttft_at(99)) * 1e3,
    }


def merge_quiet(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the mean of several seeds' ``compare_quiet``, with the smallest and the largest under ``spread``."""

    def merged(pick: Callable[[Sequence[float]], float], parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            key: merged(pick, [part[key] for part in parts])
            if isinstance(parts[0][key], dict)
            else pick([part[key] for part in parts])
            for key in parts[0]
        }

    return {
        "num_seeds": len(rows),
        **merged(lambda values: sum(values) / len(values), rows),
        "spread": {"min": merged(min, rows), "max": merged(max, rows)},
    }
