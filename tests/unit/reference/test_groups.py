from __future__ import annotations

import itertools
import random

import pytest

from rose.reference.groups import (
    GroupBook,
    GroupRules,
    LostPolicy,
    StepGroups,
    advantages,
    by_group,
    oldest_version,
    split_stale,
    without_groups_of,
)
from rose.reference.grpo import find_signal
from rose.reference.trajectory import Trajectory, TrajectoryPlan, plan_groups
from rose.types import VersionSpan, WeightVersion


def plan(number: int, size: int = 4) -> list[TrajectoryPlan]:
    return plan_groups(f"s/{number}", [number], group_size=size, run_seed=0)


def finished(
    what: TrajectoryPlan | str, reward: float = 0.0, *, group: str = "", versions=(), failure=None
) -> Trajectory:
    name = what if isinstance(what, str) else what.trajectory_id
    return Trajectory(
        trajectory_id=name,
        group_id=group or (what.group_id if isinstance(what, TrajectoryPlan) else ""),
        environment_seed=0,
        token_ids=(1, 5),
        mask=(0, 1),
        logprobs=(0.0, -0.5),
        reward=reward,
        started_s=0.0,
        ended_s=1.0,
        versions=tuple(VersionSpan(version=WeightVersion("r", n), start=1, end=2) for n in versions),
        failure=failure,
    )


def lost(plan: TrajectoryPlan, why: str = "EnvironmentFailedError: gone") -> Trajectory:
    return finished(plan, failure=why)


def rules(**changes) -> GroupRules:
    return GroupRules(**({"num_groups": 1, "max_groups": 1} | changes))


def play(book: GroupBook, answer) -> StepGroups:
    """Run a book to its end; ``answer`` makes a trajectory of each plan."""
    out = book.start()
    while out:
        out += book.take(answer(out.pop(0)))
    assert book.is_done
    return book.result()


REWARDS = [1.0] * 4 + [0.0] * 12


def test_s04_advantages_of_a_whole_group():
    values = advantages(REWARDS, epsilon=1e-6)
    assert values[0] == pytest.approx(1.677047, abs=1e-6)
    assert values[-1] == pytest.approx(-0.559016, abs=1e-6)


@pytest.mark.parametrize(("index", "good", "bad"), [(15, 1.602078, -0.582574), (0, 1.932179, -0.483045)])
def test_s04_a_lost_sample_is_left_out_and_never_scored_zero(index: int, good: float, bad: float):
    book = GroupBook(rules(lost=LostPolicy.PARTIAL), lambda n: plan(n, 16))
    numbers = itertools.count()

    def answer(each: TrajectoryPlan) -> Trajectory:
        number = next(numbers)
        return lost(each) if number == index else finished(each, REWARDS[number])

    result = play(book, answer)
    rewards = [each.reward for each in result.trajectories]
    assert (len(rewards), result.num_lost, result.num_refills) == (15, 1, 0)
    values = sorted(set(advantages(rewards, epsilon=1e-6)))
    assert values == pytest.approx([bad, good], abs=1e-6)


def test_s04_a_group_is_refilled_under_fresh_ids_or_dropped_by_the_flag():
    def answer(each: TrajectoryPlan) -> Trajectory:
        return lost(each) if each.trajectory_id.endswith("t2") else finished(each, 1.0)

    refilled = play(GroupBook(rules(lost=LostPolicy.REFILL), plan), answer)
    assert (len(refilled.trajectories), refilled.num_refills, refilled.num_broken) == (4, 1, 0)
    assert len({each.trajectory_id for each in refilled.trajectories}) == 4
    assert {each.group_id for each in refilled.trajectories} == {"s/0/g0"}
    dropped = play(GroupBook(rules(lost=LostPolicy.DROP), plan), answer)
    assert (dropped.trajectories, dropped.num_broken) == ((), 1)


def test_s04_grouping_is_by_id_not_by_stride():
    rows = [finished(f"a{i}", float(i), group="A") for i in range(3)] + [
        finished(f"b{i}", i, group="B") for i in range(4)
    ]
    random.Random(0).shuffle(rows)
    assert {name: len(members) for name, members in by_group(rows).items()} == {"A": 3, "B": 4}
    assert len(find_signal(rows).samples) == 7


