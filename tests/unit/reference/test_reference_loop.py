from __future__ import annotations

import asyncio
import itertools

import attrs
import pytest
from loop_rig import Episodes, Rig

from rose.errors import EngineError, EnvironmentFailedError, TurnFailedError
from rose.reference.environment import Step
from rose.reference.groups import LostPolicy, by_group, oldest_version
from rose.testing import Fault, FaultKind
from rose.types import WeightVersion

PAIRS = list(itertools.product(("frozenlake", "household"), ("grpo", "dapo", "async")))


@pytest.mark.parametrize(("env", "algorithm"), PAIRS)
async def test_each_pair_runs_to_its_end(env: str, algorithm: str):
    rig = Rig(env=env, algorithm=algorithm)
    reports = await rig.run()
    assert [report.step for report in reports] == [1, 2, 3]
    assert reports == rig.steps
    assert rig.learner.published == [True, False, False, False]
    assert rig.source.version == WeightVersion("job", 3)
    assert rig.episodes.running == {}, "no episode is left"
    for report, given in zip(reports, rig.learner.given, strict=True):
        sizes = [len(members) for members in by_group(given).values()]
        assert set(sizes) <= {4}, "groups are whole"
        assert report.num_trained == len(given) == 4 * report.groups["num_groups"]
        assert report.num_tokens == sum(each.num_tokens for each in given) > 0
        staleness = [report.step - 1 - oldest_version(each) for each in given]
        assert all(0 <= age <= (1 if algorithm == "async" else 0) for age in staleness)
        assert report.staleness == {age: staleness.count(age) for age in sorted(set(staleness))}
        if algorithm == "dapo":
            assert all(len({each.reward for each in members}) > 1 for members in by_group(given).values())
    names = [each.trajectory_id for given in rig.learner.given for each in given]
    assert len(names) == len(set(names))
    assert any(each.reward == 1 for given in rig.learner.given for each in given), "the stand-in policy wins sometimes"


async def test_on_policy_tokens_are_all_of_the_version_that_is_trained():
    rig = Rig(algorithm="grpo", num_steps=4)
    await rig.run()
    for step, given in enumerate(rig.learner.given):
        assert {span.version.n for each in given for span in each.versions} == {step}


async def test_each_rollout_is_announced_to_the_pool_before_its_weights_are_there():
    rig = Rig(algorithm="dapo", num_steps=3)
    await rig.run()
    assert [num for num, _ in rig.announced] == [12, 12, 12]
    assert rig.phases[:3] == [(0, "first weights"), (1, "rollout"), (1, "training")]


async def test_the_same_samples_are_drawn_by_every_run():
    first, second = Rig(num_dedicated=1, num_borrowed=0), Rig(num_dedicated=3)
    await first.run()
    await second.run()
    for one, other in zip(first.learner.given, second.learner.given, strict=True):
        assert [each.token_ids for each in one] == [each.token_ids for each in other]


async def test_dedicated_engines_roll_out_while_borrowed_ones_still_fetch_the_weights():
    rig = Rig(algorithm="grpo")
    has_rolled_out, stage = asyncio.Event(), rig.lent[0].stage

    async def slow_stage(update):
        if update.target.n == 1:  # it ends when the step that those weights are for has been rolled out
            await has_rolled_out.wait()
        await stage(update)

    async def step(trajectory_id, text, play=rig.episodes.step):
        result = await play(trajectory_id, text)
        if trajectory_id.startswith("step2/") and not rig.episodes.running:
            has_rolled_out.set()
        return result

    rig.lent[0].stage, rig.episodes.step = slow_stage, step
    async with asyncio.timeout(30):
        reports = await rig.run()
    assert 0 < reports[1].sync_overlap_s <= reports[1].rollout_s
    own = {engine.engine_id for engine in rig.engines}
    assert {hop.engine_id for each in rig.learner.given[1] for hop in each.hops} <= own
    assert rig.lent[0].weight_version == WeightVersion("job", 3)


async def test_async_rolls_out_the_next_step_while_the_learner_trains():
    rig = Rig(algorithm="async", num_steps=3)
    train, live = rig.learner.train, []

    async def slow_train(trajectories):
        report = await train(trajectories)
        for _ in range(200):
            await asyncio.sleep(0)
        live.append(rig.pool.accounts()["own0"].num_attempts)
        return report

    rig.learner.train = slow_train
    reports = await rig.run()
    assert reports[0].train_overlap_s > 0
    assert reports[-1].train_overlap_s == 0, "nothing follows the last step"
    assert reports[0].staleness == {0: 12}
    assert 1 in reports[1].staleness


