"""One turn through the pool, whatever its engines do. All on fake engines and a manual clock."""

from __future__ import annotations

import asyncio

import pytest

from rose.errors import DeadlineExceededError, EngineLostError, RequestRefusedError, TurnFailedError
from rose.pool import (
    EngineState,
    PoolConfig,
    ResumePolicy,
    RolloutPool,
    RoutingConfig,
    TurnAssigned,
    TurnFailed,
    TurnFinished,
    TurnRerouted,
    WaitReason,
)
from rose.testing import FakeEngine, Fault, FaultKind, ManualClock
from rose.types import (
    EngineId,
    EngineKind,
    Exactly,
    FinishReason,
    HopEnd,
    RouteReason,
    Sampling,
    TokenChunk,
    Turn,
    VersionSpan,
    WeightVersion,
)

V1 = WeightVersion("r", 1)


def turn(name: str = "t", *, max_tokens: int = 8, prompt=(1, 2, 3), group: str = "g", **fields) -> Turn:
    return Turn(
        trajectory_id=name, group_id=group, prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens), **fields
    )


def engine(clock: ManualClock, name: str, *faults: Fault, **fields) -> FakeEngine:
    return FakeEngine(**{"engine_id": EngineId(name), "clock": clock, "token_s": 0.01, "faults": faults, **fields})


async def tokens_of(clock: ManualClock, a_turn: Turn) -> tuple[int, ...]:
    """What one undisturbed engine would say."""
    async with RolloutPool([engine(clock, "reference")], clock=clock) as pool:
        return (await pool.generate(a_turn)).token_ids


def hops_of(result) -> list[tuple[str, RouteReason, int, HopEnd]]:
    return [(hop.engine_id, hop.reason, hop.num_tokens, hop.ended) for hop in result.hops]


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work))


def run_one(*engines, clock, a_turn=None, borrowed=(), config=None, events=None):
    async def work():
        on_event = None if events is None else events.append
        async with RolloutPool(engines, borrowed=borrowed, clock=clock, config=config, on_event=on_event) as pool:
            result = await pool.generate(a_turn or turn())
            await asyncio.sleep(0)
            assert_clean(pool, *engines, *borrowed)
            return result

    return run(clock, work())


def assert_clean(pool: RolloutPool, *engines: FakeEngine) -> None:
    snapshot = pool.snapshot()
    assert (snapshot.num_live_turns, snapshot.num_waiting) == (0, 0)
    assert all(view.num_in_flight == 0 and view.kv_reserved_tokens == 0 for view in snapshot.engines)
    assert all(fake.num_in_flight == 0 for fake in engines if not fake._lost_because)


def test_an_undisturbed_turn():
    clock, events = ManualClock(), []
    result = run_one(engine(clock, "d", weight_version=V1), clock=clock, events=events)
    assert len(result.token_ids) == len(result.logprobs) == 8
    assert result.finish_reason is FinishReason.LENGTH
    assert result.versions == (VersionSpan(version=V1, start=0, end=8),)
    assert hops_of(result) == [("d", RouteReason.DEDICATED, 8, HopEnd.FINISHED)]
    assigned, finished = (event for event in events if isinstance(event, TurnAssigned | TurnFinished))
    assert (assigned.engine_id, assigned.waited_s) == ("d", 0.0)
    assert (finished.num_tokens, finished.num_hops, finished.duration_s) == (8, 1, pytest.approx(0.08))


def test_an_evicted_turn_goes_on_elsewhere_with_its_tokens():
    clock, events = ManualClock(), []
    evicting = engine(clock, "b", Fault(kind=FaultKind.EVICT, after_tokens=3))
    other = engine(clock, "c")
    result = run_one(clock=clock, borrowed=(evicting, other), events=events)
    assert hops_of(result) == [
        ("b", RouteReason.BORROWED, 3, HopEnd.EVICTED),
        ("c", RouteReason.REROUTED_EVICTED, 5, HopEnd.FINISHED),
    ]
    assert result.token_ids == run(clock, tokens_of(clock, turn()))
    assert len(result.logprobs) == 8
    first, second = evicting.requests[0], other.requests[0]
    assert second.prompt_ids == first.prompt_ids + result.token_ids[:3]
    assert second.sampling.max_tokens == 5
    assert first.request_id != second.request_id
    assert evicting.aborted == other.aborted == []
    assert [(e.engine_id, e.num_tokens) for e in events if isinstance(e, TurnRerouted)] == [("b", 3)]


