from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from run_standins import POLICIES, alone_run, policy_run, predict_alone, predict_policy, small_record, write_folder

from rose.backends.paced import Profile, profile_named
from rose.errors import ConfigError
from rose.simulation.calibrate import HEADS, calibrate, jittered
from rose.simulation.profile_fit import StepScale
from rose.simulation.run_record import RunRecord, read_run
from rose.simulation.run_replay import RunPrediction

TRUTH = StepScale(linear=1.2, kv=1.3, prefill=0.9, host_gap_s=0.002)
OVERHEAD_S = 0.003
LIVE = {"ungated": (0.050, 20.0), "paper": (0.049, 21.0), "slo": (0.040, 24.0)}

Simulate = Callable[..., RunPrediction]


def live_record(**changes: object) -> tuple[RunRecord, list]:
    """Three runs of each arm on a GPU that is not quite the profile's, and the log of the first arm."""
    record = small_record()
    runs, rows = [], []
    for repeat in (1, 2, 3):
        run, rows = alone_run(record, scale=TRUTH, overhead_s=OVERHEAD_S, repeat=repeat)
        runs.append(run)
        for arm, (ttft_s, rollout_s) in LIVE.items():
            shift = 1 + 0.03 * (repeat - 2)
            runs.append(policy_run(record, arm, ttft_s=ttft_s * shift, rollout_s=rollout_s * shift, repeat=repeat))
    return attrs.evolve(record, runs=tuple(runs), **changes), rows


def simulator(*, policy_error: float = 0.0, asked: list[Any] | None = None) -> Simulate:
    def simulate(
        record: RunRecord,
        arm: str,
        *,
        serving: Profile,
        rollout: Profile,
        api_overhead_s: float,
        missed_turns: float,
        seed: int,
    ) -> RunPrediction:
        if asked is not None:
            asked.append((arm, serving, rollout, api_overhead_s, missed_turns, seed))
        if arm == "alone":
            return predict_alone(record, serving=serving, api_overhead_s=api_overhead_s)
        ttft_s, rollout_s = LIVE[arm]
        return predict_policy(record, ttft_s=ttft_s * (1 + policy_error), rollout_s=rollout_s)

    return simulate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    record, rows = live_record()
    return write_folder(tmp_path_factory.mktemp("run"), record, rows)


def test_finds_what_alone_was_made_with(folder: Path) -> None:
    report = calibrate(folder, simulate=simulator())

    fit = report.fit
    assert fit.serving.scale.linear == pytest.approx(TRUTH.linear, rel=0.02)
    assert fit.serving.scale.kv == pytest.approx(TRUTH.kv, rel=0.05)
    assert fit.serving.error_mean < 0.005
    assert fit.serving.nominal_error_mean > 0.1
    assert fit.serving.scale.host_gap_s == pytest.approx(0.002)
    assert fit.api_overhead_s == pytest.approx(OVERHEAD_S, rel=0.1)
    assert fit.first_token_delay_s == pytest.approx(OVERHEAD_S)
    assert fit.replayed_fraction == 1
    assert report.num_valid == {"alone": 3, "ungated": 3, "paper": 3, "slo": 3}


def test_the_rollout_profile_is_fitted_to_dedicated_engines(folder: Path) -> None:
    fit = calibrate(folder, simulate=simulator()).fit

    assert fit.rollout is not None
    assert fit.rollout.num_steps == 9 * 19
    assert fit.rollout.decode_ratio == pytest.approx(1.5)


def test_missed_turns_come_from_the_log_of_ungated_alone(folder: Path, tmp_path: Path) -> None:
    record, rows = live_record()
    others = tuple(run for run in record.runs if run.arm != "ungated")
    write_folder(tmp_path, attrs.evolve(record, runs=others), rows)

    assert calibrate(folder, simulate=simulator()).fit.missed_turns == pytest.approx(1 / 2)
    assert calibrate(tmp_path, simulate=simulator()).fit.missed_turns == 0


def test_a_run_of_alone_only_has_no_rollout_profile_to_fit(tmp_path: Path) -> None:
    record, rows = live_record()
    alone = tuple(run for run in record.runs if run.arm == "alone")

    report = calibrate(write_folder(tmp_path, attrs.evolve(record, runs=alone), rows), simulate=simulator())

    assert report.fit.rollout is None
    assert report.is_within


def test_a_right_simulator_is_within_on_every_figure_and_in_order(folder: Path) -> None:
    report = calibrate(folder, simulate=simulator())

    assert report.is_within
    assert {each.arm for each in report.comparisons} == {"alone", *POLICIES}
    assert all(abs(each.error) < 0.03 for each in report.comparisons if each.arm == "alone")
    by_ttft = next(order for order in report.orders if order.figure == "ttft_p50_ms")
    assert by_ttft.measured == ("slo", "paper", "ungated")
    assert ("paper", "ungated") in by_ttft.tied


def test_a_wrong_simulator_is_caught_and_alone_stays_right(folder: Path) -> None:
    report = calibrate(folder, simulate=simulator(policy_error=0.2))

    assert not report.is_within
    assert {each.arm for each in report.comparisons if each.is_within is False} == set(POLICIES)
    assert any("NO (15%)" in row for row in report.rows())