@pytest.mark.parametrize(("lost", "num_left"), [(LostPolicy.PARTIAL, 11), (LostPolicy.DROP, 8)])
async def test_async_drops_and_counts_what_is_too_old_by_its_oldest_token(lost: LostPolicy, num_left: int):
    rig = Rig(algorithm="async", lost=lost)

    def age(result, turn):
        if turn.trajectory_id != "step3/1/g0/t2" or not result.versions:
            return result
        oldest = attrs.evolve(result.versions[0], version=WeightVersion("job", 0))
        return attrs.evolve(result, versions=(oldest, *result.versions[1:]))

    rig.change_result = age
    reports = await rig.run()
    assert [report.num_stale for report in reports] == [0, 0, 1]
    assert [report.num_trained for report in reports] == [12, 12, num_left]
    assert all(each.trajectory_id != "step3/1/g0/t2" for each in rig.learner.given[2])


class Sandboxes(Episodes):
    """In the first group's first try, one episode raises at its second turn and one hangs."""

    def __init__(self, kind) -> None:
        super().__init__(kind)
        self.turns: dict[str, int] = {}

    async def step(self, trajectory_id: str, text: str | None) -> Step:
        self.turns[trajectory_id] = self.turns.get(trajectory_id, 0) + 1
        if trajectory_id == "step1/0/g0/t3" and self.turns[trajectory_id] == 2:
            message = "sandbox died"
            raise EnvironmentFailedError(message)
        if trajectory_id == "step1/0/g0/t5":
            await asyncio.sleep(60)
        return await super().step(trajectory_id, text)


async def test_s06_failed_environments_are_replaced_and_never_scored_zero():
    rig = Rig(num_steps=1, num_groups=1, group_size=8, context={"trajectory_timeout_s": 0.2})
    rig.episodes = Sandboxes(rig.kind)
    (report,) = await rig.run()
    (given,) = rig.learner.given
    names = {each.trajectory_id for each in given}
    assert len(given) == 8
    assert {"step1/0/g0/t3", "step1/0/g0/t5"}.isdisjoint(names)
    assert {"step1/0/g0/refill1", "step1/0/g0/refill2"} <= names
    assert (report.groups["num_lost"], report.groups["num_refills"]) == (2, 2)
    assert report.groups["last_failure"].startswith("TimeoutError: not done after trajectory_timeout_s = 0.2")
    assert {"step1/0/g0/t3", "step1/0/g0/t5"} <= set(rig.episodes.dropped), "hanging sandboxes are closed"


async def test_s03_a_run_that_is_poisoned_throughout_ends_with_the_environments_own_message():
    rig = Rig(max_refills=2)

    async def broken(trajectory_id: str, seed: int) -> str:
        message = f"no disk for {seed}"
        raise EnvironmentFailedError(message)

    rig.episodes.reset = broken
    with pytest.RaisesGroup(TurnFailedError) as caught:
        await rig.run()
    assert "step 1 brought back no group: 18 trajectories failed in 3 groups" in str(caught.value.exceptions[0])
    assert "EnvironmentFailedError: no disk for" in str(caught.value.exceptions[0])
    assert rig.learner.given == []


async def test_weights_that_no_engine_takes_end_the_run():
    rig = Rig(num_dedicated=1, num_borrowed=0, first_sync_timeout_s=0.5)
    rig.engines[0].faults = [Fault(kind=FaultKind.CORRUPT_UPDATE)]
    with pytest.RaisesGroup(EngineError, allow_unwrapped=True):
        async with asyncio.timeout(20):
            await rig.run()


async def test_first_weights_are_waited_for_while_the_relay_is_not_up():
    rig = Rig(num_steps=1)
    plan, num = rig.source.plan, itertools.count()

    class Late:
        run = "job"

        async def plan(self, known):
            if next(num) < 4:
                message = "nobody listens"
                raise EngineError(message)
            return await plan(known)

    publish = rig.source.publish
    late = Late()
    late.publish = publish
    rig.source = late
    rig.learner.source = late
    assert len(await rig.run()) == 1
