"""From what the arms measured to the summary, the timeline and the report. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.coserving.step_log import PacingReport, StepLog, StepRecord
from rose.observe.latency import Slo, paired_delay_ms, percentile, summarise
from rose.observe.report import BusyShare, DeviceStrip, LatencySeries, ReportData, StepFigures
from rose.observe.rollout import ArmSummary, completion_s, summarise_arm, summarise_step
from rose.observe.summary import BorrowedFigures, RunFigures, ServingFigures, build_summary
from rose.observe.timeline import Timeline, busy_shares
from rose.reference.arms import ArmResult, borrowed_accounts
from rose.reference.demo_config import DemoConfig
from rose.reference.load import HORIZON_S
from rose.types import DeviceId, EngineId, HopEnd

_BIN_S = 0.25
_WINDOW_S = 12.0
_BEST_FIXED_SEQUENCE = 0.40  # of all sequences of moves the one that solves most of the 128 default held-out maps
_SERVING = "serving"
_ROLLOUT = "rollout"


@attrs.frozen(kw_only=True)
class EngineLog:
    """One engine's turns on its device in one arm."""

    device: DeviceId
    lane: str
    steps: tuple[StepRecord, ...]

    def pacing(self) -> PacingReport:
        """Return how well the engine kept to its paced times."""
        log = StepLog()
        for step in self.steps:
            log.append(attrs.astuple(step))
        return log.report()


@attrs.frozen
class FleetLogs:
    """The turns of every engine in one arm, and the engines that were lost with theirs."""

    engines: Mapping[EngineId, EngineLog]
    lost: tuple[EngineId, ...] = ()

    @classmethod
    def read(
        cls, rows: Mapping[EngineId, Sequence[Sequence[float]]], devices: Mapping[EngineId, DeviceId]
    ) -> FleetLogs:
        """Read the rows that engines answer: the values of ``StepRecord`` in order."""
        return cls(
            {
                engine: EngineLog(
                    device=devices[engine],
                    lane=_SERVING if engine.startswith(_SERVING) else _ROLLOUT,
                    steps=tuple(_record(row) for row in steps),
                )
                for engine, steps in rows.items()
            },
            lost=tuple(engine for engine in devices if engine not in rows),
        )

    def device_s(self, lane: str, devices: Sequence[DeviceId]) -> float:
        """Return the device time that a lane took on these devices."""
        return sum(
            step.duration_s
            for log in self.engines.values()
            if log.lane == lane and log.device in devices
            for step in log.steps
        )


def _record(row: Sequence[float]) -> StepRecord:
    start_s, duration_s, late_s, slip_s, waited_s, num_prefill_tokens, num_decodes = row
    return StepRecord(
        start_s=start_s,
        duration_s=duration_s,
        late_s=late_s,
        slip_s=slip_s,
        waited_s=waited_s,
        num_prefill_tokens=int(num_prefill_tokens),
        num_decodes=int(num_decodes),
    )


@attrs.frozen(kw_only=True)
class RunRecord:
    """Everything a run measured: its arms and each arm's device turns, by the arm's name."""

    config: DemoConfig
    slo: Slo
    load_source: str
    shared_devices: tuple[DeviceId, ...]
    arms: Mapping[str, ArmResult]
    logs: Mapping[str, FleetLogs]

    @property
    def training_s(self) -> float:
        """Return the modelled training time of a step: the fixed arm's rollout has its configured share of the step."""
        fixed = [completion_s(step.times)[-1] for step in self.arms["fixed"].steps]
        share = self.config.fixed_rollout_share
        return sum(fixed) / len(fixed) * (1 - share) / share

    def summary_of(self, name: str) -> ArmSummary:
        """Return one arm's rollout figures."""
        arm = self.arms[name]
        steps = [summarise_step(step.times, rest_s=self.training_s) for step in arm.steps]
        return summarise_arm(steps, success_first=arm.success_first, success_last=arm.success_last)

    def serving_of(self, name: str) -> ServingFigures:
        """Return one arm's serving figures, paired with the fixed arm's requests."""
        arm, alone = self.arms[name], self.arms["fixed"].serving.records
        records, figures = (
            arm.serving.records,
            summarise(arm.serving.records, self.slo, num_unanswered=arm.serving.num_unanswered),
        )
        if name == "fixed":
            return ServingFigures(latency=figures)
        on_ungated = None
        if name == "rose" and "ungated" in self.arms:
            both = {(request.device, request.index) for request in self.arms["ungated"].serving.records}
            on_ungated = paired_delay_ms(
                alone, [request for request in records if (request.device, request.index) in both]
            )
        return ServingFigures(
            latency=figures, added_delay=paired_delay_ms(alone, records), added_delay_on_ungated=on_ungated
        )


