"""Turns that cannot or must not run, and the cases E01, E03, E04, E09 and S03, each under its own id."""

from __future__ import annotations

import asyncio
import pickle

import attrs
import pytest

from rose.errors import (
    DeadlineExceededError,
    EngineError,
    GroupDroppedError,
    NoEngineError,
    RequestRefusedError,
    RoseError,
    TurnFailedError,
)
from rose.policies.pace import PaceConfig
from rose.pool import ConcurrencyConfig, EngineState, PoolConfig, RolloutPool, RoutingConfig, TurnFailed, TurnFinished
from rose.testing import FakeEngine, Fault, FaultKind, ManualClock
from rose.types import EngineId, FinishReason, HopEnd, Sampling, TokenChunk, Turn

POISON = 999


def turn(name: str = "t", *, prompt=(1, 2, 3), max_tokens: int = 8, group: str = "g", **fields) -> Turn:
    return Turn(
        trajectory_id=name, group_id=group, prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens), **fields
    )


def engine(clock: ManualClock, name: str, *faults: Fault, kind: type[FakeEngine] = FakeEngine, **fields) -> FakeEngine:
    return kind(**{"engine_id": EngineId(name), "clock": clock, "token_s": 0.01, "faults": faults, **fields})


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work()))


def ask(clock: ManualClock, engines, *turns: Turn, config=None, events=None, borrowed=()):
    """Run the turns at once; returns results and errors, and the pool's statistics."""

    async def work():
        on_event = None if events is None else events.append
        async with RolloutPool(engines, borrowed=borrowed, clock=clock, config=config, on_event=on_event) as pool:
            outcomes = await asyncio.gather(*map(pool.generate, turns), return_exceptions=True)
            await asyncio.sleep(0)
            return outcomes, pool.statistics()

    return run(clock, work)


class TestE01:
    """Case E01: a prompt that fills the context is no error, and no engine hears of it."""

    @pytest.mark.parametrize(("num_prompt", "num_new"), [(32766, 2), (32767, 1), (32768, 0), (32769, 0)])
    def test_a_turn_gets_what_the_context_leaves(self, num_prompt, num_new):
        clock, events = ManualClock(), []
        only = engine(clock, "a", max_model_len=32768)
        sibling = turn("sibling")
        [result, other], _ = ask(clock, [only], turn(prompt=(1,) * num_prompt), sibling, events=events)
        assert (len(result.token_ids), len(result.logprobs)) == (num_new, num_new)
        assert result.finish_reason is FinishReason.LENGTH
        assert len(other.token_ids) == 8, "siblings are not affected"
        asked = [request.sampling.max_tokens for request in only.requests if len(request.prompt_ids) > 3]
        assert asked == ([num_new] if num_new else [])
        assert len(result.hops) == len(asked)
        finished = {event.trajectory_id: event.engine_id for event in events if isinstance(event, TurnFinished)}
        assert finished == {"t": "a" if num_new else None, "sibling": "a"}

    def test_a_moved_turn_that_has_filled_the_context_is_complete(self):
        clock = ManualClock()
        cut = Scripted([TokenChunk(token_ids=(7,) * 5, logprobs=(-1.0,) * 5)], name="a", max_model_len=8)
        [result], _ = ask(clock, [cut, engine(clock, "b", max_model_len=8)], turn())
        assert (result.token_ids, result.finish_reason) == ((7,) * 5, FinishReason.LENGTH)
        assert [hop.ended for hop in result.hops] == [HopEnd.LOST]

    def test_the_longest_context_counts_and_a_small_borrowed_engine_only_refuses(self):
        clock = ManualClock()
        own, lent = engine(clock, "a", max_model_len=32), engine(clock, "b", max_model_len=4)
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1))
        [_, moved], _ = ask(clock, [own], turn("x"), turn("y", prompt=(1,) * 20), config=config, borrowed=[lent])
        assert [hop.ended for hop in moved.hops] == [HopEnd.REFUSED, HopEnd.FINISHED]

    def test_an_engine_that_does_not_say_leaves_it_to_the_engines(self):
        clock = ManualClock()
        quiet = Quiet(engine_id=EngineId("a"), clock=clock, max_model_len=8)
        [error], _ = ask(clock, [quiet], turn(prompt=(1,) * 9))
        assert isinstance(error, RequestRefusedError)