def test_only_alone_is_fitted_to(folder: Path, tmp_path: Path) -> None:
    """Other policies' runs must not move what is fitted."""
    record, rows = live_record()
    slower = [attrs.evolve(run, rollout_s=run.rollout_s * 3) if run.rollout_s else run for run in record.runs]
    other = write_folder(tmp_path, attrs.evolve(record, runs=tuple(slower)), rows)

    assert calibrate(other, simulate=simulator()).fit == calibrate(folder, simulate=simulator()).fit


def test_every_arm_is_simulated_with_what_was_fitted_and_as_many_seeds(folder: Path) -> None:
    asked: list[Any] = []

    report = calibrate(folder, simulate=simulator(asked=asked), num_seeds=2)

    fit = report.fit
    record = read_run(folder)
    fitted = (fit.serving_profile(record), fit.rollout_profile(record))
    assert fitted[1].linear_s(1) > 1.4 * profile_named("h100:qwen3-8b").linear_s(1)
    assert asked == [
        ("alone", *fitted, 0.0, fit.missed_turns, 0),
        *((arm, *fitted, fit.api_overhead_s, fit.missed_turns, seed) for arm in ("alone", *LIVE) for seed in (0, 1)),
    ]


@pytest.mark.parametrize("seed", [0, 1])
def test_seeds_move_moments_and_nothing_else(seed: int) -> None:
    record, _ = live_record()

    moved = jittered(record, 0.001, seed)

    assert moved == jittered(record, 0.001, seed)
    assert moved != jittered(record, 0.001, seed + 1)
    before, after = (sorted(each.arrivals["shared0"], key=lambda a: a.prompt_tokens) for each in (record, moved))
    assert all(0 <= b.at_s - a.at_s <= 0.002 for a, b in zip(before, after, strict=True))
    assert [attrs.evolve(a, at_s=0) for a in before] == [attrs.evolve(a, at_s=0) for a in after]
    assert [a.at_s for a in moved.arrivals["shared0"]] == sorted(a.at_s for a in moved.arrivals["shared0"])
    [old], [new] = record.trajectories[0].turns, moved.trajectories[0].turns
    assert 0 < new.env_s - old.env_s <= 0.002
    assert (new.new_tokens, new.output_tokens) == (old.new_tokens, old.output_tokens)


def test_an_overhead_is_never_negative(folder: Path) -> None:
    def slow(record: RunRecord, arm: str, **given: Any) -> RunPrediction:
        return simulator()(record, arm, **given | {"api_overhead_s": given["api_overhead_s"] + 1.0})

    assert calibrate(folder, simulate=slow).fit.api_overhead_s == 0


def test_a_simulator_that_answers_fewer_requests_is_paired_by_its_median(folder: Path) -> None:
    def short(record: RunRecord, arm: str, **given: Any) -> RunPrediction:
        prediction = simulator()(record, arm, **given)
        return attrs.evolve(prediction, requests=prediction.requests[:-1])

    assert calibrate(folder, simulate=short).fit.api_overhead_s == pytest.approx(OVERHEAD_S, abs=0.003)


def test_invalid_runs_are_counted_and_used_for_nothing(tmp_path: Path) -> None:
    record, rows = live_record()
    wild = policy_run(record, "slo", ttft_s=9.0, rollout_s=900.0, repeat=4)
    with_wild = attrs.evolve(record, runs=(*record.runs, attrs.evolve(wild, problems=("pacing disturbed",))))

    report = calibrate(write_folder(tmp_path, with_wild, rows), simulate=simulator())

    assert report.num_invalid == {"alone": 0, "ungated": 0, "paper": 0, "slo": 1}
    assert report.is_within


def test_an_arm_without_a_valid_run_is_left_out(tmp_path: Path) -> None:
    record, rows = live_record()
    runs = [attrs.evolve(run, problems=("disturbed",)) if run.arm == "paper" else run for run in record.runs]

    report = calibrate(write_folder(tmp_path, attrs.evolve(record, runs=tuple(runs)), rows), simulate=simulator())

    assert report.num_valid["paper"] == 0
    assert "paper" not in {each.arm for each in report.comparisons}


def test_refuses_a_folder_without_a_valid_run_of_alone(tmp_path: Path) -> None:
    record, rows = live_record()
    runs = tuple(run for run in record.runs if run.arm != "alone")
    write_folder(tmp_path, attrs.evolve(record, runs=runs), rows)

    with pytest.raises(ConfigError, match="no valid run of 'alone'"):
        calibrate(tmp_path, simulate=simulator())


def test_refuses_logs_that_are_of_other_requests(tmp_path: Path) -> None:
    record, rows = live_record()
    write_folder(tmp_path, record, [[*row[:6], row[6] + 1] for row in rows])

    with pytest.raises(ConfigError, match="step logs of 'alone' fit none of its requests"):
        calibrate(tmp_path, simulate=simulator())


def test_the_report_can_be_read_and_written(folder: Path) -> None:
    report = calibrate(folder, simulate=simulator())

    data = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert data["is_within"] is True
    assert len(data["comparisons"]) == len(report.rows())
    assert {len(row) for row in report.rows()} == {len(HEADS)}
    notes = "\n".join(report.notes())
    assert "paced:h100:qwen2.5-7b+h100:qwen3-8b k=2.5" in notes
    assert "runs valid and invalid: alone 3 and 0, ungated 3 and 0" in notes
    assert "turns that serving missed: 0.50" in notes
    assert "order by rollout_s: ungated < paper < slo, those that differ as predicted" in notes
