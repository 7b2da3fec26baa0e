"""The serving side's clients, on scripted engines and a clock that tests move."""

from __future__ import annotations

import asyncio

import pytest

from rose.reference.serving_host import _Answer, _Host, _Replay
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId


def engine(clock: ManualClock, name: str) -> FakeEngine:
    return FakeEngine(engine_id=EngineId(name), clock=clock, token_s=0.1, first_token_s=0.4)


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work))


def test_an_arm_starts_with_its_label_and_ends_with_what_was_measured():
    clock = ManualClock(start_s=100.0)
    engines = [engine(clock, "s0"), engine(clock, "s1")]

    async def work():
        arm = _Replay(engines, clock, "fixed", 500)
        arm.begin([[(0.0, 5, 3), (4.9, 6, 40)], [(1.0, 7, 2), (99.0, 1, 1)]])
        await clock.sleep(5.0)
        return await arm.stop()

    result = run(clock, work())
    assert result["duration_s"] == pytest.approx(5.0)
    assert result["num_sent"] == [2, 1]
    assert result["num_failed"] == 0
    assert result["waited_s"] == [pytest.approx(0.1)]
    answers = {(device, index): (arrived_s, times) for index, device, arrived_s, times in result["answers"]}
    assert answers.keys() == {("s0", 0), ("s1", 0)}
    assert answers["s0", 0] == (0.0, [pytest.approx(t) for t in (0.5, 0.6, 0.7)])
    assert answers["s1", 0] == (1.0, [pytest.approx(t) for t in (1.5, 1.6)])
    assert engines[0].num_in_flight == 0, "requests in flight are cut off"
    assert [len(request.prompt_ids) for request in engines[0].requests] == [5, 6]


def test_prompts_are_fresh_in_every_arm_and_the_same_when_an_arm_is_repeated():
    clock = ManualClock()
    engines = [engine(clock, "s0")]

    async def work():
        for label in ("fixed", "rose", "fixed"):
            arm = _Replay(engines, clock, label, 500)
            arm.begin([[(0.0, 50, 1)]])
            await clock.sleep(1.0)
            await arm.stop()

    run(clock, work())
    fixed, rose, again = (request.prompt_ids for request in engines[0].requests)
    assert fixed == again != rose
    assert all(3 <= token < 500 for token in fixed + rose)


def test_a_request_that_fails_is_counted_once_and_is_no_answer():
    clock = ManualClock()
    engines = [engine(clock, "s0")]

    async def work():
        arm = _Replay(engines, clock, "fixed", 500)
        arm.begin([[(0.0, 5, 40), (0.0, 5, 40), (1.2, 5, 40), (3.0, 5, 1)]])
        await clock.sleep(1.3)  # the first two have tokens, the third has none yet
        engines[0].die()
        await clock.sleep(8.0)
        return await arm.stop()

    result = run(clock, work())
    assert result["num_sent"] == [4]
    assert result["num_failed"] == 4
    assert (result["answers"], result["waited_s"]) == ([], [])


@pytest.mark.parametrize(("num_tokens", "is_finished", "num_kept"), [(2, True, 2), (29, False, 1), (30, False, 30)])
def test_of_a_request_cut_off_early_only_the_first_token_counts(num_tokens, is_finished, num_kept):
    answer = _Answer(0, "s0", 0.0, is_finished=is_finished, token_times_s=[0.1 * i for i in range(num_tokens)])
    assert answer.kept_times_s() == answer.token_times_s[:num_kept]


def test_a_host_answers_its_requests_by_name():
    clock = ManualClock()
    engines = [engine(clock, "s0")]

    async def work():
        host = _Host(clock, engines)
        assert await host.handle(do="progress") == []
        assert await host.handle(do="stop") == {}
        await host.handle(do="replay", label="fixed", arrivals=[[(0.0, 5, 3), (0.0, 5, 1), (0.0, 5, 40)]], vocab_size=9)
        await clock.sleep(2.0)
        progress = await host.handle(do="progress")
        assert [ttft for ttft, _ in progress] == [pytest.approx(0.5)] * 2
        assert {None if tpot is None else round(tpot, 6) for _, tpot in progress} == {None, 0.1}
        assert len(progress) == 2, "finished requests only"
        assert len((await host.handle(do="stop"))["answers"]) == 3
        await host.close()
        with pytest.raises(Exception, match="it was closed"):
            await engines[0].snapshot()

    run(clock, work())


def test_a_new_arm_does_not_add_to_the_load_of_the_one_before():
    clock = ManualClock()
    engines = [engine(clock, "s0")]

    async def work():
        host = _Host(clock, engines)
        for label in ("kill", "revoke"):
            await host.handle(do="replay", label=label, arrivals=[[(0.0, 5, 400), (1.0, 6, 400)]], vocab_size=9)
            await clock.sleep(0.9)
        assert engines[0].num_in_flight == 1
        await clock.sleep(0.5)
        await host.handle(do="stop")
        return [request.request_id for request in engines[0].requests]

    assert run(clock, work()) == ["kill-s0-0", "revoke-s0-0", "revoke-s0-1"]


def test_an_answer_without_a_token_does_not_end_the_host():
    """An engine that is paused with ``abort`` ends a stream before its first token."""
    clock = ManualClock()
    engines = [engine(clock, "s0")]

    async def work():
        host = _Host(clock, engines)
        await host.handle(do="replay", label="fixed", arrivals=[[(0.0, 5, 3)]], vocab_size=9)
        await clock.sleep(0.1)
        engines[0].evict(engines[0].requests[0].request_id)
        await clock.sleep(1.0)
        assert await host.handle(do="progress") == []
        assert (await host.handle(do="stop"))["num_failed"] == 1

    run(clock, work())


def test_every_engine_makes_one_token_to_warm_up():
    clock = ManualClock()
    engines = [engine(clock, "s0"), engine(clock, "s1")]
    run(clock, _Host(clock, engines).handle(do="warm_up"))
    assert [[request.sampling.max_tokens for request in one.requests] for one in engines] == [[1], [1]]
    assert [one.num_in_flight for one in engines] == [0, 0]
