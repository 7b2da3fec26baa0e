"""Following the demand: devices are held for less of the time, and rollouts are not longer for it."""

from __future__ import annotations

import attrs
import pytest

from rose.policies.demand import DemandConfig
from rose.simulation.outcome import Outcome
from rose.simulation.presets import PRESETS
from rose.simulation.run import simulate
from rose.simulation.shared_supply import CoservingSupply
from rose.simulation.strategies import STRATEGIES


def run(monkeypatch: pytest.MonkeyPatch, demand: DemandConfig | None, seed: int) -> Outcome:
    """Run two steps of the paper's 8B job at an eighth of its size."""
    base = PRESETS["frozenlake-8b-grpo"]
    scenario = attrs.evolve(
        base,
        cluster=attrs.evolve(base.cluster, rollout_gpus=1, training_gpus=1, borrowed_gpus=2),
        rollout=attrs.evolve(base.rollout, num_trajectories=32, group_size=8),
        loop=attrs.evolve(base.loop, num_steps=2, train_s=20.0),
    )
    strategy = attrs.evolve(STRATEGIES["default"], supply=lambda: CoservingSupply(demand=demand))
    monkeypatch.setitem(STRATEGIES, "default", strategy)
    return simulate(scenario, "default", seed)


def test_device_hours_fall_and_rollouts_are_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tail of each step leaves borrowed engines idle; the next step finds all of them again.

    How much is up to which engine has the last trajectory, so it is looked for in several jobs together.
    """
    held_s = followed_s = 0.0
    for seed in range(4):
        held, followed = (run(monkeypatch, demand, seed) for demand in (None, DemandConfig()))
        held_s, followed_s = held_s + held.borrowed_gpu_s, followed_s + followed.borrowed_gpu_s
        assert followed.rollout_s <= 1.01 * held.rollout_s
        assert followed.borrowed_gpu_s <= 1.01 * held.borrowed_gpu_s
        assert followed.num_tokens == held.num_tokens
        is_less = followed.borrowed_gpu_s < 0.99 * held.borrowed_gpu_s
        assert (held.overhead_fraction < followed.overhead_fraction) is is_less, "activations are paid for"
        assert followed.overhead_fraction < 0.05
    assert followed_s < 0.95 * held_s
