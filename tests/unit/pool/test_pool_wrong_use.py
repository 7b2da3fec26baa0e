"""What is wrong in a caller's hands is refused at once, and harms no other turn."""

from __future__ import annotations

import asyncio

import pytest

from rose.errors import DeadlineExceededError, TurnFailedError
from rose.pool import EngineState, PoolConfig, RolloutPool, RoutingConfig
from rose.testing import FakeEngine, Fault, FaultKind, ManualClock
from rose.types import EngineId, HopEnd, Sampling, Turn


def turn(name: str = "t", **fields) -> Turn:
    sampling = Sampling(max_tokens=8, seed=fields.pop("seed", None))
    return Turn(**{"trajectory_id": name, "group_id": "g", "prompt_ids": (1, 2), "sampling": sampling, **fields})


class Choosy(FakeEngine):
    """Raises a foreign error for prompts that begin with 13."""

    async def generate(self, request):
        if request.prompt_ids[0] == 13:
            message = "cannot digest 13"
            raise ValueError(message)
        async for chunk in super().generate(request):
            yield chunk


def choosy(clock: ManualClock, name: str) -> Choosy:
    return Choosy(engine_id=EngineId(name), clock=clock, token_s=0.01)


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work))


@pytest.mark.parametrize("wrong", [None, {"prompt_ids": [1]}, Turn])
def test_what_is_no_turn_is_refused_and_the_next_turn_runs(wrong):
    clock = ManualClock()

    async def work():
        async with RolloutPool([choosy(clock, "a")], clock=clock) as pool:
            with pytest.raises(TypeError, match=r"^turn must be of type Turn, got "):
                await pool.generate(wrong)
            assert pool.snapshot().num_live_turns == 0
            return await pool.generate(turn())

    assert len(run(clock, work()).token_ids) == 8


def test_a_pool_is_opened_once():
    clock = ManualClock()
    pool = RolloutPool([choosy(clock, "a")], clock=clock)

    async def work():
        async with pool:
            with pytest.raises(TurnFailedError, match=r"opened once.*make another RolloutPool"):
                await pool.__aenter__()
            assert len((await pool.generate(turn())).token_ids) == 8, "the second try harms nothing"
        with pytest.raises(TurnFailedError, match="opened once"):
            await pool.__aenter__()

    run(clock, work())


@pytest.mark.parametrize("wrong", ["x", 1.5, None])
def test_demand_is_a_number_of_trajectories(wrong):
    with pytest.raises(TypeError, match=r"^num_trajectories must be of type int, got "):
        RolloutPool([]).expect(wrong)


def test_a_turn_that_cannot_be_planned_is_withdrawn():
    """However a broken turn gets in, the call that brought it fails alone."""
    clock = ManualClock()
    broken = turn("broken")
    object.__setattr__(broken, "sampling", None)

    async def work():
        async with RolloutPool([choosy(clock, "a")], clock=clock) as pool:
            with pytest.raises(AttributeError):
                await pool.generate(broken)
            assert (pool.snapshot().num_live_turns, pool.snapshot().num_waiting) == (0, 0)
            return await pool.generate(turn())

    assert len(run(clock, work()).token_ids) == 8


@pytest.mark.parametrize("names", ["a", "abc"])
def test_a_turn_that_no_engine_can_digest_ends_with_the_error_and_blames_one_engine(names):
    clock = ManualClock()

    async def work():
        config = PoolConfig(max_hops=6)
        async with RolloutPool([choosy(clock, name) for name in names], clock=clock, config=config) as pool:
            with pytest.raises(
                TurnFailedError, match=r"6 lost.*the last error: ValueError: cannot digest 13"
            ) as caught:
                await pool.generate(turn(prompt_ids=(13,)))
            assert {hop.ended for hop in caught.value.hops} == {HopEnd.LOST}
            assert sum(view.circuit.value != "closed" for view in pool.snapshot().engines) <= 1
            assert all(view.state is EngineState.READY for view in pool.snapshot().engines)
            failed_s = clock.now()
            result = await pool.generate(turn("good"))
            assert clock.now() - failed_s < 1.0
            return result

    assert len(run(clock, work()).token_ids) == 8


def test_the_deadline_of_a_waiting_turn_says_that_all_slots_were_taken():
    clock = ManualClock()

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1), stall_s=1e3)
        slow = FakeEngine(engine_id=EngineId("a"), clock=clock, token_s=1.0)
        async with RolloutPool([slow], clock=clock, config=config) as pool:
            first = asyncio.ensure_future(pool.generate(turn("first")))
            await clock.sleep(0.5)
            with pytest.raises(DeadlineExceededError, match="it waited for a free slot"):
                await pool.generate(turn("second", deadline_s=1.0))
            await first

    run(clock, work())


def test_a_seeded_turn_that_moves_makes_the_tokens_that_it_would_have_made():
    clock = ManualClock()
    dying = FakeEngine(engine_id=EngineId("a"), clock=clock, faults=(Fault(kind=FaultKind.DIE, after_tokens=3),))

    async def tokens(*engines):
        async with RolloutPool(engines, clock=clock) as pool:
            return await pool.generate(turn(seed=11))

    moved = run(clock, tokens(dying, FakeEngine(engine_id=EngineId("b"), clock=clock)))
    alone = run(clock, tokens(FakeEngine(engine_id=EngineId("c"), clock=clock)))
    assert [hop.num_tokens for hop in moved.hops] == [3, 5]
    assert (moved.token_ids, moved.logprobs) == (alone.token_ids, alone.logprobs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"engines": FakeEngine()}, "engines must be a list of engines, got an object of type FakeEngine"),
        ({"engines": ["a"]}, r"engines\[0\] must be of type ServingEngine, got 'a'"),
        ({"borrowed": [FakeEngine]}, r"borrowed\[0\] must be of type ServingEngine, got the class FakeEngine"),
        ({"config": {}}, "config must be of type PoolConfig or None, got an object of type dict"),
        ({"config": PoolConfig}, "config must be of type PoolConfig or None, got the class PoolConfig"),
        ({"clock": 3}, r"clock must be an object with now\(\) and sleep\(\), got 3"),
        ({"clock": ManualClock}, "clock must be .*, got the class ManualClock"),
        ({"on_event": "print"}, "on_event must be .*, got 'print'"),
        ({"seed": "1"}, "seed must be of type int, got '1'"),
    ],
)
def test_wrong_arguments_of_a_pool(arguments, message):
    with pytest.raises(TypeError, match=f"^{message}$"):
        RolloutPool(**arguments)


def test_wrong_arguments_of_its_methods():
    clock = ManualClock()

    async def work():
        async with RolloutPool([choosy(clock, "a")], clock=clock) as pool:
            with pytest.raises(TypeError, match="engine must be of type ServingEngine, got 'b'"):
                await pool.add_engine("b")
            with pytest.raises(TypeError, match="kind must be of type EngineKind, got 'borrowed'"):
                await pool.add_engine(choosy(clock, "b"), "borrowed")
            with pytest.raises(TypeError, match="lease_id must be of type str or None, got 3"):
                await pool.add_engine(choosy(clock, "b"), lease_id=3)
            with pytest.raises(TypeError, match=r"source must be an object with plan\(\), got 3"):
                await pool.sync_weights(3)
            assert [view.engine_id for view in pool.snapshot().engines] == ["a"]

    run(clock, work())