def build_figures(record: RunRecord) -> dict[str, Any]:
    """Return the object of ``summary.json``."""
    rose = record.arms["rose"]
    has_ungated, has_uncapped = "ungated" in record.arms, "uncapped" in record.arms
    accounts = borrowed_accounts(rose)
    return build_summary(
        RunFigures(
            device=f"paced:{record.config.serving_profile}+{record.config.rollout_profile}",
            k=record.config.stretch,
            invalid_reasons=tuple(_problems(record)),
            fixed=record.summary_of("fixed"),
            rose=record.summary_of("rose"),
            ungated=record.summary_of("ungated") if has_ungated else None,
            uncapped_tokens_per_s=record.summary_of("uncapped").rollout_tokens_per_s if has_uncapped else None,
            rate_rps=min(record.arms[name].serving.rate_rps for name in ("fixed", "rose")),
            slo=record.slo,
            alone=record.serving_of("fixed"),
            shared=record.serving_of("rose"),
            serving_ungated=record.serving_of("ungated") if has_ungated else None,
            is_bit_exact=record.arms["fixed"].is_bit_exact and rose.is_bit_exact,
            versions=tuple(step.version for step in rose.steps if step.version is not None),
            borrowed=BorrowedFigures(
                turns=sum(account.num_attempts for account in accounts),
                evicted=sum(account.num_ended[HopEnd.EVICTED] for account in accounts),
                rerouted=sum(account.num_rerouted for account in accounts),
                device_seconds=record.logs["rose"].device_s(_ROLLOUT, record.shared_devices),
            ),
        )
    )


def _problems(record: RunRecord) -> list[str]:
    problems = []
    for name, logs in record.logs.items():
        for engine, log in logs.engines.items():
            report = log.pacing()
            if log.steps and not report.is_valid:
                problems.append(
                    f"pacing disturbed in {name}: {engine} is late by {report.late_p99_s * 1e3:.1f} ms (P99) of a median "
                    f"step of {report.median_step_s * 1e3:.1f} ms, rate error {report.rate_error:.1%}; repeat the run"
                )
        problems += [
            f"{engine} was lost in {name} or before, what it did is not known; repeat the run" for engine in logs.lost
        ]
    for name, arm in record.arms.items():
        if arm.serving.duration_s > HORIZON_S:
            problems.append(
                f"{name} took {arm.serving.duration_s:.0f} s, its serving load ends after {HORIZON_S:g} s; run fewer steps"
            )
        problems += [f"{name} step {step.step} lost trajectories" for step in arm.steps if not step.is_whole]
    return problems


def build_timeline(record: RunRecord) -> Timeline:
    """Return what every device did, and the rollouts of every step."""
    timeline = Timeline()
    for name, logs in record.logs.items():
        for log in logs.engines.values():
            for step in log.steps:
                kind = "prefill" if step.num_prefill_tokens else "decode"
                timeline.span(
                    log.device,
                    log.lane,
                    kind,
                    kind=log.lane,
                    start_s=step.start_s,
                    end_s=step.start_s + step.duration_s,
                )
        for result in record.arms[name].steps:
            start_s = min(time.started_s for time in result.times)
            timeline.span(
                "job",
                _ROLLOUT,
                f"{name} step {result.step}",
                kind=result.phase,
                start_s=start_s,
                end_s=start_s + completion_s(result.times)[-1],
                args={"reward": result.reward},
            )
    return timeline


def build_report(record: RunRecord, summary: Mapping[str, Any], timeline: Timeline) -> ReportData:
    """Return what the report shows."""
    config, fixed, rose = record.config, record.arms["fixed"], record.arms["rose"]
    middle = min(config.learn_steps, len(fixed.steps)) // 2
    return ReportData(
        title=f"GRPO on {config.num_dedicated} dedicated and {config.num_borrowed} borrowed GPUs",
        subtitle=f"Serving load: {record.load_source}. Environment {config.env}, seed {config.seed}.",
        summary=summary,
        strips=_strips(record, timeline),
        busy=_busy(record),
        latency=_latency(record),
        steps={arm.name: _steps(arm) for arm in (fixed, rose)},
        reference_success=_BEST_FIXED_SEQUENCE if _plays_the_default_maps(config) else None,
        versions=tuple(step.version for step in rose.steps if step.version is not None),
        completion_s={arm.name: completion_s(arm.steps[middle].times) for arm in (fixed, rose)},
        completion_step=middle + 1,
        assumptions=_assumptions(record),
    )


