from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from synthetic_study import fixed, problem_sweep, study_result

from rose.simulation.report.bounds import broken, floor_gain, has_floor, headline, rivals, slot_use
from rose.simulation.report.data import Strategy, SweepPoint, read_study


def study_of(names=None, **change):
    return read_study({**study_result(names), **change})


def point(completion=(), value=1.0, **values):
    return SweepPoint(
        value=value, strategies=(Strategy(name="fixed", values=values, completion=completion),),
        serving_alone=None, floor_s=None, floor_gain=None, amdahl_gain=None,
    )  # fmt: skip


def with_rollouts(count, cap):
    config = {"rollout": {"num_trajectories": count, "cap_per_gpu": cap}}
    return study_of([], scenario={"name": "own", "config": config})


def test_the_floor_as_a_gain_follows_from_the_baseline():
    study = study_of(["paper"])
    assert floor_gain(study) == pytest.approx(801.0 / (801.0 - 696.0 + 372.0))
    assert floor_gain(study_of(["paper"], floor_gain=1.5)) == 1.5


def test_an_asynchronous_loop_has_no_floor():
    config = {"loop": {"algorithm": "async"}}
    study = study_of(["paper"], scenario={"name": "own", "config": config})
    assert not has_floor(study)
    assert floor_gain(study) is None


def test_without_the_baseline_or_the_longest_trajectory_there_is_no_floor():
    assert floor_gain(study_of(["paper"], floor_s=None)) is None
    assert floor_gain(study_of(["paper"], fixed={})) is None


def test_the_headline_is_the_best_policy_that_keeps_the_slo():
    assert headline(study_of()).name == "default"
    result = study_result()
    result["default"]["tpot_p99_ms"] = 150.1
    assert broken(read_study(result), read_study(result).get("default")) == ["tpot_p99_ms"]
    assert headline(read_study(result)).name == "paper"


def test_without_a_policy_that_keeps_the_slo_the_best_one_is_the_headline():
    result = study_result(["paper", "static"])
    result["paper"]["ttft_p99_ms"] = 900.0
    assert headline(read_study(result)).name == "paper"
    assert headline(study_of(["spot", "serverless"])).name == "spot"
    assert headline(study_of([])) is None


def test_rivals_are_all_but_the_baseline_that_have_the_figure():
    assert [strategy.name for strategy in rivals(study_of(["spot", "static"]), "ttft_p99_ms")] == ["static"]


def test_the_use_of_slots_by_hand():
    # Four trajectories on two slots; two end at 10 s, one at 20 s, the last at 40 s.
    use = slot_use(with_rollouts(4, 2), point(((10.0, 0.5), (20.0, 0.75), (40.0, 1.0))))
    assert use.idle_fraction == pytest.approx(1 - (2 * 10 + 2 * 10 + 1 * 20) / (2 * 40))
    assert use.queued_fraction == pytest.approx(2 * 10 / (4 * 10 + 2 * 10 + 1 * 20))


def test_more_trajectories_than_the_batch_needed_queue_too():
    curve = ((10.0, 0.5), (40.0, 1.0))
    assert slot_use(with_rollouts(4, 4), point(curve)).queued_fraction == 0
    assert slot_use(with_rollouts(4, 4), point(curve, demand=2.0)).queued_fraction > 0


def test_figures_that_the_result_tells_are_taken_as_they_are():
    use = slot_use(with_rollouts(4, 2), point(idle_fraction=0.4, queued_fraction=0.1))
    assert attrs.astuple(use) == (0.4, 0.1)


def test_without_a_curve_settings_or_a_baseline_the_use_is_unknown():
    assert slot_use(with_rollouts(4, 2), point()) is None
    assert slot_use(study_of([], scenario={"name": "own", "config": {}}), point(((1.0, 1.0),))) is None
    assert slot_use(with_rollouts(4, 2), point(((0.0, 1.0),))) is None
    assert slot_use(with_rollouts(4, 2), point(((1.0, 1.0),), value="many")) is None


@given(
    ends=st.lists(st.floats(min_value=0.01, max_value=1e4), min_size=1, max_size=40),
    count=st.integers(min_value=1, max_value=500),
    cap=st.integers(min_value=1, max_value=600),
)
def test_shares_lie_between_nothing_and_all(ends, count, cap):
    curve = tuple((end, (index + 1) / len(ends)) for index, end in enumerate(sorted(ends)))
    use = slot_use(with_rollouts(count, cap), point(curve))
    assert -1e-9 <= use.idle_fraction <= 1
    assert 0 <= use.queued_fraction < 1
    if count <= cap:
        assert use.queued_fraction == 0


def test_more_gpus_leave_more_slots_empty_and_fewer_waiting():
    study = read_study({**study_result([]), "sweep": problem_sweep()})
    uses = [slot_use(study, each) for each in study.sweeps[0].points]
    idle, queued = [use.idle_fraction for use in uses], [use.queued_fraction for use in uses]
    assert idle == sorted(idle)
    assert queued == sorted(queued, reverse=True)
    assert fixed()["completion"][-1][0] == 696.0
