from __future__ import annotations

import pytest
from study_standins import SCENARIO

from rose.backends.paced.profiles import PROFILES
from rose.errors import ConfigError
from rose.simulation import preflight
from rose.simulation.axes import evolve, evolve_all
from rose.simulation.preflight import check_scenarios

FOUR_GPUS = next(name for name, profile in PROFILES.items() if profile.num_gpus == 4)


def problems(*scenarios):
    with pytest.raises(ConfigError) as caught:
        check_scenarios(scenarios)
    return str(caught.value).splitlines()


def test_what_is_in_order_passes():
    check_scenarios(
        [SCENARIO, evolve(SCENARIO, "link.model", "qwen3-8b"), evolve(SCENARIO, "rollout.profile", FOUR_GPUS)]
    )


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"serving.profile": "abacus"}, ["serving.profile", "'abacus'", "h100:qwen2.5-7b"]),
        ({"rollout.profile": "abacus"}, ["rollout.profile", "'abacus'", "h100:qwen2.5-7b"]),
        ({"rollout.workload": "chess"}, ["rollout.workload", "'chess'", "frozenlake"]),
        ({"link.model": "abacus"}, ["link.model", "'abacus'", "qwen3-8b"]),
        (
            {"rollout.profile": FOUR_GPUS, "cluster.rollout_gpus": 6},
            ["cluster.rollout_gpus = 6", "4 GPUs of one engine"],
        ),
        (
            {"rollout.profile": FOUR_GPUS, "cluster.borrowed_gpus": 6},
            ["cluster.borrowed_gpus = 6", "4 GPUs of one engine"],
        ),
        (
            {"serving.profile": FOUR_GPUS, "cluster.borrowed_gpus": 6},
            ["cluster.borrowed_gpus = 6", "4 GPUs of one engine"],
        ),
    ],
)
def test_what_cannot_be_is_one_line_with_its_key(settings, parts):
    (line,) = problems(evolve_all(SCENARIO, settings))
    assert all(part in line for part in parts), line


def test_a_bad_row_of_a_trace_is_named(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("timestamp_s,input_tokens,output_tokens\n0,10,5\n1,ten,5\n")
    (line,) = problems(evolve(SCENARIO, "serving.trace", str(path)))
    assert "trace.csv, line 3" in line
    assert "'ten'" in line


def test_a_bad_line_of_own_logs_is_named(tmp_path):
    path = tmp_path / "logs.jsonl"
    path.write_text('{"turns": []}\n')
    (line,) = problems(evolve(SCENARIO, "rollout.logs", str(path)))
    assert "logs.jsonl" in line


def test_each_problem_has_a_line_and_is_told_once():
    bad = evolve_all(SCENARIO, {"serving.profile": "abacus", "rollout.workload": "chess"})
    lines = problems(bad, evolve(bad, "prices.spot", 3.0), evolve(bad, "rollout.profile", "slate"))
    assert [line.split()[0] for line in lines] == ["serving.profile:", "rollout.workload", "rollout.profile:"]


def test_what_scenarios_share_is_checked_once(monkeypatch):
    seen = []
    real = preflight.serving_profile
    monkeypatch.setattr(preflight, "serving_profile", lambda serving: seen.append(serving) or real(serving))
    check_scenarios([evolve(SCENARIO, "cluster.borrowed_gpus", num_gpus) for num_gpus in (0, 8, 16)])
    assert seen == [SCENARIO.serving]


def test_an_slo_without_room_for_a_prefill_chunk_is_refused_by_its_keys():
    with pytest.raises(
        ConfigError, match=r"serving\.tpot_slo_s = 0\.02 leaves no room .* serving\.chunk_tokens = 2048"
    ):
        check_scenarios([evolve(SCENARIO, "serving.tpot_slo_s", 0.02)])
    check_scenarios([evolve(evolve(SCENARIO, "serving.tpot_slo_s", 0.04), "serving.chunk_tokens", 512)])