def _plays_the_default_maps(config: DemoConfig) -> bool:
    default = DemoConfig()
    return (config.env, config.num_eval_maps) == (default.env, default.num_eval_maps)


def _strips(record: RunRecord, timeline: Timeline) -> tuple[DeviceStrip, ...]:
    strips = []
    for name in ("fixed", "rose"):
        arm = record.arms[name]
        window_s = min(_WINDOW_S, arm.ended_s - arm.started_s)
        devices = sorted({log.device for log in record.logs[name].engines.values()})
        for device in devices:
            lanes = [
                busy_shares(
                    timeline.spans,
                    device=device,
                    lane=lane,
                    start_s=arm.started_s,
                    end_s=arm.started_s + window_s,
                    bin_s=_BIN_S,
                )
                for lane in (_SERVING, _ROLLOUT)
            ]
            strips.append(
                DeviceStrip(
                    arm=name,
                    device=device,
                    has_serving=device in record.shared_devices,
                    start_s=0.0,
                    bin_s=_BIN_S,
                    serving=lanes[0],
                    rollout=lanes[1],
                )
            )
    return tuple(strips)


def _busy(record: RunRecord) -> tuple[BusyShare, ...]:
    shares = []
    for name in ("fixed", "rose"):
        arm, logs = record.arms[name], record.logs[name]
        length_s = arm.ended_s - arm.started_s
        shares += [
            BusyShare(
                arm=name,
                device=device,
                serving_fraction=min(1.0, logs.device_s(_SERVING, [device]) / length_s),
                rollout_fraction=min(1.0, logs.device_s(_ROLLOUT, [device]) / length_s),
            )
            for device in sorted({log.device for log in logs.engines.values()})
        ]
    return tuple(shares)


def _latency(record: RunRecord) -> dict[str, LatencySeries]:
    names = {"fixed": "alone", "rose": "shared", "ungated": "ungated"}
    return {
        shown: LatencySeries(
            ttft_ms=tuple(request.ttft_s * 1e3 for request in record.arms[arm].serving.records),
            tpot_ms=tuple(
                request.tpot_s * 1e3 for request in record.arms[arm].serving.records if request.tpot_s is not None
            ),
        )
        for arm, shown in names.items()
        if arm in record.arms
    }


def _steps(arm: ArmResult) -> tuple[StepFigures, ...]:
    before = StepFigures(step=0, phase="learn", success=arm.success_first)
    during = [
        StepFigures(
            step=step.step,
            phase=step.phase,
            reward=step.reward,
            success=arm.success_last if step is arm.steps[-1] else None,
        )
        for step in arm.steps
    ]
    return (before, *during)


def _assumptions(record: RunRecord) -> tuple[str, ...]:
    config = record.config
    words = [
        completion
        for arm in ("fixed", "rose")
        for completion in [percentile([time.num_tokens for step in record.arms[arm].steps for time in step.times], 50)]
    ]
    return (
        f"Devices are paced: real engines of tiny models (rollout: {config.rollout_engine}, serving: {config.serving_engine}) take the step times of {config.serving_profile} and "
        f"{config.rollout_profile} (roofline); all times are modelled seconds, {config.stretch:g} wall seconds each.",
        f"One word of the policy stands for {config.tokens_per_token} tokens of the modelled agent, so that a turn is as "
        f"long as an agent's (median trajectory: {words[0] or 0:.0f} words fixed, {words[1] or 0:.0f} rose).",
        f"Training and publishing take {record.training_s:.2f} modelled s a step in every arm, so that the fixed arm's "
        f"rollout has {config.fixed_rollout_share:.1%} of its step; the clock stands still while the learner really works.",
        f"At most {config.cap_per_engine} turns run on an engine at a time, in every arm; without that cap the dedicated "
        "engines alone batch more and the gain over them is the one printed as over uncapped.",
        f"The policy starts from {config.warm_start_steps} supervised steps on demonstrations. Its learning phase has "
        f"{config.learn_steps} steps at {config.learn_lr:g}; the last {config.sparse_steps} at {config.sparse_lr:g} show "
        "sparse deltas and are not meant to learn.",
        "The ungated and uncapped arms are short rollouts without training at the weights that the engines hold.",
    )
