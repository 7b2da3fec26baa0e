from __future__ import annotations

import pytest

from rose.observe.rollout import TrajectoryTime, completion_s, summarise_arm, summarise_step


def trajectory(start, end, tokens=10):
    return TrajectoryTime(started_s=start, ended_s=end, num_tokens=tokens)


def test_a_step_runs_from_the_first_start_to_the_last_end():
    step = summarise_step([trajectory(5, 9), trajectory(5.5, 25), trajectory(6, 7)], rest_s=5)
    assert step.rollout_s == 20
    assert step.step_s == 25
    assert step.num_tokens == 30


def test_p75_is_the_end_of_the_nearest_rank():
    ends = [1, 2, 3, 4, 5, 6, 7, 20]
    step = summarise_step([trajectory(0, end) for end in ends], rest_s=0)
    assert step.p75_fraction == 6 / 20


def test_the_completion_curve_ascends_from_the_first_start():
    assert completion_s([trajectory(5, 9), trajectory(4, 6)]) == (2, 5)
    assert completion_s([]) == ()


@pytest.mark.parametrize("trajectories", [[], [trajectory(3, 3)]])
def test_a_step_in_which_nothing_took_time_is_refused(trajectories):
    with pytest.raises(ValueError, match="a step needs trajectories"):
        summarise_step(trajectories, rest_s=1)


def test_an_arm_weighs_throughput_by_time_and_not_by_step():
    short = summarise_step([trajectory(0, 10, tokens=1000)], rest_s=2)
    long = summarise_step([trajectory(0, 30, tokens=1000)], rest_s=2)
    arm = summarise_arm([short, long], success_first=0.1, success_last=0.4)
    assert arm.rollout_tokens_per_s == 50
    assert arm.rollout_s == 20
    assert arm.step_s == 22
    assert arm.rollout_share == pytest.approx(arm.rollout_s / arm.step_s)
    assert (arm.success_first, arm.success_last) == (0.1, 0.4)


def test_an_arm_without_a_step_is_refused():
    with pytest.raises(ValueError, match="at least one step"):
        summarise_arm([])
