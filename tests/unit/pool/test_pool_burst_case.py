"""Case C05: a burst of serving stalls rollouts in the middle of their turns."""

from __future__ import annotations

import asyncio

import pytest

from rose.pool import PoolConfig, RolloutPool, RoutingConfig, TurnRerouted
from rose.testing import FakeEngine, ManualClock
from rose.types import EngineId, EngineKind, FinishReason, HopEnd, Sampling, Turn

BURST_S = (1.0, 10.0)
NUM_TOKENS = 1200


def engine(clock: ManualClock, name: str) -> FakeEngine:
    return FakeEngine(engine_id=EngineId(name), clock=clock, token_s=0.01, max_running=16)


def turn(name: str, num_tokens: int = NUM_TOKENS) -> Turn:
    return Turn(
        trajectory_id=name, group_id="g", prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=num_tokens, seed=7)
    )


async def until(clock: ManualClock, at_s: float) -> None:
    await clock.sleep(at_s - clock.now())


async def undisturbed(clock: ManualClock, name: str) -> tuple[int, ...]:
    async with RolloutPool([engine(clock, "reference")], clock=clock) as pool:
        return (await pool.generate(turn(name))).token_ids


@pytest.mark.parametrize("circuit_s", [0.5, 5.0])
def test_trajectories_go_on_within_the_stall_limit_and_come_back_once(circuit_s: float) -> None:
    """All four go on at the dedicated engine by 3.5 s with the tokens they had; nobody flaps while the burst lasts."""
    clock = ManualClock()
    borrowed, dedicated = engine(clock, "borrowed"), engine(clock, "dedicated")
    names = [f"t{i}" for i in range(4)]
    moves: list[tuple[float, str]] = []
    resumed_s: dict[str, float] = {}

    def note(event: object) -> None:
        if isinstance(event, TurnRerouted):
            moves.append((event.at_s, event.trajectory_id))

    async def work() -> list[object]:
        config = PoolConfig(routing=RoutingConfig(cap_per_engine=8), circuit_s=circuit_s)
        async with RolloutPool([], clock=clock, config=config, on_event=note) as pool:
            await pool.add_engine(borrowed, EngineKind.BORROWED)
            turns = [asyncio.ensure_future(pool.generate(turn(name))) for name in names]
            await until(clock, 0.5)
            await pool.add_engine(dedicated, EngineKind.DEDICATED)
            await until(clock, BURST_S[0])
            borrowed.stall()
            await until(clock, 3.5)
            resumed_s.update({request.request_id: clock.now() for request in dedicated.requests})
            assert len(resumed_s) == 4, "all four go on at the dedicated engine"
            assert dedicated.num_in_flight == 4
            await until(clock, BURST_S[1])
            assert len(borrowed.requests) == 4, "the stalled engine is probed by no one while it stalls"
            borrowed.unstall()
            done = await asyncio.gather(*turns)
            await until(clock, BURST_S[1] + 20.0)
            filler = [asyncio.ensure_future(pool.generate(turn(f"n{i}", 50))) for i in range(10)]
            await asyncio.gather(*filler)
            assert len(borrowed.requests) > 4, "after the burst the engine is used again"
            return list(done)

    results = asyncio.run(clock.run(work()))
    for name, result in zip(names, results, strict=True):
        assert result.finish_reason is FinishReason.LENGTH
        assert result.token_ids == clock_tokens(name)
        assert [hop.ended for hop in result.hops] == [HopEnd.STALLED, HopEnd.FINISHED], "one move a burst"
        assert result.hops[0].num_tokens > 90, "the tokens from before the burst are kept"
    assert sorted(name for _, name in moves) == names
    assert all(at_s <= 3.5 for at_s, _ in moves)


def clock_tokens(name: str) -> tuple[int, ...]:
    clock = ManualClock()
    return asyncio.run(clock.run(undisturbed(clock, name)))
