"""A made-up run in the shape of a real one: the data that tests and eyes look at reports with."""

from __future__ import annotations

import random
from itertools import accumulate

from rose.observe.latency import PairedDelay, RequestRecord, Slo, summarise
from rose.observe.report import BusyShare, DeviceStrip, LatencySeries, ReportData, StepFigures
from rose.observe.rollout import ArmSummary
from rose.observe.summary import BorrowedFigures, RunFigures, ServingFigures, VersionRecord, build_summary

SLO = Slo(ttft_ms=500.0, tpot_ms=150.0)
FIXED = ArmSummary(
    rollout_s=31.2, step_s=35.9, rollout_tokens_per_s=1630.0, rollout_share=0.869, p75_fraction=0.71,
    success_first=0.11, success_last=0.43,
)  # fmt: skip
ROSE = ArmSummary(
    rollout_s=21.4, step_s=26.1, rollout_tokens_per_s=2377.0, rollout_share=0.82, p75_fraction=0.66,
    success_first=0.11, success_last=0.41,
)  # fmt: skip
UNGATED = ArmSummary(rollout_s=20.3, step_s=25.0, rollout_tokens_per_s=2503.0, rollout_share=0.81, p75_fraction=0.65)
BORROWED = BorrowedFigures(turns=3128, evicted=14, rerouted=19, device_seconds=412.5)


def records(seed: int, *, ttft_ms: float, tpot_ms: float, num_requests: int = 290) -> list[RequestRecord]:
    """Requests with log-normal latency around the given medians."""
    rng = random.Random(seed)
    made = []
    for index in range(num_requests):
        first_s = index * 0.18 + ttft_ms * rng.lognormvariate(0, 0.5) / 1e3
        gap_s = tpot_ms * rng.lognormvariate(0, 0.16) / 1e3
        times = list(accumulate([first_s, *(gap_s * rng.uniform(0.7, 1.3) for _ in range(rng.randint(1, 40)))]))
        made.append(
            RequestRecord.from_token_times(index=index, device="gpu2", arrived_s=index * 0.18, token_times_s=times)
        )
    return made


ARMS = {
    "alone": records(1, ttft_ms=36, tpot_ms=9.6),
    "shared": records(2, ttft_ms=43, tpot_ms=42),
    "ungated": records(3, ttft_ms=62, tpot_ms=34),
}


def versions() -> tuple[VersionRecord, ...]:
    """Twelve dense versions, then four sparse ones."""
    learn = [(n, "learn", 1e-3, 0.93 - 0.012 * n, "dense", 607_744) for n in range(1, 13)]
    sparse = [(n, "sparse", 1e-6, 0.05 - 0.008 * (n - 13), "sparse", 34_000 - 3_000 * (n - 13)) for n in range(13, 17)]
    return tuple(
        VersionRecord(
            n=n, phase=phase, lr=lr, changed_fraction=changed, codec=codec, bytes_dense=607_744, bytes_sent=sent,
            stage_s=0.041, pause_s=0.006,
        )
        for n, phase, lr, changed, codec, sent in (*learn, *sparse)
    )  # fmt: skip


def figures(**changes: object) -> RunFigures:
    """The figures of the made-up run."""
    base = {
        "device": "paced:h100",
        "k": 2.0,
        "invalid_reasons": (),
        "fixed": FIXED,
        "rose": ROSE,
        "ungated": UNGATED,
        "uncapped_tokens_per_s": 1804.0,
        "rate_rps": 5.53,
        "slo": SLO,
        "alone": ServingFigures(latency=summarise(ARMS["alone"], SLO)),
        "shared": ServingFigures(
            latency=summarise(ARMS["shared"], SLO),
            added_delay=PairedDelay(mean_ms=8.1, standard_error_ms=0.6, num_pairs=290),
        ),
        "serving_ungated": ServingFigures(
            latency=summarise(ARMS["ungated"], SLO),
            added_delay=PairedDelay(mean_ms=29.4, standard_error_ms=1.5, num_pairs=290),
        ),
        "is_bit_exact": True,
        "versions": versions(),
        "borrowed": BORROWED,
    }
    return RunFigures(**{**base, **changes})  # type: ignore[arg-type]


def _strips(rng: random.Random, num_bins: int) -> tuple[DeviceStrip, ...]:
    made = []
    for arm, busy_until in (("fixed", 0.87), ("rose", 0.82)):
        for device in ("dedicated-0", "dedicated-1", "serving-0", "serving-1"):
            has_serving = device.startswith("serving")
            serving = [rng.uniform(0.2, 0.8) if has_serving else 0.0 for _ in range(num_bins)]
            in_rollout = [(index / num_bins * 2) % 1 < busy_until for index in range(num_bins)]
            lends = not has_serving or arm == "rose"
            rollout = [
                max(0.0, (0.97 - used) * rng.uniform(0.8, 1.0)) if lends and is_on else 0.0
                for used, is_on in zip(serving, in_rollout, strict=True)
            ]
            made.append(
                DeviceStrip(
                    arm=arm, device=device, has_serving=has_serving, start_s=120.0, bin_s=0.25,
                    serving=tuple(serving), rollout=tuple(rollout),
                )
            )  # fmt: skip
    return tuple(made)


def _steps(rng: random.Random, arm: str) -> tuple[StepFigures, ...]:
    last = FIXED.success_last if arm == "fixed" else ROSE.success_last
    measured = {0: 0.11, 6: 0.29, 12: last, 16: last}
    return tuple(
        StepFigures(
            step=step,
            phase="learn" if step <= 12 else "sparse",
            reward=None if step == 0 else 0.1 + 0.33 * min(1.0, step / 12) + rng.uniform(-0.04, 0.04),
            success=measured.get(step),
        )
        for step in range(17)
    )


def report_data(**changes: object) -> ReportData:
    """A whole report's data; ``changes`` replace the figures that the summary is made from."""
    rng = random.Random(7)
    strips = _strips(rng, 280)
    return ReportData(
        title="FrozenLake GRPO on 2 dedicated and 2 borrowed GPUs",
        subtitle="Qwen3-style policy beside a Qwen2.5-style serving model that replays azure2023_conv.csv.gz",
        summary=build_summary(figures(**changes)),
        strips=strips,
        busy=tuple(
            BusyShare(
                arm=strip.arm, device=strip.device,
                serving_fraction=sum(strip.serving) / len(strip.serving),
                rollout_fraction=sum(strip.rollout) / len(strip.rollout),
            )
            for strip in strips
        ),
        latency={
            arm: LatencySeries(
                ttft_ms=tuple(record.ttft_s * 1e3 for record in made),
                tpot_ms=tuple(record.tpot_s * 1e3 for record in made if record.tpot_s is not None),
            )
            for arm, made in ARMS.items()
        },
        steps={arm: _steps(rng, arm) for arm in ("fixed", "rose")},
        reference_success=0.40,
        versions=versions(),
        completion_s={
            arm: (*sorted(rng.betavariate(2.2, 1.6) * end_s for _ in range(127)), end_s)
            for arm, end_s in (("fixed", 31.2), ("rose", 21.4))
        },
        completion_step=9,
        assumptions=(
            "Step times are those of h100:qwen3-8b and h100:qwen2.5-7b; engines, tokens and weights are real.",
            "Modelled seconds are stretched by k=2 on this machine; every figure is given unstretched.",
            "One word of the policy stands for 8 tokens of the modelled agent.",
            "Training takes 4.7 modelled seconds a step in every arm: 13.1 % of the fixed arm's step.",
        ),
    )  # fmt: skip