class TestE03:
    def test_a_stop_token_alone_is_a_whole_answer(self):
        """Case E03 a."""
        clock = ManualClock()
        eos = engine(clock, "a", eos_token_id=5, next_token=lambda *_: 5)
        [result], _ = ask(clock, [eos], turn())
        assert (result.token_ids, len(result.logprobs), result.finish_reason) == ((5,), 1, FinishReason.STOP)

    def test_an_abort_before_the_first_token_invents_nothing(self):
        """Case E03 b: aborted while it waits in the engine, and by its own caller's word."""
        clock = ManualClock()
        full = engine(clock, "a", max_running=1, token_s=1.0)

        async def work():
            async with RolloutPool([full], clock=clock) as pool:
                running = asyncio.ensure_future(pool.generate(turn("running")))
                waiting = asyncio.ensure_future(pool.generate(turn("waiting")))
                await clock.sleep(2.5)
                assert [pool.abort_trajectory(name) for name in ("waiting", "running", "nobody")] == [1, 1, 0]
                results = await waiting, await running
                await asyncio.sleep(0)
                assert full.num_in_flight == pool.snapshot().num_live_turns == 0
                return results

        nothing, some = run(clock, work)
        assert (nothing.token_ids, nothing.logprobs, nothing.finish_reason) == ((), (), FinishReason.ABORTED)
        assert (len(some.token_ids), len(some.logprobs), some.finish_reason) == (2, 2, FinishReason.ABORTED)

    def test_an_empty_prompt_is_refused_before_any_engine(self):
        """Case E03 c."""
        with pytest.raises(ValueError, match="prompt_ids must be at least 1 token ids"):
            turn(prompt=())


@pytest.mark.parametrize("bad", [None, float("nan"), 0.1, float("-inf"), float("inf"), "x"])
def test_e04_an_impossible_logprob_is_never_taken(bad):
    """Case E04: the turn goes on elsewhere; without elsewhere it fails with the reason, and the others go on."""
    clock = ManualClock()
    chunk = TokenChunk(token_ids=(1, 2), logprobs=(-0.5, bad))
    liar = Scripted([chunk], name="a")
    [result], _ = ask(clock, [liar, engine(clock, "b")], turn())
    assert [(hop.num_tokens, hop.ended) for hop in result.hops] == [(0, HopEnd.LOST), (8, HopEnd.FINISHED)]
    [error], statistics = ask(clock, [Scripted([chunk], name="a")], turn(), config=PoolConfig(max_hops=2, circuit_s=1))
    assert isinstance(error, TurnFailedError)
    assert "no log of a probability" in str(error)
    assert statistics.failed == {"TurnFailedError": 1}


def test_e04_a_logprob_of_exactly_zero_is_valid():
    clock = ManualClock()
    chunk = TokenChunk(token_ids=(1,), logprobs=(0.0,), finish_reason=FinishReason.STOP)
    [result], _ = ask(clock, [Scripted([chunk])], turn())
    assert result.logprobs == (0.0,)


def test_e09_a_cut_stream_goes_on_without_a_gap_or_a_double():
    """Case E09: 7 tokens, then the connection is gone; the next attempt starts from the prompt and those 7."""
    clock = ManualClock()
    seven = tuple(range(11, 18))
    cut = Scripted([TokenChunk(token_ids=(token,), logprobs=(-0.5,)) for token in seven], name="a")
    good = engine(clock, "b")
    [result], _ = ask(clock, [cut, good], turn(max_tokens=10))
    assert good.requests[0].prompt_ids == (1, 2, 3, *seven)
    assert good.requests[0].sampling.max_tokens == 3
    assert result.token_ids[:7] == seven
    assert len(result.token_ids) == len(result.logprobs) == 10


