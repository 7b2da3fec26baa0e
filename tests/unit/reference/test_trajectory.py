from __future__ import annotations

import attrs
import pytest

from rose.reference.trajectory import Trajectory, TurnRecord, account, derive_seed, plan_groups
from rose.types import EngineId, Hop, HopEnd, RouteReason


def trajectory(trajectory_id: str, group_id: str = "s/g0", **changes) -> Trajectory:
    values = {
        "environment_seed": 0,
        "token_ids": (1, 5, 6),
        "mask": (0, 0, 1),
        "logprobs": (0.0, 0.0, -0.5),
        "reward": 1.0,
        "started_s": 0.0,
        "ended_s": 1.0,
    }
    return Trajectory(trajectory_id=trajectory_id, group_id=group_id, **(values | changes))


def test_plans_are_whole_groups_with_their_own_names_and_seeds():
    plans = plan_groups("s3", [7, 9], group_size=2, run_seed=0)
    assert [(plan.trajectory_id, plan.group_id, plan.environment_seed) for plan in plans] == [
        ("s3/g0/t0", "s3/g0", 7),
        ("s3/g0/t1", "s3/g0", 7),
        ("s3/g1/t0", "s3/g1", 9),
        ("s3/g1/t1", "s3/g1", 9),
    ]
    seeds = {plan.sampling_seed for plan in plans}
    assert len(seeds) == 4
    assert plans == plan_groups("s3", [7, 9], group_size=2, run_seed=0)
    assert seeds.isdisjoint(plan.sampling_seed for plan in plan_groups("s3", [7, 9], group_size=2, run_seed=1))
    assert seeds.isdisjoint(plan.sampling_seed for plan in plan_groups("s4", [7, 9], group_size=2, run_seed=0))


def test_derived_seeds_do_not_run_parts_together():
    assert derive_seed(1, 23) != derive_seed(12, 3)
    assert 0 <= derive_seed("a") < 2**31


def test_ids_mask_and_logprobs_must_be_of_one_length():
    with pytest.raises(ValueError, match="3 ids, 2 mask, 3 log-probs"):
        trajectory("a", mask=(0, 1))


def test_a_whole_step_is_accounted_whole():
    plans = plan_groups("s", [1, 2], group_size=2, run_seed=0)
    back = [trajectory(plan.trajectory_id, plan.group_id) for plan in reversed(plans)]
    report = account(plans, back)
    assert report.is_whole
    assert (report.num_planned, report.num_finished, report.num_failed) == (4, 4, 0)


def test_lost_doubled_unplanned_and_failed_ones_are_named():
    plans = plan_groups("s", [1, 2, 3], group_size=2, run_seed=0)
    names = ["s/g0/t0", "s/g1/t0", "s/g1/t0", "s/g1/t1", "s/g2/t0", "s/g2/t1", "x"]
    back = [trajectory(name) for name in names]
    back[4] = attrs.evolve(back[4], failure="EngineLostError: gone")
    report = account(plans, back)
    assert not report.is_whole
    assert report.lost == ("s/g0/t1",)
    assert report.doubled == ("s/g1/t0",)
    assert report.unplanned == ("x",)
    assert report.broken_groups == ("s/g0", "s/g1", "s/g2")
    assert (report.num_finished, report.num_failed) == (6, 1)


def test_hops_are_those_of_all_turns():
    hop = Hop(engine_id=EngineId("e"), reason=RouteReason.AFFINITY, num_tokens=1, ended=HopEnd.FINISHED)
    turn = TurnRecord(started_s=0, ended_s=1, num_prompt_tokens=2, num_tokens=1, has_action=True, hops=(hop,))
    one = trajectory("a", turns=(turn, turn))
    assert one.hops == (hop, hop)
    assert one.num_tokens == 1