def test_an_eviction_after_the_last_token_finishes_the_turn():
    """The budget is used up: a continuation would ask for zero tokens."""
    clock = ManualClock()
    chunks = [TokenChunk(token_ids=(1, 2), logprobs=(-1.0, -1.0)), TokenChunk(finish_reason=FinishReason.EVICTED)]
    result = run_one(Scripted(chunks), clock=clock, a_turn=turn(max_tokens=2))
    assert (result.token_ids, result.finish_reason) == ((1, 2), FinishReason.LENGTH)


def test_a_stalled_turn_moves_after_two_seconds_and_its_engine_is_left_alone():
    clock = ManualClock()
    stalled, other = engine(clock, "a", Fault(kind=FaultKind.STALL, after_tokens=2)), engine(clock, "b")

    async def work():
        async with RolloutPool([stalled, other], clock=clock) as pool:
            first = await pool.generate(turn())
            assert clock.now() == pytest.approx(0.02 + 2.0 + 0.06)
            second = await pool.generate(turn("u"))
            assert_clean(pool, stalled, other)
            return first, second

    first, second = run(clock, work())
    assert hops_of(first) == [
        ("a", RouteReason.DEDICATED, 2, HopEnd.STALLED),
        ("b", RouteReason.REROUTED_STALLED, 6, HopEnd.FINISHED),
    ]
    assert hops_of(second) == [("b", RouteReason.DEDICATED, 8, HopEnd.FINISHED)]
    assert stalled.aborted == [stalled.requests[0].request_id]


def test_one_slow_turn_does_not_close_an_engine_that_makes_tokens_for_others():
    clock = ManualClock()
    slow = engine(clock, "a", Fault(kind=FaultKind.STALL, request_index=0), token_s=0.5)

    async def work():
        async with RolloutPool([slow], clock=clock) as pool:
            stuck = asyncio.ensure_future(pool.generate(turn("stuck", max_tokens=1)))
            await asyncio.sleep(0)
            busy = asyncio.ensure_future(pool.generate(turn("busy", max_tokens=8)))
            await clock.sleep(2.1)
            assert [view.circuit.value for view in pool.snapshot().engines] == ["closed"]
            return await stuck, await busy

    stuck, busy = run(clock, work())
    assert [hop.ended for hop in stuck.hops] == [HopEnd.STALLED, HopEnd.FINISHED]
    assert len(busy.hops) == 1


@pytest.mark.parametrize(("first_token_s", "num_hops"), [(20.0, 1), (3.0, 2)])
def test_a_turn_without_a_token_waits_longer_while_its_engine_makes_tokens_for_others(first_token_s, num_hops):
    clock = ManualClock()
    slow = Fault(kind=FaultKind.SLOW_START, request_index=0, duration_s=5.0)
    crowded = engine(clock, "a", slow, token_s=0.5)

    async def work():
        async with RolloutPool([crowded], clock=clock, config=PoolConfig(first_token_s=first_token_s)) as pool:
            late = asyncio.ensure_future(pool.generate(turn("late", max_tokens=1)))
            await asyncio.sleep(0)
            busy = asyncio.ensure_future(pool.generate(turn("busy", max_tokens=20)))
            return await late, await busy

    late, busy = run(clock, work())
    assert (len(late.hops), len(busy.hops)) == (num_hops, 1)
    if num_hops > 1:
        assert late.hops[0].ended is HopEnd.STALLED