class TestS03:
    """Case S03: a prompt that is refused each time ends its group after three refusals, not the run and not never."""

    def prompts(self, poisoned: int) -> list[list[Turn]]:
        return [
            [turn(f"g{g}/t{t}", group=f"g{g}", prompt=(POISON if g < poisoned else 1, 2)) for t in range(4)]
            for g in range(8)
        ]

    def play(self, poisoned: int):
        """A loop that asks again and again, up to 50 times, for each of 4 trajectories of 8 groups."""
        clock = ManualClock()
        engines = [engine(clock, name, vocab_size=POISON, max_running=64) for name in "ab"]
        ends: dict[str, object] = {}

        async def insist(pool, a_turn):
            for _ in range(50):
                try:
                    ends[a_turn.trajectory_id] = await pool.generate(a_turn)
                except GroupDroppedError as error:
                    ends[a_turn.trajectory_id] = error
                except RequestRefusedError:
                    continue
                return

        async def work():
            async with RolloutPool(engines, clock=clock) as pool:
                await asyncio.gather(*(insist(pool, each) for group in self.prompts(poisoned) for each in group))

        run(clock, work)
        return ends, sum(len(each.requests) for each in engines), clock.now()

    def test_one_poisoned_group_of_eight(self):
        ends, num_calls, _ = self.play(1)
        dropped = {name for name, end in ends.items() if isinstance(end, GroupDroppedError)}
        assert dropped == {f"g0/t{t}" for t in range(4)}
        assert all(len(ends[f"g{g}/t{t}"].token_ids) == 8 for g in range(1, 8) for t in range(4))
        assert num_calls <= 7 * 4 + 3 * 4

    def test_all_poisoned(self):
        ends, num_calls, took_s = self.play(8)
        assert len(ends) == 32
        assert all("token ids outside 0 to 998" in str(end) for end in ends.values()), "the engine's own message"
        assert num_calls <= 8 * 3 * 4
        assert took_s < 1.0

    def test_turns_that_wait_are_dropped_with_their_group(self):
        clock = ManualClock()
        only = engine(clock, "a", vocab_size=POISON)
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=1))
        outcomes, _ = ask(clock, [only], *(turn(f"t{i}", prompt=(POISON,)) for i in range(9)), config=config)
        assert [type(outcome) for outcome in outcomes] == [RequestRefusedError] * 3 + [GroupDroppedError] * 6
        assert len(only.requests) == 3

    def test_a_finished_turn_forgives_and_time_gives_one_more_try(self):
        clock = ManualClock()
        only = engine(clock, "a", vocab_size=POISON)

        async def work():
            config = PoolConfig(max_group_failures=2, group_drop_s=100.0)
            async with RolloutPool([only], clock=clock, config=config) as pool:
                seen = []
                for prompt in (POISON, 1, POISON, POISON, 1, "wait", POISON, POISON, "wait", 1, POISON):
                    if prompt == "wait":
                        await clock.sleep(100.0)
                        continue
                    try:
                        await pool.generate(turn(prompt=(prompt,), max_tokens=1))
                        seen.append("ok")
                    except RoseError as error:
                        seen.append(type(error).__name__)
                return seen

        refused, dropped = "RequestRefusedError", "GroupDroppedError"
        expected = [refused, "ok", refused, refused, dropped, refused, dropped, "ok", refused]
        assert run(clock, work) == expected


class TestPartial:
    def test_an_error_carries_the_tokens_of_its_turn_even_to_another_process(self):
        clock = ManualClock()
        [error], statistics = ask(clock, [engine(clock, "a", token_s=1.0)], turn(deadline_s=2.5))
        assert isinstance(error, DeadlineExceededError)
        for each in (error, pickle.loads(pickle.dumps(error))):  # noqa: S301 - our own
            assert each.partial is not None
            assert (len(each.partial.token_ids), len(each.partial.logprobs)) == (2, 2)
            assert each.partial.finish_reason is FinishReason.ABORTED
        assert (statistics.failed, statistics.num_partial_tokens) == ({"DeadlineExceededError": 1}, 2)

    def test_so_does_a_cancellation(self):
        clock, events = ManualClock(), []

        async def work():
            slow = engine(clock, "a", token_s=1.0)
            async with RolloutPool([slow], clock=clock, on_event=events.append) as pool:
                rollout = asyncio.ensure_future(pool.generate(turn()))
                await clock.sleep(2.5)
                rollout.cancel()
                with pytest.raises(asyncio.CancelledError) as caught:
                    await rollout
                await asyncio.sleep(0)
                return caught.value, pool.statistics()

        error, statistics = run(clock, work)
        assert len(error.partial.token_ids) == 2
        assert statistics.failed == {"cancelled": 1}
        assert [event.num_tokens for event in events if isinstance(event, TurnFailed)] == [2]

    def test_an_error_that_ended_no_turn_has_none(self):
        assert RoseError("x").partial is None


