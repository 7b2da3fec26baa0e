"""The version cases V08, V10, V11 and V13, with a pool of fake engines, each under its own id."""

from __future__ import annotations

import asyncio

import attrs
import pytest

from rose.errors import CorruptUpdateError, EngineLostError, RoseError
from rose.interfaces.serving import PauseMode
from rose.pool import EngineState, EngineStateChanged, RolloutPool
from rose.testing import FakeEngine, Fault, FaultKind, ManualClock, fake_update
from rose.types import EngineId, Sampling, Turn, WeightUpdate, WeightVersion

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


def v(n: int) -> WeightVersion:
    return WeightVersion("r", n)


@attrs.define
class Source:
    """The newest version, by number."""

    n: int

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        return None if known == v(self.n) else fake_update(v(self.n))


def version_token(_tokens, _sampling, version: WeightVersion | None) -> int:
    """A token that says which weights made it: 100 for weights of no version."""
    return 100 if version is None else version.n


def engine(clock: ManualClock, name: str, *faults: Fault, kind: type[FakeEngine] = FakeEngine, **fields) -> FakeEngine:
    options = {"token_s": 0.01, "next_token": version_token, "faults": faults, **fields}
    return kind(engine_id=EngineId(name), clock=clock, **options)


def turn(name: str, max_tokens: int = 10, num_prompt: int = 2) -> Turn:
    prompt = tuple(200 + i % 500 for i in range(num_prompt))
    return Turn(trajectory_id=name, group_id="g", prompt_ids=prompt, sampling=Sampling(max_tokens=max_tokens))


def run(clock: ManualClock, work):
    return asyncio.run(clock.run(work()))


def states(pool: RolloutPool) -> dict[str, EngineState]:
    return {view.engine_id: view.state for view in pool.snapshot().engines}


def token_versions(result) -> list[int | None]:
    """Return the recorded version of every new token."""
    found: list[int | None] = [None] * len(result.token_ids)
    for span in result.versions:
        found[span.start : span.end] = [span.version.n] * (span.end - span.start)
    return found


def test_v08_a_restarted_engine_gets_no_turn_before_it_has_the_weights():
    clock, events = ManualClock(), []
    fields = {"weight_version": v(5), "max_running": 4}
    engines = [engine(clock, name, **fields) for name in "abc"]
    restarted = engine(clock, "b", stage_s=1.0, activate_s=0.2, max_running=4)

    async def work():
        async with RolloutPool(engines, clock=clock, on_event=events.append) as pool:
            await pool.sync_weights(Source(5))
            engines[1].die()
            await clock.sleep(1.0)
            assert states(pool)["b"] is EngineState.LOST
            events.clear()
            assert await pool.add_engine(restarted) is EngineState.STALE
            during = await asyncio.gather(*(pool.generate(turn(f"d{i}", max_tokens=3)) for i in range(20)))
            assert restarted.weight_version is None
            await clock.sleep(2.0)
            assert states(pool)["b"] is EngineState.READY
            after = await asyncio.gather(*(pool.generate(turn(f"e{i}", max_tokens=3)) for i in range(20)))
            return during, after

    during, after = run(clock, work)
    assert not any(hop.engine_id == B for result in during for hop in result.hops)
    assert any(hop.engine_id == B for result in after for hop in result.hops)
    for result in (*during, *after):
        assert set(result.token_ids) == {5}, "no token is of the base weights"
    ways = [event.new for event in events if isinstance(event, EngineStateChanged) and event.engine_id == B]
    assert ways == [EngineState.JOINING, EngineState.STALE, EngineState.UPDATING, EngineState.READY]


class WritesTensors(FakeEngine):
    """Takes 50 ms over 4 tensors; remembers when, and when each token was made."""

    begin_s = commit_s = -1.0
    token_times_s: tuple[float, ...] = ()

    async def activate(self):
        self.begin_s = self.clock.now()
        try:
            return await super().activate()
        finally:
            self.commit_s = self.clock.now()

    async def generate(self, request):
        async for chunk in super().generate(request):
            if chunk.token_ids:
                self.token_times_s = (*self.token_times_s, self.clock.now())
            yield chunk


def test_v10_no_token_is_made_while_weights_are_written():
    clock = ManualClock()
    only = engine(clock, "a", kind=WritesTensors, weight_version=v(1), activate_s=0.05)

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            await pool.sync_weights(Source(1))
            turns = [asyncio.ensure_future(pool.generate(turn(f"t{i}", max_tokens=30))) for i in range(6)]
            await clock.sleep(0.095)
            sync = asyncio.ensure_future(pool.sync_weights(Source(2)))
            turns += [asyncio.ensure_future(pool.generate(turn(f"late{i}", max_tokens=30))) for i in range(2)]
            await sync
            return await asyncio.gather(*turns)

    results = run(clock, work)
    assert only.commit_s - only.begin_s == pytest.approx(0.05)
    assert not [at for at in only.token_times_s if only.begin_s < at < only.commit_s]
    assert len(results) == 8
    for result in results:
        assert list(result.token_ids) == token_versions(result), "every token is of the version recorded for it"
        assert list(result.token_ids) == sorted(result.token_ids), "versions never go back along a turn"
        assert len(result.token_ids) == 30
    assert {token for result in results for token in result.token_ids} == {1, 2}