def test_a_turn_is_not_stranded_when_the_only_engine_stalls_once():
    clock = ManualClock()
    only = engine(clock, "a", Fault(kind=FaultKind.STALL, request_index=0))
    result = run_one(only, clock=clock)
    assert [hop.ended for hop in result.hops] == [HopEnd.STALLED, HopEnd.FINISHED]
    assert 2.0 + 5.0 <= clock.now() <= 2.0 + 5.0 * 1.25 + 0.1


def test_a_lost_engine_gives_its_turns_to_the_others():
    clock = ManualClock()
    dying = engine(clock, "a", Fault(kind=FaultKind.DIE, at_s=0.035))
    other = engine(clock, "b")

    async def work():
        async with RolloutPool([dying, other], clock=clock) as pool:
            results = await asyncio.gather(*(pool.generate(turn(f"t{i}")) for i in range(4)))
            states = {view.engine_id: view.state for view in pool.snapshot().engines}
            assert_clean(pool, dying, other)
            return results, states, pool.accounts()

    results, states, accounts = run(clock, work())
    assert states == {"a": EngineState.LOST, "b": EngineState.READY}
    moved = [hops_of(result) for result in results if len(result.hops) > 1]
    assert (
        moved
        == [[("a", RouteReason.DEDICATED, 3, HopEnd.LOST), ("b", RouteReason.REROUTED_LOST, 5, HopEnd.FINISHED)]] * 2
    )
    expected = run(clock, tokens_of(clock, turn()))
    assert all(result.token_ids == expected for result in results)
    assert accounts["a"].num_ended[HopEnd.LOST] == accounts["a"].num_rerouted == 2
    assert accounts["a"].num_tokens + accounts["b"].num_tokens == 32


def test_turns_leave_a_lost_engine_at_once_even_when_their_streams_only_hang():
    clock = ManualClock()
    hanging = Scripted([TokenChunk(token_ids=(1,), logprobs=(-1.0,))], name="a", hangs=True)

    async def work():
        async with RolloutPool([hanging, engine(clock, "b")], clock=clock, config=PoolConfig(stall_s=100.0)) as pool:
            running = asyncio.ensure_future(pool.generate(turn()))
            await clock.sleep(0.1)
            hanging.die()
            return await running

    assert [(hop.num_tokens, hop.ended) for hop in run(clock, work()).hops] == [(1, HopEnd.LOST), (7, HopEnd.FINISHED)]
    assert clock.now() < 1.0
    assert hanging.num_aborts == 1


def test_a_busy_engine_is_not_dead():
    clock = ManualClock()
    busy, other = engine(clock, "a"), engine(clock, "b")
    busy.set_busy(is_busy=True)

    async def work():
        async with RolloutPool([busy, other], clock=clock) as pool:
            first = await pool.generate(turn())
            busy.set_busy(is_busy=False)
            await clock.sleep(1.0)
            return first, await pool.generate(turn("u"))

    first, second = run(clock, work())
    assert hops_of(first) == [
        ("a", RouteReason.DEDICATED, 0, HopEnd.BUSY),
        ("b", RouteReason.REROUTED_BUSY, 8, HopEnd.FINISHED),
    ]
    assert hops_of(second) == [("a", RouteReason.DEDICATED, 8, HopEnd.FINISHED)]
    assert busy.aborted == []


def test_busy_answers_are_repeated_with_growing_pauses_and_bounded():
    clock = ManualClock()
    busy = engine(clock, "a")
    busy.set_busy(is_busy=True)
    config = PoolConfig(max_busy=4, jitter_fraction=0.0, busy_s=0.1, busy_max_s=0.4)
    with pytest.raises(TurnFailedError, match="5 busy") as caught:
        run_one(busy, clock=clock, config=config)
    assert len(caught.value.hops) == len(busy.requests) == 5
    assert clock.now() == pytest.approx(0.1 + 0.2 + 0.4 + 0.4)


