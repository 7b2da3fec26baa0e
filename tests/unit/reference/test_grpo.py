from __future__ import annotations

import attrs
import pytest

from rose.reference.grpo import Sample, clipped_surrogate, find_signal, plan_minibatches
from rose.reference.trajectory import Trajectory


def trajectory(name: str, group: str, reward: float, **changes) -> Trajectory:
    values = {"token_ids": (1, 5, 6), "mask": (0, 0, 1), "logprobs": (0.0, 0.0, -0.5)}
    return Trajectory(
        trajectory_id=name,
        group_id=group,
        environment_seed=0,
        reward=reward,
        started_s=0,
        ended_s=1,
        **(values | changes),
    )


def sample(length: int, num_tokens: int = 1) -> Sample:
    mask = (0,) * (length - num_tokens) + (1,) * num_tokens
    return Sample(token_ids=tuple(range(length)), mask=mask, logprobs=(0.0,) * length, advantage=1.0)


def test_advantages_are_relative_to_the_own_group():
    step = [trajectory(f"a{i}", "a", r) for i, r in enumerate((1, 0, 0, 0))]
    step += [trajectory(f"b{i}", "b", r) for i, r in enumerate((1, 1))]
    signal = find_signal(step)
    assert (signal.num_flat_groups, signal.num_failed) == (1, 0)
    assert [s.advantage for s in signal.samples] == pytest.approx([0.75 / 0.5001] + [-0.25 / 0.5001] * 3)
    assert sum(s.advantage for s in signal.samples) == pytest.approx(0)


def test_a_group_of_equal_rewards_teaches_nothing_at_any_reward():
    assert find_signal([trajectory("a", "a", 0.3), trajectory("b", "a", 0.3)]).samples == ()
    assert find_signal([]).samples == ()


def test_failed_trajectories_neither_teach_nor_count_in_the_mean():
    step = [trajectory("a", "a", 1), trajectory("b", "a", 0), trajectory("c", "a", 0, failure="lost")]
    signal = find_signal(step)
    assert signal.num_failed == 1
    assert [s.advantage for s in signal.samples] == pytest.approx([0.5 / 0.70721, -0.5 / 0.70721], rel=1e-4)
    alone = find_signal([trajectory("a", "a", 1), trajectory("b", "a", 0, failure="lost")])
    assert (alone.samples, alone.num_flat_groups) == ((), 1)


def test_a_trajectory_without_made_tokens_is_left_out():
    """Case E03 b: nothing was made, so nothing is trained."""
    step = [trajectory("a", "a", 1), trajectory("b", "a", 0, mask=(0, 0, 0))]
    assert len(find_signal(step).samples) == 1


def test_every_sample_is_in_exactly_one_share_and_tokens_are_counted_over_all_ranks():
    samples = [sample(10 + i, 1 + i % 3) for i in range(23)]
    batches = plan_minibatches(samples, num_minibatches=2, num_ranks=3, micro_rows=2, seed=1)
    assert len(batches) == 2
    shared = [s for batch in batches for share in batch.shares for micro in share for s in micro]
    assert sorted(map(id, shared)) == sorted(map(id, samples))
    for batch in batches:
        rows = [[s for micro in share for s in micro] for share in batch.shares]
        assert batch.num_tokens == sum(s.num_tokens for mine in rows for s in mine)
        assert len({len(share) for share in batch.shares}) == 1, "all ranks run equally many micro-batches"
        assert all(len(micro) <= 2 for share in batch.shares for micro in share)
        lengths = [sum(len(s.token_ids) for s in mine) for mine in rows]
        assert max(lengths) - min(lengths) <= max(len(s.token_ids) for s in samples)


def test_a_rank_without_samples_gets_empty_micro_batches():
    (batch,) = plan_minibatches([sample(4)], num_minibatches=2, num_ranks=2, micro_rows=8, seed=0)
    assert [[len(micro) for micro in share] for share in batch.shares] == [[1], [0]]
    assert plan_minibatches([], num_minibatches=2, num_ranks=2, micro_rows=8, seed=0) == []