class CachesPrefixes(FakeEngine):
    """A prefix cache in blocks of 32 tokens, kept by the tokens alone; a full last block is computed anew."""

    def __attrs_post_init__(self) -> None:
        super().__attrs_post_init__()
        self.cached: set[tuple[int, ...]] = set()
        self.num_cached_tokens: list[int] = []

    async def generate(self, request):
        starts = range(32, len(request.prompt_ids), 32)
        known = [n for n in starts if request.prompt_ids[:n] in self.cached]
        self.num_cached_tokens.append(max(known, default=0))
        self.cached |= {request.prompt_ids[:n] for n in starts}
        async for chunk in super().generate(request):
            yield chunk

    async def reset_prefix_cache(self) -> None:
        await super().reset_prefix_cache()
        self.cached.clear()


class CannotReset(CachesPrefixes):
    """Its cache outlives the weights, and it says so."""

    async def reset_prefix_cache(self) -> None:
        message = f"{self.engine_id} cannot drop its prefix cache"
        raise EngineResetError(message)


class EngineResetError(RoseError):
    """The cache could not be dropped."""


def test_v11_no_prefix_of_the_old_weights_is_used_after_an_update():
    clock = ManualClock()
    only = engine(clock, "a", kind=CachesPrefixes, weight_version=v(1))

    async def work():
        async with RolloutPool([only], clock=clock) as pool:
            await pool.sync_weights(Source(1))
            only.cached.clear()
            for n in (1, 1, 2):
                await pool.sync_weights(Source(n))
                await pool.generate(turn("t", max_tokens=1, num_prompt=853))

    run(clock, work)
    assert only.num_cached_tokens == [0, 832, 0]


def test_v11_an_engine_that_cannot_drop_its_cache_does_not_serve_on():
    clock = ManualClock()
    engines = [engine(clock, "a", kind=CannotReset, weight_version=v(1)), engine(clock, "b", weight_version=v(1))]

    async def work():
        async with RolloutPool(engines, clock=clock) as pool:
            await pool.sync_weights(Source(1))
            report = await pool.sync_weights(Source(2))
            assert states(pool) == {"a": EngineState.FENCED, "b": EngineState.READY}
            result = await pool.generate(turn("t", max_tokens=2, num_prompt=853))
            assert {hop.engine_id for hop in result.hops} == {"b"}
            return report

    assert "cannot drop its prefix cache" in str(run(clock, work).errors[A])


class PauseFails(FakeEngine):
    """Its first pause fails."""

    num_pauses = 0

    async def pause(self, mode: PauseMode) -> None:
        self.num_pauses += 1
        if self.num_pauses == 1:
            message = f"{self.engine_id} did not pause"
            raise EngineResetError(message)
        await super().pause(mode)


@pytest.mark.parametrize(
    ("where", "state", "error"),
    [
        ("pause", EngineState.FENCED, EngineResetError),
        ("transfer", EngineState.STALE, CorruptUpdateError),
        ("commit", EngineState.FENCED, RoseError),
        ("death", EngineState.LOST, EngineLostError),
    ],
)
def test_v13_an_update_that_fails_leaves_nobody_paused(where: str, state: EngineState, error: type[RoseError]):
    clock = ManualClock()
    faults = {
        "transfer": [Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=n) for n in range(2)],
        "commit": [Fault(kind=FaultKind.FENCE, request_index=0)],
    }.get(where, [])
    kind = PauseFails if where == "pause" else FakeEngine
    fields = {"weight_version": v(1), "activate_s": 0.1}
    engines = [
        engine(clock, "a", **fields),
        engine(clock, "b", *faults, kind=kind, **fields),
        engine(clock, "c", **fields),
    ]

    async def work():
        async with RolloutPool(engines, clock=clock) as pool:
            running = [asyncio.ensure_future(pool.generate(turn(f"t{i}", max_tokens=40))) for i in range(3)]
            await clock.sleep(0.05)
            sync = asyncio.ensure_future(pool.sync_weights(Source(2)))
            if where == "death":
                await clock.sleep(0.05)
                engines[1].die()
            report = await sync
            assert states(pool) == {"a": EngineState.READY, "b": state, "c": EngineState.READY}
            before_s = clock.now()
            served = await pool.generate(turn("next", max_tokens=5))
            assert clock.now() - before_s < 1.0
            assert set(served.token_ids) == {2}
            for result in await asyncio.gather(*running):
                assert list(result.token_ids) == token_versions(result)
            again = await pool.sync_weights(Source(3))
            return report, again

    report, again = run(clock, work)
    assert list(report.errors) == [B]
    assert isinstance(report.errors[B], error)
    for healthy in (engines[0], engines[2]):
        assert not asyncio.run(healthy.snapshot()).is_paused
        assert healthy.weight_version == v(3)
    assert set(again.activations) == ({A, C} if where == "death" else {A, B, C}), "no lock is held"