def test_what_a_small_borrowed_engine_refuses_goes_to_a_dedicated_one():
    """Borrowing is never worse than not borrowing: a lent device with less memory must not fail the job's turn."""
    clock, events = ManualClock(), []
    own = engine(clock, "a")
    lent = [engine(clock, "b", kv_total_tokens=6), engine(clock, "c")]

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1))
        async with RolloutPool([own], borrowed=lent, clock=clock, config=config, on_event=events.append) as pool:
            first = asyncio.ensure_future(pool.generate(turn("first")))
            await clock.sleep(0)
            refused = asyncio.ensure_future(pool.generate(turn("refused")))
            await clock.sleep(0)
            small = asyncio.ensure_future(pool.generate(turn("small", max_tokens=2)))
            await clock.sleep(0)
            equal = await pool.generate(turn("equal"))
            return await first, await refused, await small, equal

    first, refused, small, equal = run(clock, work())
    assert len(first.hops) == 1
    assert hops_of(small) == [("b", RouteReason.BORROWED, 2, HopEnd.FINISHED)]
    assert hops_of(equal) == [("c", RouteReason.BORROWED, 8, HopEnd.FINISHED)], "who waits behind it may still borrow"
    assert hops_of(refused) == [
        ("b", RouteReason.BORROWED, 0, HopEnd.REFUSED),
        ("a", RouteReason.REROUTED_REFUSED, 8, HopEnd.FINISHED),
    ]


def test_what_borrowed_engines_refuse_fails_when_there_is_no_other():
    clock = ManualClock()
    with pytest.raises(RequestRefusedError, match="the engine has 6"):
        run_one(clock=clock, borrowed=(engine(clock, "b", kv_total_tokens=6),))


def test_a_refused_request_fails_at_once_with_the_engines_own_error():
    clock, events = ManualClock(), []
    refusing, other = engine(clock, "a", vocab_size=3), engine(clock, "b", vocab_size=3)
    with pytest.raises(RequestRefusedError, match="the prompt has token ids outside 0 to 2"):
        run_one(refusing, other, clock=clock, events=events)
    assert other.requests == refusing.aborted == []
    assert [event.num_hops for event in events if isinstance(event, TurnFailed)] == [1]


@pytest.mark.parametrize("policy", list(ResumePolicy))
def test_an_abort_that_nobody_asked_for(policy):
    clock = ManualClock()
    abrupt, other = engine(clock, "a", weight_version=V1), engine(clock, "b", weight_version=V1)

    async def work():
        config = PoolConfig(resume_after_abort=policy)
        async with RolloutPool([abrupt, other], clock=clock, config=config) as pool:
            running = asyncio.ensure_future(pool.generate(turn()))
            await clock.sleep(0.035)
            await abrupt.abort(abrupt.requests[0].request_id)
            return await running

    result = run(clock, work())
    if policy is ResumePolicy.OFF:
        assert (len(result.token_ids), result.finish_reason) == (3, FinishReason.ABORTED)
    else:
        assert hops_of(result) == [
            ("a", RouteReason.DEDICATED, 3, HopEnd.ABORTED),
            ("b", RouteReason.REROUTED_ABORTED, 5, HopEnd.FINISHED),
        ]
        assert result.finish_reason is FinishReason.LENGTH


def test_same_version_only_ends_as_aborted_when_that_version_is_gone():
    clock = ManualClock()
    abrupt = engine(clock, "a", weight_version=V1)

    async def work():
        config = PoolConfig(resume_after_abort=ResumePolicy.SAME_VERSION)
        async with RolloutPool([abrupt], clock=clock, config=config) as pool:
            running = asyncio.ensure_future(pool.generate(turn()))
            await clock.sleep(0.035)
            member = pool._state.engines.get(EngineId("a"))
            pool._state.engines.acknowledge(member, WeightVersion("r", 2))
            await abrupt.abort(abrupt.requests[0].request_id)
            return await running

    result = run(clock, work())
    assert (len(result.token_ids), result.finish_reason) == (3, FinishReason.ABORTED)


