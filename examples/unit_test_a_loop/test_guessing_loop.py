"""Unit tests of the loop: no GPU, no model, no torch, and hours of virtual time in milliseconds."""

from __future__ import annotations

import sys

import pytest
from guessing_loop import TOO_HIGH, TOO_LOW, Batch, play, train

import rose
from rose.testing import FakeEngine, FakeUpdateSource, Fault, FaultKind, ManualClock

SECRET = 6


def guess(sequence, sampling, version):
    """Answer as a perfect policy would: halve what the hints leave of 0 to 9."""
    low, high = 0, 9
    for token, hint in zip(sequence[1::2], sequence[2::2], strict=False):
        low, high = (token + 1, high) if hint == TOO_LOW else (low, token - 1)
    return (low + high) // 2


def make_engines(clock, faults=()):
    """Return two replicas; the first has the faults."""
    options = {"clock": clock, "token_s": 0.05, "next_token": guess}
    return FakeEngine(engine_id="e0", faults=faults, **options), FakeEngine(engine_id="e1", **options)


async def run(engines, clock, *, num_steps=1, secrets=(SECRET,)):
    """Run the loop to its end and return the batches."""
    batches: list[Batch] = []
    source = FakeUpdateSource()
    source.publish()

    async with rose.RolloutPool(engines, clock=clock) as pool:

        async def learn(batch):
            batches.append(batch)
            source.publish()
            await pool.sync_weights(source)

        async def work():
            await pool.sync_weights(source)
            await train(pool, secrets, num_steps=num_steps, group_size=4, learn=learn)

        await clock.run(work())
    return batches


@pytest.fixture
def clock():
    return ManualClock()


async def test_hints_lead_to_the_secret(clock):
    engines = make_engines(clock)
    source = FakeUpdateSource()
    source.publish()
    async with rose.RolloutPool(engines, clock=clock) as pool:
        await clock.run(pool.sync_weights(source))
        game = await clock.run(play(pool, secret=2, group_id="g", trajectory_id="t", min_version=0))
    assert game.token_ids == (0, 4, TOO_HIGH, 1, TOO_LOW, 2)
    assert game.is_sampled == (False, True, False, True, False, True)
    assert len(game.logprobs) == 3
    assert game.reward == 1.0


async def test_every_step_has_whole_groups_on_fresh_weights(clock):
    engines = make_engines(clock)
    batches = await run(engines, clock, num_steps=3, secrets=(4, 7))
    assert [len(batch.trajectories) for batch in batches] == [8, 8, 8]
    assert all(abs(sum(batch.advantages)) < 1e-9 for batch in batches)
    assert {engine.weight_version.n for engine in engines} == {3}


@pytest.mark.parametrize(
    "fault",
    [
        Fault(kind=FaultKind.DIE, at_s=0.12),
        Fault(kind=FaultKind.STALL, at_s=0.12, duration_s=60.0),
        Fault(kind=FaultKind.EVICT, request_index=1),
        Fault(kind=FaultKind.BUSY, request_index=0),
    ],
    ids=lambda fault: fault.kind.value,
)
async def test_trouble_on_one_engine_costs_time_and_no_trajectory(clock, fault):
    quiet_clock = ManualClock()
    expected = await run(make_engines(quiet_clock), quiet_clock)
    batches = await run(make_engines(clock, [fault]), clock)
    assert [game.token_ids for game in batches[0].trajectories] == [game.token_ids for game in expected[0].trajectories]
    assert sum(game.num_moves for game in batches[0].trajectories) > 0


def test_none_of_this_needs_torch():
    assert "torch" not in sys.modules
