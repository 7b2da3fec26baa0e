"""Stock ``train_ppo_ray``, synchronous, by the GRPO example as the README has it; a borrowed engine leaves and comes back meanwhile."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from engines import check_equal, log_prob_differences, plain_differences
from harness import ADAPTER, SMALL, Run, make_prompts, readme_command
from rose.testing import PoolSite

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600)]
STEPS = 3


@pytest.fixture(scope="module")
def run(site: PoolSite, model: Path, folder: Path) -> Run:
    here = folder / "sync"
    here.mkdir()
    variables = {
        "ROSE_POOL": site.url,
        "MODEL": str(model),
        "PROMPTS": str(make_prompts(here / "prompts.jsonl", 2 * STEPS)),
        "REWARD": str(ADAPTER / "examples/reward.py"),
    }
    flags = ["--rose.weights_dtype", "float32", *SMALL]
    one = Run.start(here, readme_command("examples/grpo.sh", *flags), variables)

    def on_sync(number, weights):
        if number == 0:
            one.versions.append(check_equal(site, weights, "own0", "own1", "gpu0"))
            site.lend(on=False)
        elif number == 1:
            one.versions.append(check_equal(site, weights, "own0", "own1"))
            assert site.status()["engines"]["gpu0"]["state"] in ("away", "lost")
            site.lend(on=True)
        else:
            one.versions.append(check_equal(site, weights, "own0", "own1", "gpu0"))

    try:
        code = one.wait(on_sync)
    finally:
        one.end()
    assert code == 0, one.log[-6000:]
    return one


def test_every_step_is_made_and_every_sync_counts(run):
    assert run.num_syncs == STEPS
    assert [version.rpartition(":")[2] for version in run.versions] == ["1", "2", "3"]  # 0 is the checkpoint
    assert len({version.rpartition(":")[0] for version in run.versions}) == 1
    assert len(run.steps()) == STEPS


def test_loss_rewards_and_weights_evolve(run):
    steps, weights = run.steps(), [run.weights(n) for n in range(STEPS)]
    assert len({step["policy_loss"] for step in steps}) > 1
    assert len({step["reward"] for step in steps}) > 1
    changed = [sum(int((one[name] != other[name]).sum()) for name in one) for one, other in itertools.pairwise(weights)]
    assert all(changed)


def test_the_first_sync_has_nothing_to_send_and_counts(run, model):
    from transformers import AutoModelForCausalLM

    checkpoint = dict(AutoModelForCausalLM.from_pretrained(model, dtype="bfloat16").named_parameters())
    first = run.weights(0)
    assert set(first) == set(checkpoint)
    assert all(first[name].equal(checkpoint[name].data) for name in first)  # the learning rate warms up from 0


def test_shapes_masks_and_padding_are_openrlhfs(run):
    batches = run.experience()
    assert sum(len(one["prompts"]) for one in batches) == 8 * STEPS
    for one in batches:
        rows, length = one["sequences"].shape
        assert str(one["sequences"].dtype) == "torch.int64"
        for name in ("action_mask", "rollout_log_probs", "action_log_probs"):
            assert one[name].shape == (rows, length - 1)
        assert one["rollout_log_probs"].isfinite().all()
        assert not one["rollout_log_probs"][one["action_mask"] == 0].any()
        assert (one["rollout_log_probs"][one["action_mask"] == 1] < 0).all()
        assert (one["attention_mask"].sum(1) == one["total_length"]).all()
        answers = one["action_mask"].sum(1)
        assert ((answers == 16) >= one["truncated"]).all()  # cut off at the budget only


def test_log_probs_agree_with_the_trainers(run, record_property):
    differences = log_prob_differences(run.experience())
    assert len(differences) > 200
    mean, p99 = float(differences.mean()), float(np.quantile(differences, 0.99))
    record_property("mean and P99 of log-prob differences", (mean, p99))
    assert mean < 5e-3
    assert p99 < 3e-2


def test_log_probs_are_those_of_the_weights_that_drew_the_tokens(run, model):
    """In float32, where nothing is rounded away: step n was drawn from the weights of the sync before it."""
    for step in range(1, STEPS):
        batches = [one for one in run.experience() if one["step"] == step]
        assert plain_differences(batches, model, run.weights(step - 1)).max() < 1e-3
        if step > 1:  # and not from others
            assert plain_differences(batches, model, run.weights(step - 2)).max() > 1e-2


def test_samples_say_which_weights_made_them(run):
    for step, status in enumerate(run.steps()):
        assert status["rose_version_min"] == status["rose_version_max"] == step  # on policy
        assert status["rose_hops"] >= 1