def test_attempts_are_bounded_and_the_error_lists_them():
    clock = ManualClock()
    evicting = engine(clock, "a", Fault(kind=FaultKind.EVICT))
    with pytest.raises(TurnFailedError, match="3 attempts \\(3 evicted\\)") as caught:
        run_one(evicting, clock=clock, config=PoolConfig(max_hops=3, busy_s=0.1, jitter_fraction=0.0))
    assert [hop.ended for hop in caught.value.hops] == [HopEnd.EVICTED] * 3
    assert clock.now() == pytest.approx(0.1 + 0.2), "an engine short of memory is left alone for a moment"


def test_evictions_that_leave_tokens_do_not_use_up_the_attempts():
    """A turn that is evicted again and again, as under serving pressure, gets on and must not be lost."""
    clock = ManualClock()
    evicting = engine(clock, "b", Fault(kind=FaultKind.EVICT, after_tokens=1))
    result = run_one(clock=clock, borrowed=(evicting,), config=PoolConfig(max_hops=2, busy_s=0.1))
    assert len(result.token_ids) == 8
    assert [hop.num_tokens for hop in result.hops] == [1] * 8


def test_the_deadline_ends_a_running_turn_and_frees_everything():
    clock = ManualClock()
    slow = engine(clock, "a", token_s=1.0)

    async def work():
        async with RolloutPool([slow], clock=clock) as pool:
            with pytest.raises(DeadlineExceededError, match="2 of 8 tokens after 1 attempts; it was on engine 'a'"):
                await pool.generate(turn(deadline_s=2.5))
            assert clock.now() == 2.5
            await asyncio.sleep(0)
            assert_clean(pool, slow)

    run(clock, work())
    assert slow.aborted == [slow.requests[0].request_id]


def test_the_deadline_ends_a_waiting_turn():
    clock = ManualClock()

    async def work():
        async with RolloutPool(clock=clock) as pool:
            waiting = asyncio.ensure_future(pool.generate(turn(deadline_s=1.0)))
            await clock.sleep(0.5)
            assert pool.snapshot().waiting == {WaitReason.NO_READY_ENGINE: 1}
            with pytest.raises(DeadlineExceededError, match="after 0 attempts; it waited for a ready engine"):
                await waiting
            assert_clean(pool)

    run(clock, work())


def test_a_failing_engine_is_no_black_hole():
    """An engine that fails fast is always the least loaded one; of 400 requests it may see no more than a few."""
    clock = ManualClock()
    dead, good = Failing("a"), engine(clock, "b")

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=64))
        async with RolloutPool([dead, good], clock=clock, config=config) as pool:
            for wave in range(50):
                results = await asyncio.gather(*(pool.generate(turn(f"t{wave}-{i}")) for i in range(8)))
                assert all(len(result.token_ids) == 8 for result in results)
            assert_clean(pool, good)

    run(clock, work())
    assert 1 <= dead.num_requests <= 8 / 2 + 4
    assert dead.num_aborts == 0


def test_a_stream_that_breaks_off_keeps_its_tokens():
    """Case E09: a stream without a finish reason is an interruption, not an answer."""
    clock = ManualClock()
    seven = tuple(range(11, 18))
    cut = Scripted([TokenChunk(token_ids=(token,), logprobs=(-0.5,)) for token in seven], name="a")
    result = run_one(cut, engine(clock, "b"), clock=clock, a_turn=turn(max_tokens=10))
    assert result.token_ids[:7] == seven
    assert (len(result.token_ids), len(result.logprobs)) == (10, 10)
    assert [(hop.num_tokens, hop.ended) for hop in result.hops] == [(7, HopEnd.LOST), (3, HopEnd.FINISHED)]


def test_an_engine_that_says_too_much_is_cut_off():
    clock = ManualClock()
    talker = Scripted([TokenChunk(token_ids=(1, 2, 3), logprobs=(-1.0,) * 3)], hangs=True)
    result = run_one(talker, clock=clock, a_turn=turn(max_tokens=2))
    assert (result.token_ids, len(result.logprobs), result.finish_reason) == ((1, 2), 2, FinishReason.LENGTH)
    assert talker.num_aborts == 1
    assert [hop.ended for hop in result.hops] == [HopEnd.FINISHED]