class TestOutage:
    def test_turns_do_not_wait_for_ever_once_all_engines_are_lost(self):
        clock = ManualClock()
        dying = engine(clock, "a", Fault(kind=FaultKind.DIE, at_s=0.035))
        [error], _ = ask(clock, [dying], turn(), config=PoolConfig(no_engine_timeout_s=30.0))
        assert isinstance(error, NoEngineError)
        assert "no engine took turns for 30.0 s" in str(error)
        assert "a is lost (engine a is gone" in str(error)
        assert len(error.partial.token_ids) == 3
        assert clock.now() == pytest.approx(30.035, abs=0.6)

    def test_each_turn_has_its_own_time_and_an_engine_ends_the_outage(self):
        clock = ManualClock()

        async def work():
            async with RolloutPool(clock=clock, config=PoolConfig(no_engine_timeout_s=30.0)) as pool:
                first = asyncio.ensure_future(pool.generate(turn("first")))
                await clock.sleep(20.0)
                second = asyncio.ensure_future(pool.generate(turn("second")))
                with pytest.raises(NoEngineError, match="the pool has none"):
                    await first
                assert clock.now() == pytest.approx(30.0)
                await clock.sleep(15.0)
                await pool.add_engine(engine(clock, "a"))
                await second
                third = asyncio.ensure_future(pool.generate(turn("third")))
                await third

        run(clock, work)

    def test_a_turn_for_dedicated_engines_does_not_wait_for_borrowed_ones(self):
        clock = ManualClock()
        own, lent = engine(clock, "a", token_s=1.0), engine(clock, "b", kv_total_tokens=6)

        async def work():
            config = PoolConfig(routing=RoutingConfig(cap_per_engine=1), no_engine_timeout_s=30.0)
            async with RolloutPool([own], borrowed=[lent], clock=clock, config=config) as pool:
                first = asyncio.ensure_future(pool.generate(turn("first", max_tokens=20)))
                refused = asyncio.ensure_future(pool.generate(turn("refused")))
                await clock.sleep(5.0)
                first.cancel()
                await pool.remove_engine(EngineId("a"), "test")
                with pytest.raises(NoEngineError, match="no dedicated engine took turns"):
                    await refused

        run(clock, work)

    def test_it_can_be_told_to_wait_for_ever(self):
        clock = ManualClock()

        async def work():
            async with RolloutPool(clock=clock, config=PoolConfig(no_engine_timeout_s=None)) as pool:
                waiting = asyncio.ensure_future(pool.generate(turn()))
                await clock.sleep(80_000)
                await pool.add_engine(engine(clock, "a"))
                return await waiting

        assert len(run(clock, work).hops) == 1


def test_a_turn_rests_longer_and_longer_when_engines_fail_it_in_a_row():
    """Many engines behind one broken door: the first other one is tried at once, then the turn gives the door time."""
    clock = ManualClock()
    doors = [Broken(engine_id=EngineId(f"e{i}"), clock=clock) for i in range(8)]
    config = PoolConfig(max_hops=5, retry_s=0.1, retry_max_s=0.3, jitter_fraction=0.0)
    [error], _ = ask(clock, doors, turn(), config=config)
    assert isinstance(error, TurnFailedError)
    assert [at for door in doors for at in door.at_s] == pytest.approx([0.0, 0.0, 0.1, 0.3, 0.6])


def test_a_resting_turn_can_be_cancelled_and_its_deadline_counts():
    clock = ManualClock()

    async def work():
        config = PoolConfig(retry_s=10.0, retry_max_s=10.0, jitter_fraction=0.0)
        doors = [Broken(engine_id=EngineId(f"e{i}"), clock=clock) for i in range(8)]
        async with RolloutPool(doors, clock=clock, config=config) as pool:
            cancelled = asyncio.ensure_future(pool.generate(turn("c")))
            late = asyncio.ensure_future(pool.generate(turn("d", deadline_s=5.0)))
            await clock.sleep(1.0)
            assert (pool.snapshot().num_live_turns, pool.snapshot().num_waiting) == (2, 0)
            cancelled.cancel()
            with pytest.raises(DeadlineExceededError, match="2 attempts; it rested after failed attempts"):
                await late
            await clock.sleep(20.0)
            assert pool.snapshot().num_live_turns == 0
            assert sum(len(door.at_s) for door in doors) <= 4

    run(clock, work)


def test_a_large_turn_is_not_passed_for_ever_by_small_ones():
    clock = ManualClock()
    only = engine(clock, "a", kv_total_tokens=100, token_s=0.1)

    async def small(pool, name):
        for n in range(40):
            await pool.generate(turn(name, group=name, max_tokens=10, prompt=(1, n)))

    async def work():
        config = PoolConfig(starve_s=5.0)
        async with RolloutPool([only], clock=clock, config=config) as pool:
            stream = [asyncio.ensure_future(small(pool, f"s{i}")) for i in range(7)]
            await clock.sleep(0.35)
            await pool.generate(turn("large", max_tokens=80, prompt=(1,) * 10))
            took_s = clock.now() - 0.35
            await asyncio.gather(*stream)
            assert not any(view.is_kept_free for view in pool.snapshot().engines)
            return took_s

    assert 5.0 + 8.0 <= run(clock, work) <= 5.0 + 1.2 + 8.0 + 0.5