def test_s04_a_replacement_draws_other_samples_of_the_same_episode():
    book = GroupBook(rules(), plan)
    first = book.start()[0]
    (again,) = book.take(lost(first))
    assert again.trajectory_id not in {each.trajectory_id for each in plan(0)}
    assert (again.group_id, again.environment_seed) == (first.group_id, first.environment_seed)
    assert again.sampling_seed != first.sampling_seed


def test_s06_a_late_result_of_a_replaced_trajectory_is_ignored():
    book = GroupBook(rules(), lambda n: plan(n, 2))
    first, second = book.start()
    (again,) = book.take(lost(first, "TimeoutError: hung"))
    assert book.take(finished(first, 1.0)) == []
    assert not book.is_done
    assert book.take(finished(again, 0.0)) == book.take(finished(second, 1.0)) == []
    assert book.take(finished(second, 1.0)) == []
    result = book.result()
    assert [each.reward for each in result.trajectories] == [0.0, 1.0]
    assert (result.num_ignored, result.num_lost, result.last_failure) == (2, 1, "TimeoutError: hung")


def test_s03_a_poisoned_group_ends_after_a_bounded_number_of_tries():
    result = play(GroupBook(rules(max_refills=3), plan), lost)
    assert (result.num_lost, result.num_refills, result.num_broken) == (4 + 3, 3, 1)
    assert result.trajectories == ()
    assert result.last_failure == "EnvironmentFailedError: gone"


def test_dynamic_sampling_replaces_flat_groups_up_to_a_bound():
    def answer(each: TrajectoryPlan) -> Trajectory:
        return finished(each, float(each.environment_seed % 2 and each.trajectory_id.endswith("t0")))

    dynamic = rules(num_groups=2, max_groups=6, has_dynamic_sampling=True)
    result = play(GroupBook(dynamic, plan), answer)
    assert (result.num_groups, result.num_flat, result.num_started) == (2, 2, 4)
    assert [each.group_id for each in result.trajectories[::4]] == ["s/1/g0", "s/3/g0"]
    hopeless = play(GroupBook(dynamic, plan), finished)
    assert (hopeless.num_groups, hopeless.num_flat, hopeless.num_started) == (0, 6, 6)
    plain = play(GroupBook(rules(num_groups=2, max_groups=6), plan), finished)
    assert (plain.num_groups, plain.num_flat, plain.num_started) == (2, 0, 2)


def test_any_order_and_any_losses_give_whole_groups_of_distinct_trajectories():
    for seed in range(200):
        rng = random.Random(seed)
        dynamic = rules(num_groups=3, max_groups=5, has_dynamic_sampling=rng.random() < 0.5, max_refills=2)
        book = GroupBook(dynamic, plan)
        out, seen = book.start(), []
        while out:
            each = out.pop(rng.randrange(len(out)))
            seen.append(each.trajectory_id)
            out += book.take(lost(each) if rng.random() < 0.2 else finished(each, float(rng.random() < 0.5)))
            if rng.random() < 0.1:
                book.take(finished(rng.choice(seen), 9.0))
        result = book.result()
        sizes = [len(members) for members in by_group(result.trajectories).values()]
        assert book.is_done
        assert len(seen) == len(set(seen)) == 4 * result.num_started + result.num_refills
        assert sizes == [4] * result.num_groups
        assert result.num_groups + result.num_flat + result.num_broken == result.num_started <= 5
        assert all(each.reward < 9 for each in result.trajectories)


def test_staleness_is_that_of_the_oldest_token():
    mixed, fresh, unknown = finished("a", versions=(3, 7)), finished("b", versions=(6,)), finished("c")
    assert (oldest_version(mixed), oldest_version(unknown)) == (3, None)
    assert split_stale([mixed, fresh, unknown], newest=7, max_staleness=1) == ([fresh, unknown], [mixed])
    assert split_stale([mixed], newest=4, max_staleness=1) == ([mixed], [])


def test_a_group_that_lost_stale_members_is_kept_or_dropped_by_the_flag():
    old, rest, other = (finished(name, group=group) for name, group in (("a", "A"), ("b", "A"), ("c", "B")))
    assert without_groups_of([rest, other], [old], LostPolicy.PARTIAL) == [rest, other]
    assert without_groups_of([rest, other], [old], LostPolicy.REFILL) == [other]
    assert without_groups_of([rest, other], [old], LostPolicy.DROP) == [other]