def test_wrong_logprobs_move_the_turn():
    clock = ManualClock()
    events = []
    liar = Scripted([TokenChunk(token_ids=(1, 2), logprobs=(-1.0,))], name="a", hangs=True)
    result = run_one(liar, engine(clock, "b"), clock=clock, events=events)
    assert [event.why for event in events if isinstance(event, TurnRerouted)] == ["2 tokens came with 1 log-probs"]
    assert [(hop.num_tokens, hop.ended) for hop in result.hops] == [(0, HopEnd.LOST), (8, HopEnd.FINISHED)]
    assert liar.num_aborts == 1


def test_tokens_of_an_inadmissible_version_are_not_taken():
    clock = ManualClock()
    wrong = Scripted(
        [TokenChunk(token_ids=(1,), logprobs=(-1.0,), version=WeightVersion("r", 2))], name="a", hangs=True
    )
    wrong.weight_version = V1
    good = engine(clock, "b", weight_version=V1)
    result = run_one(wrong, good, clock=clock, a_turn=turn(versions=Exactly(1)))
    assert [(hop.num_tokens, hop.ended) for hop in result.hops] == [(0, HopEnd.ABORTED), (8, HopEnd.FINISHED)]
    assert result.versions == (VersionSpan(version=V1, start=0, end=8),)


def test_a_version_that_no_engine_can_have_any_more_is_an_error_not_a_wait():
    clock = ManualClock()
    with pytest.raises(TurnFailedError, match="every engine is past"):
        run_one(engine(clock, "a", weight_version=V1), clock=clock, a_turn=turn(versions=Exactly(0)))


def test_the_cap_holds_and_groups_are_served_in_their_order():
    clock = ManualClock()
    only = engine(clock, "a", max_running=64)
    most = 0

    async def one(pool, name, group):
        await pool.generate(turn(name, group=group, max_tokens=2))
        nonlocal most
        most = max(most, only.num_in_flight)
        return clock.now()

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=2))
        async with RolloutPool([only], clock=clock, config=config) as pool:
            ends = await asyncio.gather(*(one(pool, f"t{i}", f"g{i % 2}") for i in range(8)))
            return ends[0::2], ends[1::2]

    first_group, second_group = run(clock, work())
    assert most <= 2
    assert max(first_group) < max(second_group)
    assert sorted(first_group + second_group)[5:] == sorted(second_group)[1:]


def test_later_turns_of_a_trajectory_return_to_its_engine():
    clock = ManualClock()
    engines = [engine(clock, name) for name in "abc"]

    async def trajectory(pool, name):
        return [hops_of(await pool.generate(turn(name, prompt=(1, n)))) for n in range(1, 4)]

    async def work():
        async with RolloutPool(engines, clock=clock) as pool:
            return await asyncio.gather(*(trajectory(pool, f"t{i}") for i in range(9)))

    for hops in run(clock, work()):
        assert len({hop[0][0] for hop in hops}) == 1
        assert [hop[0][1] for hop in hops] == [RouteReason.DEDICATED, RouteReason.AFFINITY, RouteReason.AFFINITY]


def test_kv_room_is_respected_without_evictions():
    clock = ManualClock()
    small = engine(clock, "b", kv_total_tokens=25)

    async def work():
        async with RolloutPool(borrowed=[small], clock=clock) as pool:
            return await asyncio.gather(*(pool.generate(turn(f"t{i}")) for i in range(5)))

    assert all(len(result.hops) == 1 for result in run(clock, work()))


