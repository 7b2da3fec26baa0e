"""``rose simulate --calibrate RUN_DIR``: fit the simulator to a live run, then hold its predictions against the run.

``rose.simulation.run_fit`` says what is fitted to which part of the run. Then every arm is simulated several times and the
means are compared. Which engine a turn goes to hangs on moments, live as simulated: the seeds move every arrival and every
environment's answer by as little as live clients were late, so that the mean is over what chance may do.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, Protocol

import attrs

from rose.backends.paced import Profile
from rose.simulation.prediction_error import (
    ALONE,
    Comparison,
    OrderCheck,
    check_orders,
    compare,
    measured_figures,
    predicted_figures,
)
from rose.simulation.profile_fit import StepFit
from rose.simulation.run_fit import UNGATED, RunFit, fit_run
from rose.simulation.run_record import RunRecord, read_run
from rose.simulation.run_replay import RunPrediction, simulate_run

NUM_SEEDS = 8
HEADS = ("arm", "figure", "measured", "runs", "predicted", "error", "within")


class SimulateRun(Protocol):
    """Simulates one arm of a live run; ``rose.simulation.run_replay.simulate_run`` is the one that ships."""

    def __call__(
        self,
        record: RunRecord,
        arm: str,
        *,
        serving: Profile,
        rollout: Profile,
        api_overhead_s: float,
        missed_turns: float,
        seed: int,
    ) -> RunPrediction:
        """Return what the run would give."""


@attrs.frozen(kw_only=True)
class CalibrationReport:
    """What was fitted, and predicted against measured for every arm.

    Attributes:
        source: The run's folder.
        taken_on: Devices and machine, to be printed with every figure.
        num_valid, num_invalid: Runs by arm.
    """

    source: str
    taken_on: str
    num_valid: dict[str, int]
    num_invalid: dict[str, int]
    fit: RunFit
    comparisons: tuple[Comparison, ...]
    orders: tuple[OrderCheck, ...]

    @property
    def is_within(self) -> bool:
        """Return whether every judged figure is within its tolerance and every measured order was predicted."""
        return all(each.is_within is not False for each in self.comparisons) and all(o.is_same for o in self.orders)

    def rows(self) -> list[tuple[str, ...]]:
        """Return the cells of a table under ``HEADS``, a row a figure."""
        return [
            (
                each.arm,
                each.figure,
                f"{each.measured:.5g}",
                f"{each.measured_low:.5g}..{each.measured_high:.5g}",
                f"{each.predicted:.5g}",
                f"{each.error:+.1%}",
                "shown only"
                if each.tolerance is None
                else f"{'yes' if each.is_within else 'NO'} ({each.tolerance:.0%})",
            )
            for each in self.comparisons
        ]

    def notes(self) -> list[str]:
        """Return the rest as lines of text: what was fitted, how many runs, in which order the policies come."""
        fit = self.fit
        runs = ", ".join(f"{arm} {num} and {self.num_invalid[arm]}" for arm, num in self.num_valid.items())
        lines = [
            f"taken on {self.taken_on}",
            f"runs valid and invalid: {runs}",
            f"serving's profile, fitted to {ALONE} ({fit.replayed_fraction:.1%} of its log): {_step_line(fit.serving)}",
            f"first token: {fit.api_overhead_s * 1e3:.2f} ms of overhead, {fit.first_token_delay_s * 1e3:.2f} of them after "
            f"the step; from {ALONE}",
            f"turns that serving missed: {fit.missed_turns:.2f} each time both wanted the device; from {UNGATED}'s step log",
        ]
        if fit.rollout is not None:
            lines.insert(3, f"rollout profile, fitted to dedicated engines: {_step_line(fit.rollout)}")
        return lines + [_order_line(order) for order in self.orders]

    def to_json(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "source": self.source,
            "taken_on": self.taken_on,
            "is_within": self.is_within,
            "num_valid": dict(self.num_valid),
            "num_invalid": dict(self.num_invalid),
            "fit": attrs.asdict(self.fit),
            "comparisons": [
                attrs.asdict(each) | {"error": each.error, "is_within": each.is_within} for each in self.comparisons
            ],
            "orders": [attrs.asdict(order) | {"is_same": order.is_same} for order in self.orders],
        }


def _step_line(fit: StepFit) -> str:
    scale = fit.scale
    gap = "" if scale.host_gap_s is None else f", host gap {scale.host_gap_s * 1e3:.2f} ms"
    return (
        f"linear x{scale.linear:.3f}, KV x{scale.kv:.3f}, prefill x{scale.prefill:.3f}{gap}; {fit.num_steps} steps, error "
        f"{fit.error_mean:.2%} mean, {fit.error_p99:.2%} P99 ({fit.nominal_error_mean:.2%} mean before)"
    )


def _order_line(order: OrderCheck) -> str:
    ties = "".join(f", {low} and {high} overlap" for low, high in order.tied)
    wrong = "".join(f", {low} before {high} was not predicted" for low, high in order.wrong)
    verdict = "those that differ as predicted" if order.is_same else "NOT as predicted"
    return f"order by {order.figure}: {' < '.join(order.measured)}, {verdict}{wrong}{ties}"


def calibrate(run_dir: Path, *, simulate: SimulateRun = simulate_run, num_seeds: int = NUM_SEEDS) -> CalibrationReport:
    """Fit the simulator to a live run and compare.

    Args:
        run_dir: What ``benchmarks/fidelity.py`` wrote.
        simulate: What predicts an arm.
        num_seeds: Simulations of each arm.

    Raises:
        ConfigError: The folder is unreadable or malformed, or has no valid run of ``alone``.
    """
    record = read_run(run_dir)

    def predict(of: RunRecord, arm: str, fit: RunFit, seed: int) -> RunPrediction:
        return simulate(
            of,
            arm,
            serving=fit.serving_profile(record),
            rollout=fit.rollout_profile(record),
            api_overhead_s=fit.api_overhead_s,
            missed_turns=fit.missed_turns,
            seed=seed,
        )

    fit = fit_run(record, run_dir, lambda bare: predict(record, ALONE, bare, 0))
    moved = [jittered(record, fit.client_lateness_s, seed) for seed in range(num_seeds)]
    comparisons: list[Comparison] = []
    for arm in record.arms:
        measured = [measured_figures(record, run) for run in record.valid_runs(arm)]
        if measured:
            predicted = [predicted_figures(predict(each, arm, fit, seed)) for seed, each in enumerate(moved)]
            comparisons += compare(arm, measured, predicted)
    return CalibrationReport(
        source=str(run_dir),
        taken_on=_taken_on(record),
        num_valid={arm: len(record.valid_runs(arm)) for arm in record.arms},
        num_invalid={arm: sum(run.arm == arm and not run.is_valid for run in record.runs) for arm in record.arms},
        fit=fit,
        comparisons=tuple(comparisons),
        orders=tuple(check_orders(comparisons)),
    )


def jittered(record: RunRecord, lateness_s: float, seed: int) -> RunRecord:
    """Return the record with every arrival and every environment's answer later by up to twice ``lateness_s``."""
    rng = random.Random(seed)

    def late(time_s: float) -> float:
        return time_s + rng.uniform(0.0, 2 * lateness_s)

    arrivals = {
        device: tuple(sorted((attrs.evolve(a, at_s=late(a.at_s)) for a in planned), key=lambda a: a.at_s))
        for device, planned in sorted(record.arrivals.items())
    }
    trajectories = tuple(
        attrs.evolve(script, turns=tuple(attrs.evolve(turn, env_s=late(turn.env_s)) for turn in script.turns))
        for script in record.trajectories
    )
    return attrs.evolve(record, arrivals=arrivals, trajectories=trajectories)


def _taken_on(record: RunRecord) -> str:
    profiles = f"{record.serving.profile}+{record.rollout.profile}"
    made = record.made
    return f"paced:{profiles} k={record.k:g}, {made.machine}, {made.num_cores} cores, commit {made.commit}, {made.date}"
