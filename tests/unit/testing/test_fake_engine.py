"""The fake engine's scripts: faults at the request, token or time that was written down."""

from __future__ import annotations

import asyncio

import pytest

from rose.errors import (
    CorruptUpdateError,
    EngineBusyError,
    EngineFencedError,
    EngineLostError,
    RequestRefusedError,
    VersionConflictError,
)
from rose.testing import FakeEngine, Fault, FaultKind, ManualClock, fake_update
from rose.testing.contracts.streams import collect, reading
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, WeightVersion


def request(name="r", max_tokens=8, prompt=(1, 2, 3), priority=0, **sampling):
    options = Sampling(max_tokens=max_tokens, **sampling)
    return EngineRequest(request_id=RequestId(name), prompt_ids=prompt, sampling=options, priority=priority)


@pytest.fixture
def clock():
    return ManualClock()


async def test_time_per_token(clock):
    engine = FakeEngine(clock=clock, token_s=0.1, first_token_s=1.0)
    await clock.run(collect(engine, request()))
    assert clock.now() == pytest.approx(1.8)


async def test_a_moved_request_goes_on_as_on_the_first_engine(clock):
    whole = await collect(FakeEngine(seed=5), request(max_tokens=8))
    start = await collect(FakeEngine(seed=5), request(max_tokens=3))
    rest = await collect(FakeEngine(seed=5), request(max_tokens=5, prompt=(1, 2, 3, *start.token_ids)))
    assert start.token_ids + rest.token_ids == whole.token_ids
    assert (await collect(FakeEngine(seed=6), request(max_tokens=8))).token_ids != whole.token_ids


async def test_a_moved_request_with_a_seed_goes_on_when_its_seed_moved_on(clock):
    whole = await collect(FakeEngine(seed=5), request(max_tokens=8, temperature=1.0, seed=7))
    start = await collect(FakeEngine(seed=5), request(max_tokens=3, temperature=1.0, seed=7))
    rest = request(max_tokens=5, prompt=(1, 2, 3, *start.token_ids), temperature=1.0, seed=10)
    assert start.token_ids + (await collect(FakeEngine(seed=5), rest)).token_ids == whole.token_ids
    other = await collect(FakeEngine(seed=5), request(max_tokens=8, temperature=1.0, seed=-1))
    assert other.token_ids != whole.token_ids


async def test_your_own_tokens_and_end_token():
    engine = FakeEngine(next_token=lambda sequence, _, version: sequence[-1] + version.n, eos_token_id=9)
    engine.weight_version = WeightVersion("run", 2)
    stream = await collect(engine, request())
    assert stream.token_ids == (5, 7, 9)
    assert stream.finish_reason is FinishReason.STOP
    ignoring = await collect(engine, request(max_tokens=5, ignore_eos=True))
    assert ignoring.token_ids == (5, 7, 9, 11, 13)


async def test_eviction_at_a_token_of_one_request():
    engine = FakeEngine(faults=[Fault(kind=FaultKind.EVICT, request_index=1, after_tokens=3)])
    ends = [await collect(engine, request(str(i))) for i in range(3)]
    assert [(len(s.token_ids), s.finish_reason.value) for s in ends] == [(8, "length"), (3, "evicted"), (8, "length")]


async def test_eviction_at_a_time_spares_later_requests(clock):
    engine = FakeEngine(clock=clock, token_s=1.0, faults=[Fault(kind=FaultKind.EVICT, at_s=3.5)])
    first = await clock.run(collect(engine, request()))
    assert (first.finish_reason, len(first.token_ids), clock.now()) == (FinishReason.EVICTED, 3, 3.5)
    assert (await clock.run(collect(engine, request()))).finish_reason is FinishReason.LENGTH


async def test_stall_for_a_while(clock):
    fault = Fault(kind=FaultKind.STALL, request_index=0, after_tokens=2, duration_s=10.0)
    engine = FakeEngine(clock=clock, token_s=1.0, faults=[fault])
    async with reading(engine, request()) as stream:
        await clock.advance(11.5)
        assert len(stream.token_ids) == 2
        await clock.advance(1.0)
        assert len(stream.token_ids) == 3
        assert (await engine.snapshot()).num_running == 1


