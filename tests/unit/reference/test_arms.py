"""The demo's arms, on scripted parts."""

from __future__ import annotations

import asyncio

import attrs
import pytest
from job_rig import CONFIG, Rig, make_rig

from rose.errors import EngineError, EngineLostError
from rose.pool import EngineState, EngineStateChanged
from rose.reference.arms import borrowed_accounts
from rose.reference.lake import held_out_seeds
from rose.types import EngineId, EngineKind, HopEnd

NUM_TRAINED = CONFIG.steps * CONFIG.num_groups * CONFIG.group_size
NUM_EVALUATED = CONFIG.num_eval_maps * CONFIG.num_eval_episodes


@pytest.fixture
def rig(tmp_path) -> Rig:
    return make_rig(tmp_path)


def run(rig: Rig, work):
    return asyncio.run(rig.clock.run(work))


def test_an_arm_learns_evaluates_and_publishes_in_order(rig):
    result = run(rig, rig.job.train_arm("fixed", has_borrowed=False))
    config = CONFIG
    assert rig.learner.calls == [
        "reset",
        (6, config.learn_lr, config.learn_minibatches),
        (6, config.sparse_lr, config.sparse_minibatches),
    ]
    assert [(step.step, step.phase, step.version.n) for step in result.steps] == [(1, "learn", 1), (2, "sparse", 2)]
    assert (result.success_first, result.success_last, result.is_bit_exact) == (1.0, 1.0, True)
    assert rig.site.labels == ["fixed"]
    assert [line["label"] for line in rig.metrics.of("evaluation")] == ["fixed-before", "fixed-after"]
    assert [line["n"] for line in rig.metrics.of("sync")] == [0, 1, 2]
    assert not rig.borrowed[0].requests, "the fixed arm borrows nothing"
    assert result.ended_s - result.started_s == pytest.approx(result.serving.duration_s)
    for step in result.steps:
        assert step.is_whole
        assert len(step.times) == 6
        assert all(time.num_tokens == 2 for time in step.times)


def test_the_clock_runs_during_rollouts_alone(rig):
    run(rig, rig.job.train_arm("rose", has_borrowed=True))
    engines = [*rig.dedicated, *rig.borrowed]
    assert sum(not is_frozen for engine in engines for is_frozen in engine.frozen_at) == 2 * NUM_TRAINED
    assert sum(is_frozen for engine in engines for is_frozen in engine.frozen_at) == 2 * 2 * NUM_EVALUATED
    assert rig.clock.is_frozen


def test_both_arms_play_the_same_episodes_and_evaluation_maps_are_held_out(rig):
    async def both():
        for name in ("fixed", "rose"):
            await rig.job.train_arm(name, has_borrowed=name == "rose")

    run(rig, both())
    half = len(rig.episodes.seeds) // 2
    assert sorted(rig.episodes.seeds[:half]) == sorted(rig.episodes.seeds[half:])
    evaluated = [seed for seed in rig.episodes.seeds if seed in held_out_seeds(CONFIG.num_eval_maps)]
    assert len(evaluated) == 2 * 2 * NUM_EVALUATED


def test_what_borrowed_engines_did_leaves_the_evaluations_out(rig):
    """Evaluations run on all engines while the clock stands still: they are no borrowed device time."""
    result = run(rig, rig.job.train_arm("rose", has_borrowed=True))
    lent = borrowed_accounts(result)
    timed = sum(not is_frozen for is_frozen in rig.borrowed[0].frozen_at)
    assert 0 < timed < len(rig.borrowed[0].frozen_at)
    assert [account.num_attempts for account in lent] == [timed]
    assert [account.num_ended[HopEnd.FINISHED] for account in lent] == [timed]
    assert sum(account.num_attempts for account in result.accounts.values()) == 2 * NUM_TRAINED
    assert sum(account.num_tokens for account in result.accounts.values()) == 2 * NUM_TRAINED
    assert rig.lender.leases == ()


def test_a_version_says_its_codec_by_the_elements_it_coded(rig):
    result = run(rig, rig.job.train_arm("fixed", has_borrowed=False))
    version = result.steps[0].version
    assert (version.codec, version.changed_fraction, version.bytes_sent, version.bytes_dense) == (
        "mixed",
        0.05,
        300,
        2000,
    )


def test_one_engine_with_other_bits_is_noticed(rig):
    rig.dedicated[1].is_wrong = True
    result = run(rig, rig.job.train_arm("fixed", has_borrowed=False))
    assert not result.is_bit_exact
    assert [step.version for step in result.steps] == [None, None]


def test_when_no_engine_takes_the_weights_the_job_says_so_and_does_not_wait_for_ever(rig):
    async def stage(update):
        message = f"no blob of {update.target}"
        raise EngineError(message)

    for engine in rig.dedicated:
        engine.stage = stage
    with pytest.raises(EngineError, match=r"no dedicated engine.*no blob of fixed:0"):
        run(rig, rig.job.train_arm("fixed", has_borrowed=False))


def test_a_rollout_arm_trains_nothing_and_may_go_without_the_cap(rig):
    async def arms():
        await rig.job.train_arm("fixed", has_borrowed=False)
        rig.learner.calls.clear()
        for engine in rig.dedicated:
            engine.max_running = 0  # everything waits in the engine
        task = asyncio.ensure_future(rig.job.rollout_arm("uncapped", 1, has_borrowed=False, is_capped=False))
        await rig.clock.sleep(1.0)
        waiting = [engine.num_in_flight for engine in rig.dedicated]
        for engine in rig.dedicated:
            engine.max_running = 8
        return waiting, await task

    waiting, result = run(rig, arms())
    assert sum(waiting) == CONFIG.num_groups * CONFIG.group_size > 2 * CONFIG.cap_per_engine
    assert rig.learner.calls == []
    assert (result.name, result.success_first, [step.version for step in result.steps]) == ("uncapped", None, [None])


def test_only_the_loss_of_a_dedicated_engine_ends_the_job(rig):
    def lost(name: str, kind: EngineKind) -> EngineStateChanged:
        return EngineStateChanged(
            at_s=0.0, engine_id=EngineId(name), kind=kind, lease_id=None, old=None, new=EngineState.LOST, why="killed"
        )

    async def work():
        rig.job._hear(lost("borrowed0", EngineKind.BORROWED))
        watch = asyncio.ensure_future(rig.job.raise_on_loss())
        await asyncio.sleep(0)
        assert not watch.done()
        rig.job._hear(attrs.evolve(lost("dedicated1", EngineKind.DEDICATED), new=EngineState.STALE))
        rig.job._hear(lost("dedicated0", EngineKind.DEDICATED))
        with pytest.raises(EngineLostError, match="dedicated0 was lost in the middle of the demo: killed"):
            await watch

    run(rig, work())
    assert [line["engine"] for line in rig.metrics.of("engine lost")] == ["borrowed0", "dedicated0"]


def test_an_arm_survives_the_loss_of_its_borrowed_engine(rig):
    """Issue 2, must show 4: the step ends, nothing is lost, groups stay whole."""
    real_begin = rig.site.begin

    async def begin(label: str) -> None:
        await real_begin(label)
        asyncio.get_running_loop().create_task(die())

    async def die() -> None:
        await rig.clock.sleep(0.05)
        rig.borrowed[0].die()

    rig.site.begin = begin
    result = run(rig, rig.job.train_arm("rose", has_borrowed=True))
    assert all(step.is_whole for step in result.steps)
    assert result.is_bit_exact
    assert [line["engine"] for line in rig.metrics.of("engine lost")] == ["borrowed0"]