def test_the_order_follows_from_the_seed():
    samples = [sample(10 + i) for i in range(20)]
    settings = {"num_minibatches": 2, "num_ranks": 2, "micro_rows": 4}
    assert plan_minibatches(samples, **settings, seed=1) == plan_minibatches(samples, **settings, seed=1)
    assert plan_minibatches(samples, **settings, seed=1) != plan_minibatches(samples, **settings, seed=2)


class TestSurrogate:
    """Small tensors worked out by hand: ratios 1, 2 and 0.5, clip to [0.8, 1.28]."""

    torch = pytest.importorskip("torch")

    def surrogate(self, advantage: float, mask=(1, 1, 1)):
        torch = self.torch
        self.new = torch.tensor([[-1.0, -1.0, -2.0]], requires_grad=True)
        old = self.new.detach() - torch.tensor([[1.0, 2.0, 0.5]]).log()
        return clipped_surrogate(
            self.new,
            old,
            torch.tensor([advantage]),
            torch.tensor([mask], dtype=torch.float32),
            clip_low=0.2,
            clip_high=0.28,
        )

    def test_a_good_token_earns_no_more_than_the_upper_clip(self):
        result = self.surrogate(2.0)
        assert result.objective_sum.item() == pytest.approx(2 * (1 + 1.28 + 0.5))
        assert int(result.num_clipped) == 1
        assert float(result.ratio_max) == pytest.approx(2)

    def test_a_bad_token_earns_no_less_than_the_lower_clip(self):
        result = self.surrogate(-1.0)
        assert result.objective_sum.item() == pytest.approx(-(1 + 2 + 0.8))
        assert int(result.num_clipped) == 1

    def test_the_gradient_of_an_unclipped_token_is_ratio_times_advantage(self):
        self.surrogate(2.0).objective_sum.backward()
        assert self.new.grad[0].tolist() == pytest.approx([2.0, 0.0, 1.0])

    def test_masked_tokens_count_nowhere(self):
        result = self.surrogate(2.0, mask=(1, 0, 0))
        assert result.objective_sum.item() == pytest.approx(2.0)
        assert (float(result.mismatch_sum), float(result.mismatch_max), int(result.num_clipped)) == (0, 0, 0)
        result.objective_sum.backward()
        assert self.new.grad[0].tolist() == pytest.approx([2.0, 0.0, 0.0])

    def test_the_mismatch_is_the_distance_to_the_engine(self):
        result = self.surrogate(1.0)
        assert float(result.mismatch_sum) == pytest.approx(2 * 0.693147, rel=1e-4)
        assert float(result.mismatch_max) == pytest.approx(0.693147, rel=1e-4)


def test_samples_are_values():
    one = sample(3)
    assert one == attrs.evolve(one)
    assert one.num_tokens == 1


def test_the_divisor_says_what_weighs_the_same():
    samples = [sample(6, 4), sample(6, 1)]
    plan = {"num_minibatches": 1, "num_ranks": 1, "micro_rows": 8, "seed": 0}
    (tokens,) = plan_minibatches(samples, **plan)
    assert (tokens.num_tokens, tokens.divisor) == (5, 5)
    (whole,) = plan_minibatches(samples, **plan, loss="sequence")
    assert (whole.num_tokens, whole.divisor) == (5, 2)
    rows = [row for micro in whole.shares[0] for row in micro]
    sums = sorted(row.advantage * row.num_tokens / whole.divisor for row in rows)
    assert sums == pytest.approx([0.5, 0.5]), "each trajectory has half of the step, however long it is"
    parts = [row.advantage * row.num_tokens / tokens.divisor for micro in tokens.shares[0] for row in micro]
    assert sorted(parts) == pytest.approx([0.2, 0.8])


def test_spreading_an_advantage_does_not_change_what_is_clipped():
    torch = pytest.importorskip("torch")
    new, old = torch.tensor([[0.0, 0.5, -0.5]]), torch.zeros(1, 3)
    mask = torch.tensor([[0.0, 1.0, 1.0]])
    clips = {"clip_low": 0.2, "clip_high": 0.28}
    whole = clipped_surrogate(new, old, torch.tensor([1.0]), mask, **clips)
    spread = clipped_surrogate(new, old, torch.tensor([0.5]), mask, **clips)
    assert int(whole.num_clipped) == int(spread.num_clipped) == 1
    assert float(spread.objective_sum) == pytest.approx(float(whole.objective_sum) / 2)