async def test_stall_in_a_window_of_time(clock):
    engine = FakeEngine(
        clock=clock, token_s=1.0, faults=[Fault(kind=FaultKind.STALL, at_s=2.5, duration_s=4.0)], max_running=2
    )
    async with reading(engine, request("a", max_tokens=4)) as a:
        await clock.advance(4.0)
        assert len(a.token_ids) == 2
        async with reading(engine, request("b", max_tokens=1)) as b:
            await clock.advance(2.4)
            assert (len(a.token_ids), len(b.token_ids)) == (2, 0)
            await clock.advance(2.0)
            assert (len(a.token_ids), len(b.token_ids)) == (4, 1)


async def test_a_stalled_request_can_be_aborted(clock):
    engine = FakeEngine(clock=clock, token_s=1.0)
    async with reading(engine, request()) as stream:
        await clock.advance(2.0)
        engine.stall()
        await clock.advance(100.0)
        assert len(stream.token_ids) == 2
        await engine.abort(RequestId("r"))
        await stream.finish()
    assert stream.finish_reason is FinishReason.ABORTED
    assert engine.aborted == ["r"]
    engine.unstall()
    assert len((await clock.run(collect(engine, request()))).token_ids) == 8


@pytest.mark.parametrize(
    ("fault", "num_b"),
    [(Fault(kind=FaultKind.DIE, at_s=2.5), 2), (Fault(kind=FaultKind.DIE, request_index=0, after_tokens=2), 1)],
)
async def test_death_takes_every_stream_with_it(clock, fault, num_b):
    engine = FakeEngine(clock=clock, token_s=1.0, faults=[fault])
    async with reading(engine, request("a")) as a, reading(engine, request("b")) as b:
        await clock.advance(10.0)
        assert (len(a.token_ids), len(b.token_ids)) == (2, num_b)
        for stream in (a, b):
            with pytest.raises(EngineLostError, match="engine fake is gone: a scripted fault killed it"):
                await stream.finish()
    for call in (engine.snapshot(), engine.resume(), collect(engine, request("c"))):
        with pytest.raises(EngineLostError):
            await call
    assert engine.aborted == []


async def test_busy_and_refused_requests(clock):
    faults = [Fault(kind=FaultKind.BUSY, at_s=0.0, duration_s=5.0), Fault(kind=FaultKind.REFUSE, request_index=1)]
    engine = FakeEngine(clock=clock, faults=faults)
    with pytest.raises(EngineBusyError):
        await collect(engine, request())
    await clock.advance(5.0)
    with pytest.raises(RequestRefusedError, match="scripted"):
        await collect(engine, request())
    assert (await clock.run(collect(engine, request()))).finish_reason is FinishReason.LENGTH
    engine.set_busy(is_busy=True)
    with pytest.raises(EngineBusyError):
        await collect(engine, request())
    assert len(engine.requests) == 4


async def test_slow_start(clock):
    engine = FakeEngine(clock=clock, faults=[Fault(kind=FaultKind.SLOW_START, request_index=0, duration_s=7.0)])
    await clock.run(collect(engine, request()))
    assert clock.now() == pytest.approx(7.0)


async def test_a_request_that_can_never_fit_is_refused_and_one_that_can_waits(clock):
    """Case C02: 12 pages wait while 90 of 100 are held and then run; 120 of 100 are refused at once."""
    engine = FakeEngine(clock=clock, token_s=1.0, kv_total_tokens=1600)
    async with reading(engine, request("serving", max_tokens=2, prompt=(1,) * 1440)):
        await clock.advance(1.0)
        with pytest.raises(RequestRefusedError, match="may need 1920 KV tokens, the engine has 1600"):
            await collect(engine, request("never", max_tokens=16, prompt=(1,) * 1904))
        async with reading(engine, request("later", max_tokens=8, prompt=(1,) * 184)) as later:
            await clock.advance(0.5)
            assert (await engine.snapshot()).num_waiting == 1
            await clock.run(later.finish())
    assert len(later.token_ids) == 8