def test_a_big_turn_that_waits_for_kv_room_does_not_hold_up_a_small_one():
    clock = ManualClock()
    small = engine(clock, "b", kv_total_tokens=25)

    async def work():
        async with RolloutPool(borrowed=[small], clock=clock) as pool:
            turns = [pool.generate(turn(f"t{most}", max_tokens=most)) for most in (8, 20, 3)]
            running = [asyncio.ensure_future(one) for one in turns]
            await clock.sleep(0.045)
            assert [one.done() for one in running] == [False, False, True]
            assert pool.snapshot().waiting == {WaitReason.KV: 1}
            await asyncio.gather(*running)

    run(clock, work())


def test_closing_the_pool_fails_its_turns_and_frees_the_engines():
    clock = ManualClock()
    only = engine(clock, "a", token_s=1.0)

    async def work():
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=2))
        async with RolloutPool([only], clock=clock, config=config) as pool:
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}"))) for i in range(3)]
            await clock.sleep(2.5)
        outcomes = await asyncio.gather(*turns, return_exceptions=True)
        assert [str(outcome) for outcome in outcomes] == ["the pool was closed"] * 3
        assert (only.num_in_flight, len(only.aborted)) == (0, 2)
        with pytest.raises(TurnFailedError, match="not open"):
            await pool.generate(turn())

    run(clock, work())


def test_an_error_of_the_callers_own_code_passes_through_unwrapped():
    clock = ManualClock()

    async def work():
        async with RolloutPool([engine(clock, "a")], clock=clock):
            message = "mine"
            raise KeyError(message)

    with pytest.raises(KeyError, match="mine"):
        run(clock, work())


def test_an_observer_that_raises_does_not_harm_the_pool():
    clock, problems = ManualClock(), []

    def observe(event):
        raise RuntimeError(event)

    async def work():
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: problems.append(context))
        async with RolloutPool([engine(clock, "a")], clock=clock, on_event=observe) as pool:
            return await pool.generate(turn())

    assert len(run(clock, work()).token_ids) == 8
    assert problems


def test_accounts_tell_borrowed_turns_tokens_and_device_seconds():
    clock = ManualClock()
    lent = engine(clock, "b")

    async def work():
        async with RolloutPool(borrowed=[lent], clock=clock) as pool:
            await asyncio.gather(pool.generate(turn("t")), pool.generate(turn("u", max_tokens=4)))
            await clock.sleep(10.0)
            running = asyncio.ensure_future(pool.generate(turn("v")))
            await clock.sleep(0.055)
            halfway = pool.accounts()[EngineId("b")]
            await running
            return halfway, pool.accounts()[EngineId("b")]

    halfway, account = run(clock, work())
    assert account.kind is EngineKind.BORROWED
    assert (account.num_attempts, account.num_tokens, account.num_ended[HopEnd.FINISHED]) == (3, 20, 3)
    assert account.busy_s == pytest.approx(0.16)
    assert halfway.busy_s == pytest.approx(0.135)
    assert halfway.num_ended[HopEnd.FINISHED] == 2


class Scripted(FakeEngine):
    """Says what it is told to say, to every request."""

    def __init__(self, chunks, *, name="scripted", hangs=False):
        super().__init__(engine_id=EngineId(name))
        self.chunks, self.hangs, self.num_aborts = chunks, hangs, 0

    async def generate(self, request):
        for chunk in self.chunks:
            yield chunk
        if self.hangs:
            await asyncio.Event().wait()

    async def abort(self, request_id):
        self.num_aborts += 1


class Failing(FakeEngine):
    """Answers every request at once with an error of its own, and looks healthy."""

    def __init__(self, name):
        super().__init__(engine_id=EngineId(name))
        self.num_requests = self.num_aborts = 0

    async def generate(self, request):
        self.num_requests += 1
        raise EngineOopsError
        yield TokenChunk()

    async def abort(self, request_id):
        self.num_aborts += 1


class EngineOopsError(Exception):
    """Not one of ROSE's."""


def test_all_engines_dead_at_the_start_is_an_error():
    clock = ManualClock()
    dead = engine(clock, "a")
    dead.die()

    async def work():
        async with RolloutPool([dead], clock=clock):
            pass

    with pytest.raises(EngineLostError, match="engine a is gone"):
        run(clock, work())