def test_a_large_turn_is_not_passed_for_ever_by_trajectories_that_keep_their_seats():
    """Its engine is left to them for six times as long first; one that ended in that time would have made room."""
    clock = ManualClock()
    only = engine(clock, "a", kv_total_tokens=100, token_s=0.1)

    async def small(pool, name):
        for n in range(60):
            await pool.generate(turn(name, group=name, max_tokens=10, prompt=(1, n)))

    async def work():
        config = PoolConfig(starve_s=2.0, routing=RoutingConfig(pace=PaceConfig(prefill_share=1.0)))
        async with RolloutPool([only], clock=clock, config=config) as pool:
            stream = [asyncio.ensure_future(small(pool, f"s{i}")) for i in range(7)]
            await clock.sleep(5.35)
            large = asyncio.ensure_future(pool.generate(turn("large", max_tokens=80, prompt=(1,) * 10)))
            await clock.sleep(10.0)
            (view,) = pool.snapshot().engines
            assert (view.is_kept_free, view.num_slots, view.num_in_flight) == (True, 16, 7)
            await large
            took_s = clock.now() - 5.35
            await asyncio.gather(*stream)
            return took_s

    assert 2.0 + 12.0 + 8.0 <= run(clock, work) <= 2.0 + 12.0 + 1.2 + 8.0 + 1.5


def test_an_engine_is_open_again_at_once_when_the_large_turn_finds_room_elsewhere():
    clock = ManualClock()
    first, second = engine(clock, "a", kv_total_tokens=40, token_s=1.0), engine(clock, "b", kv_total_tokens=100)

    async def work():
        config = PoolConfig(starve_s=2.0, stall_s=60.0)
        async with RolloutPool([first], clock=clock, config=config) as pool:
            small = [asyncio.ensure_future(pool.generate(turn(f"s{i}", max_tokens=9))) for i in range(4)]
            await clock.sleep(0.5)
            large = asyncio.ensure_future(pool.generate(turn("large", prompt=(1,) * 30)))
            await clock.sleep(2.0)
            late = asyncio.ensure_future(pool.generate(turn("late", max_tokens=1, prompt=(1,))))
            await clock.sleep(0.5)
            assert [view.is_kept_free for view in pool.snapshot().engines] == [True]
            await pool.add_engine(second)
            assert [view.is_kept_free for view in pool.snapshot().engines] == [False, False]
            await asyncio.gather(large, late, *small)

    run(clock, work)


def test_evictions_lower_the_slots_of_their_engine_and_quiet_brings_them_back():
    clock = ManualClock()
    evicting = engine(clock, "a", Fault(kind=FaultKind.EVICT, after_tokens=5, request_index=3))

    async def work():
        config = PoolConfig(concurrency=ConcurrencyConfig(cut_fraction=0.5, forget_s=30.0), busy_s=0.01)
        async with RolloutPool([evicting], clock=clock, config=config) as pool:
            await asyncio.gather(*(pool.generate(turn(f"t{i}")) for i in range(8)))
            [view] = pool.snapshot().engines
            assert view.num_slots == 4
            assert view.state is EngineState.READY
            await clock.sleep(31.0)
            [view] = pool.snapshot().engines
            return view.num_slots

    assert run(clock, work) == 16


class Scripted(FakeEngine):
    """Says what it is told to say, to every request, and breaks off."""

    def __init__(self, chunks, *, name="scripted", **fields):
        super().__init__(engine_id=EngineId(name), **fields)
        self.chunks = chunks

    async def generate(self, request):
        for chunk in self.chunks:
            yield chunk


class Quiet(FakeEngine):
    """Does not say how long a context it takes."""

    async def snapshot(self):
        return attrs.evolve(await super().snapshot(), max_context_tokens=None)


class Broken(FakeEngine):
    """Fails every request at once and looks healthy."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.at_s: list[float] = []

    async def generate(self, request):
        self.at_s.append(self.clock.now())
        message = "502"
        raise EngineError(message)
        yield TokenChunk()