async def test_a_used_id_is_refused_while_in_flight(clock):
    engine = FakeEngine(clock=clock, token_s=1.0)
    async with reading(engine, request("same")) as first:
        await clock.advance(1.0)
        with pytest.raises(RequestRefusedError, match="every attempt needs a fresh id"):
            await collect(engine, request("same"))
        await clock.run(first.finish())
    assert len(first.token_ids) == 8


async def test_slots_go_by_priority_then_arrival(clock):
    engine = FakeEngine(clock=clock, token_s=1.0, max_running=1)
    done = []

    async def run(name, priority):
        await collect(engine, request(name, max_tokens=2, priority=priority))
        done.append(name)

    async with asyncio.TaskGroup() as group:
        for name, priority in [("a", 0), ("b", 1), ("c", 0), ("d", 0)]:
            group.create_task(run(name, priority))
        await clock.advance(20.0)
    assert done == ["a", "c", "d", "b"]


async def test_a_kv_cut_evicts_the_youngest_first(clock):
    engine = FakeEngine(clock=clock, token_s=1.0, kv_total_tokens=100)
    async with reading(engine, request("old", max_tokens=20)) as old, reading(engine, request("young")) as young:
        await clock.advance(4.0)
        assert (await engine.snapshot()).kv_used_tokens == 14
        assert await engine.set_kv_budget(10) == 10
        await clock.advance(1.0)
        assert young.finish_reason is FinishReason.EVICTED
        assert len(young.token_ids) == 4
        assert old.finish_reason is None
        await clock.advance(10.0)
        assert (old.finish_reason, len(old.token_ids)) == (FinishReason.EVICTED, 7)
    assert await engine.set_kv_budget(1000) == 100


async def test_updates_move_the_version_and_count():
    engine = FakeEngine(weight_version=WeightVersion("run", 1))
    with pytest.raises(VersionConflictError, match="call stage"):
        await engine.activate()
    await engine.stage(fake_update(WeightVersion("run", 3)))
    assert (await engine.activate()).version == WeightVersion("run", 3)
    assert engine.num_prefix_resets == 1
    with pytest.raises(VersionConflictError, match="comes too late"):
        await engine.stage(fake_update(WeightVersion("run", 2)))
    await engine.stage(fake_update(WeightVersion("other", 0)))
    assert [update.target.n for update in engine.updates] == [3]


async def test_a_corrupt_update_changes_nothing():
    engine = FakeEngine(faults=[Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=0)])
    with pytest.raises(CorruptUpdateError):
        await engine.stage(fake_update(WeightVersion("run", 0)))
    with pytest.raises(VersionConflictError):
        await engine.activate()
    await engine.stage(fake_update(WeightVersion("run", 0)))
    assert (await engine.activate()).version.n == 0


async def test_a_fenced_engine_serves_again_after_an_update():
    engine = FakeEngine(faults=[Fault(kind=FaultKind.FENCE, request_index=0)])
    await engine.stage(fake_update(WeightVersion("run", 0)))
    with pytest.raises(EngineFencedError):
        await engine.activate()
    with pytest.raises(EngineFencedError):
        await collect(engine, request())
    await engine.stage(fake_update(WeightVersion("run", 1)))
    await engine.activate()
    assert (await collect(engine, request())).versions == (WeightVersion("run", 1),) * 8


async def test_tokens_stop_while_weights_are_written(clock):
    """Case V10: no token between begin and commit; each token carries the version that made it."""
    engine = FakeEngine(
        clock=clock,
        token_s=0.01,
        activate_s=0.05,
        next_token=lambda *args: args[2].n,
        weight_version=WeightVersion("r", 1),
    )
    await engine.stage(fake_update(WeightVersion("r", 2)))
    async with reading(engine, request(max_tokens=10)) as stream:
        await clock.advance(0.035)
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.activate())
            await clock.advance(0.049)
            assert stream.token_ids == (1, 1, 1)
            await clock.advance(0.002)
        await clock.run(stream.finish())
    assert stream.token_ids == (1, 1, 1) + (2,) * 7
    assert [version.n for version in stream.versions] == list(stream.token_ids)
