from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_standins import SCENARIO, SPEED, outcome, simulate, simulate_serving

from rose.simulation import results
from rose.simulation.axes import Sweep, evolve
from rose.simulation.outcome import Outcome, ServingOutcome
from rose.simulation.results import FIGURES, build_result
from rose.simulation.study import Study, run_study

STUDY = Study(scenario=SCENARIO, strategies=("paper", "default"), seeds=(0, 1, 2))


@attrs.frozen
class About:
    kind: str
    summary: str


def result_of(study=STUDY, about=None, simulate=simulate):
    done = run_study(study, jobs=1, simulate=simulate, simulate_serving=simulate_serving)
    return build_result(done, about)


@pytest.fixture(scope="module")
def result():
    return result_of(about={"paper": About("policy", "as published")})


def test_the_keys_stand_in_the_stated_order(result):
    assert list(result) == [
        *("scenario", "seeds", "assumptions", "strategies", "fixed", "paper", "default", "serving_alone"),
        *("floor_s", "floor_gain", "amdahl_gain", "simulated_turns", "failures"),
    ]
    assert list(result["paper"]) == ["kind", "summary", *FIGURES, "completion", "sync_by_version_s", "spread"]
    assert list(result["fixed"]) == [*FIGURES, "completion", "sync_by_version_s", "spread"]
    assert list(result["fixed"])[:5] == ["step_s", "rollout_s", "rollout_share", "p75_fraction", "end_to_end_gain"]


def test_every_figure_of_the_contracts_is_there(result):
    plain = {field.name for field in attrs.fields(Outcome)} - {"strategy", "seed", "steps", "serving"}
    serving = {field.name for field in attrs.fields(ServingOutcome)}
    assert plain | serving <= set(result["paper"])
    assert serving <= set(result["serving_alone"])


def test_the_scenario_is_whole(result):
    config = result["scenario"]["config"]
    assert (result["scenario"]["name"], result["seeds"], result["assumptions"]) == ("toy", [0, 1, 2], ["a toy"])
    assert (config["serving"]["layout"], config["rollout"]["tail"]) == ("colocated", "own-duration")
    assert set(config) == {"cluster", "serving", "rollout", "loop", "link", "prices"}
    assert result["strategies"] == ["fixed", "paper", "default"]
    assert (result["paper"]["kind"], result["paper"]["summary"]) == ("policy", "as published")


def test_figures_are_means_over_the_seeds_and_the_spread_stands_beside_them(result):
    steps = [outcome(SCENARIO, "paper", seed).step_s for seed in (0, 1, 2)]
    assert result["paper"]["step_s"] == pytest.approx(statistics.mean(steps), rel=1e-5)
    spread = result["paper"]["spread"]["step_s"]
    assert (spread["min"], spread["max"]) == (pytest.approx(min(steps)), pytest.approx(max(steps)))
    assert spread["sd"] == pytest.approx(statistics.stdev(steps), rel=1e-5)
    assert result["paper"]["sync_s"] == 11.0
    assert result["paper"]["sync_by_version_s"] == [11.0, 11.0]
    assert result["paper"]["num_turns"] == 1001.0
    assert result["simulated_turns"] == 9 * 1001


def test_gains_are_taken_seed_by_seed(result):
    pairs = [(outcome(SCENARIO, "fixed", seed), outcome(SCENARIO, "default", seed)) for seed in (0, 1, 2)]
    gains = [fixed.step_s / own.step_s for fixed, own in pairs]
    assert result["default"]["end_to_end_gain"] == pytest.approx(statistics.mean(gains), rel=1e-5)
    ratio_of_means = sum(fixed.step_s for fixed, _ in pairs) / sum(own.step_s for _, own in pairs)
    assert result["default"]["end_to_end_gain"] != pytest.approx(ratio_of_means, rel=1e-5)
    assert result["default"]["rollout_gain"] == SPEED["default"]
    assert result["default"]["spread"]["rollout_gain"]["sd"] == pytest.approx(0.0, abs=1e-9)
    assert (result["fixed"]["end_to_end_gain"], result["fixed"]["rollout_gain"]) == (1.0, 1.0)


def test_the_gain_over_spot_is_there_with_spot(result):
    assert result["paper"]["over_spot_rollout_gain"] is None
    tables = result_of(attrs.evolve(STUDY, strategies=("paper", "spot")))
    assert tables["paper"]["over_spot_rollout_gain"] == pytest.approx(1.25 / 1.1, rel=1e-5)


def test_derived_figures(result):
    assert result["paper"]["borrowed_fraction"] == pytest.approx(16_000 / 500_000)
    step_s = [outcome(SCENARIO, "paper", seed).step_s for seed in (0, 1, 2)]
    assert result["paper"]["tokens_per_s"] == pytest.approx(statistics.mean(250_000 / s for s in step_s), rel=1e-5)


def test_what_was_not_measured_is_none_and_has_no_spread(result):
    assert result["fixed"]["ttft_p99_ms"] is None
    assert "ttft_p99_ms" not in result["fixed"]["spread"]
    assert result["paper"]["ttft_p99_ms"] == 342.0


