"""Stock ``train_ppo_ray`` with an agent of several turns; the README's shortest command. Some prompts are answered greedily."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from agent import FEEDBACK, STOPS
from engines import check_equal, log_prob_differences
from harness import SMALL, Run, make_prompts, readme_command
from rose.testing import PoolSite

pytestmark = [pytest.mark.stock, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def run(site: PoolSite, model: Path, folder: Path) -> Run:
    here = folder / "agent"
    here.mkdir()
    prompts = make_prompts(here / "prompts.jsonl", 2, lambda n: "greedy" if n % 2 else "drawn")
    variables = {"ROSE_POOL": site.url, "MODEL": str(model), "PROMPTS": str(prompts)}
    flags = ["--rose.weights_dtype", "float32", "--algo.advantage.is_correction_level", "token", *SMALL]
    one = Run.start(here, readme_command("tests/agent.py", *flags), variables)
    try:
        code = one.wait(lambda _, weights: one.versions.append(check_equal(site, weights, "own0", "own1", "gpu0")))
    finally:
        one.end()
    assert code == 0, one.log[-6000:]
    return one


def rows(run):
    for one in run.experience():
        for index, label in enumerate(one["labels"]):
            length = int(one["attention_mask"][index].sum())
            yield {
                "label": label,
                "ids": one["sequences"][index, :length].tolist(),
                "actions": one["action_mask"][index, : length - 1].tolist(),
                "log_probs": one["rollout_log_probs"][index, : length - 1].tolist(),
            }


def test_a_second_job_on_the_same_pool_begins_with_its_own_checkpoint(run):
    assert [version.rpartition(":")[2] for version in run.versions] == ["1"]


def test_several_turns_and_zeros_for_what_was_not_sampled(run, model):
    from transformers import AutoTokenizer

    feedback = AutoTokenizer.from_pretrained(model)(FEEDBACK, add_special_tokens=False)["input_ids"]
    num_turns = []
    for row in rows(run):
        starts = [
            i for i, is_action in enumerate(row["actions"]) if is_action and (i == 0 or not row["actions"][i - 1])
        ]
        num_turns.append(len(starts))
        assert all(
            (value == 0.0) != bool(is_action) for value, is_action in zip(row["log_probs"], row["actions"], strict=True)
        )
        for start in starts[1:]:
            assert row["ids"][start + 1 - len(feedback) : start + 1] == feedback
    assert max(num_turns) == 3
    assert len(num_turns) == 8


def test_greedy_answers_are_those_of_plain_generation_on_the_trainers_weights(run, model):
    """Turn by turn, in float32 on both sides; the trainer's bfloat16 values are exact in it."""
    import torch
    from transformers import AutoModelForCausalLM

    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).to(torch.float32).eval()
    plain.load_state_dict({name: value.float() for name, value in run.weights(0).items()}, strict=True)
    ends = [plain.config.eos_token_id, *STOPS]
    greedy = [row for row in rows(run) if row["label"] == "greedy"]
    assert len(greedy) == 4
    for row in greedy:
        is_sampled = [False, *map(bool, row["actions"])]
        start = 0
        while (start := next((i for i in range(start, len(is_sampled)) if is_sampled[i]), -1)) >= 0:
            end = next((i for i in range(start, len(is_sampled)) if not is_sampled[i]), len(is_sampled))
            prompt = torch.tensor([row["ids"][:start]])
            made = plain.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                do_sample=False,
                max_new_tokens=96 - start,
                eos_token_id=ends,
                pad_token_id=0,
            )
            assert row["ids"][start:end] == made[0, start:].tolist()
            start = end


def test_log_probs_agree_with_the_trainers(run, record_property):
    differences = log_prob_differences(run.experience())
    mean, p99 = float(differences.mean()), float(np.quantile(differences, 0.99))
    record_property("mean and P99 of log-prob differences", (mean, p99))
    assert mean < 5e-3
    assert p99 < 3e-2


def test_what_the_agent_logs_is_kept(run):
    (step,) = run.steps()
    assert step["turns"] > 1
    assert step["rose_hops"] >= step["turns"]