@pytest.mark.parametrize(("tail", "fraction"), [("own-duration", 0.3), ("end-time", 0.6)])
def test_p75_is_read_as_the_scenario_reads_it(tail, fraction):
    table = result_of(attrs.evolve(STUDY, scenario=evolve(SCENARIO, "rollout.tail", tail)))["fixed"]
    assert (table["p75_fraction"], table["own_p75_fraction"], table["end_p75_fraction"]) == (fraction, 0.3, 0.6)


def test_bounds_of_the_gain():
    result = result_of(attrs.evolve(STUDY, seeds=(0,)))
    assert result["floor_s"] == 150.0
    assert result["floor_gain"] == pytest.approx(500 / 250, rel=1e-5)
    assert result["fixed"]["rollout_share"] == 0.8
    assert result["amdahl_gain"] == pytest.approx(1 / (0.2 + 0.8 / 3), rel=1e-5)


def test_an_asynchronous_loop_has_no_floor():
    result = result_of(attrs.evolve(STUDY, scenario=evolve(SCENARIO, "loop.algorithm", "async")))
    assert result["floor_gain"] is None
    assert result["amdahl_gain"] is not None


def test_without_a_borrowed_gpu_amdahl_gives_nothing():
    assert result_of(attrs.evolve(STUDY, scenario=evolve(SCENARIO, "cluster.borrowed_gpus", 0)))["amdahl_gain"] == 1.0


def test_each_point_of_a_sweep_has_the_same_tables():
    result = result_of(attrs.evolve(STUDY, sweep=Sweep(axis="borrowed", values=(8, 16))))
    sweep = result["sweep"]
    assert (sweep["axis"], sweep["unit"]) == ("borrowed", "GPUs")
    assert [point["value"] for point in sweep["points"]] == [8, 16]
    first, second = sweep["points"]
    assert first["paper"]["borrowed_gpu_s"] == 480.0
    assert first["amdahl_gain"] < second["amdahl_gain"] == result["amdahl_gain"]
    start = list(result).index("fixed")
    assert list(first) == ["value", *list(result)[start : list(result).index("sweep")]]
    assert {key: value for key, value in second.items() if key != "value"} == {
        key: result[key] for key in list(second)[1:]
    }


@pytest.mark.parametrize(
    ("axis", "unit"),
    [
        ("link", "Gbps"),
        ("scale", ""),
        ("layout", ""),
        ("serving.rate_rps", "req/s"),
        ("loop.train_s", "s"),
        ("name", ""),
    ],
)
def test_a_sweep_tells_its_unit(axis, unit):
    assert results._unit(axis) == unit


def test_failed_cases_are_named_and_the_rest_is_shown():
    def flaky(scenario, strategy, seed):
        return simulate(scenario, "impossible" if (strategy, seed) == ("fixed", 1) else strategy, seed)

    result = result_of(attrs.evolve(STUDY, strategies=("paper", "impossible")), simulate=flaky)
    assert result["failures"][0] == "toy, strategy fixed, seed 1: 8 GPUs are too few"
    assert len(result["failures"]) == 4
    kept = [outcome(SCENARIO, "fixed", seed).step_s / outcome(SCENARIO, "paper", seed).step_s for seed in (0, 2)]
    assert result["paper"]["end_to_end_gain"] == pytest.approx(statistics.mean(kept), rel=1e-5)
    assert result["paper"]["num_turns"] == 1001.0
    assert result["impossible"]["step_s"] is None
    assert (result["impossible"]["completion"], result["impossible"]["spread"]) == ([], {})


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_have_six_digits_and_zero_no_sign(number):
    rounded = results._rounded(number)
    assert rounded == pytest.approx(number, rel=1e-5, abs=1e-320)
    assert float(f"{rounded:.6g}") == rounded
    assert repr(rounded) != "-0.0"


@pytest.mark.parametrize("numbers", [[1.0], [1.0, 3.0], [2.0, 2.0, 2.0], [0.1, 0.2, 0.7]])
def test_the_deviation_is_the_sample_standard_deviation(numbers):
    expected = statistics.stdev(numbers) if len(numbers) > 1 else 0.0
    assert results._deviation(numbers) == pytest.approx(expected)


def test_the_document_has_the_same_bytes_under_any_hash_seed():
    code = (
        "import json\n"
        "from study_standins import SCENARIO, simulate, simulate_serving\n"
        "from rose.simulation.axes import Sweep\n"
        "from rose.simulation.results import build_result\n"
        "from rose.simulation.study import Study, run_study\n"
        "study = Study(scenario=SCENARIO, strategies=('paper', 'spot', 'impossible'), seeds=(0, 1),"
        " sweep=Sweep(axis='load', values=(0.1, 0.2)))\n"
        "done = run_study(study, jobs=1, simulate=simulate, simulate_serving=simulate_serving)\n"
        "print(json.dumps(build_result(done), allow_nan=False))\n"
    )
    texts = [
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=Path(__file__).parent,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parent), "PATH": ""},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["sweep"]["points"][1]["value"] == 0.2
