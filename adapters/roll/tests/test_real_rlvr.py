"""ROLL's own dynamic sampling scheduler, replay buffer and rollout loop, with our loop class in front of the pool."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import SETTINGS

from rose.testing import FakeEngine
from rose.types import EngineId

pytestmark = [pytest.mark.real, pytest.mark.timeout(180)]
PROMPT, ANSWER, SAMPLES = 12, 20, 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import ray
    from real_tools import make_policy, start_ray

    path = make_policy(tmp_path_factory.mktemp("policy"))
    if not ray.is_initialized():
        start_ray()
    from roll.configs.base_config import TransferBackendArguments
    from roll.distributed.scheduler.transfer_backend import init_transfer_backend

    init_transfer_backend(TransferBackendArguments())
    yield path
    ray.shutdown()


@dataclass
class Collect:
    """A collator: one prompt, left-padded."""

    tokenizer: Any

    def __call__(self, items: list[dict[str, Any]]) -> dict[str, Any]:
        import numpy as np

        pad = PROMPT - len(items[0]["ids"])
        mask = torch.tensor([[0] * pad + [1] * len(items[0]["ids"])])
        return {
            "input_ids": torch.tensor([[2] * pad + items[0]["ids"]]),
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clip(min=0),
            "domain": np.array(["math"], dtype=object),
        }


class Rewards:
    """A reward worker: the share of even tokens."""

    def __init__(self) -> None:
        self.compute_rewards = SimpleNamespace(remote=self._compute)
        self.seen: list[Any] = []

    async def _compute(self, req: Any) -> Any:
        from roll.distributed.scheduler.protocol import DataProto

        self.seen.append(req)
        even = (req.batch["responses"] % 2 == 0).float()
        score = even.mean(-1)
        rewards = {"token_level_rewards": even * 0, "response_level_rewards": score, "scores": score}
        return DataProto.from_dict(tensors=rewards)


def make_scheduler(model: Path, url: str, rewards: Rewards, ratio: int) -> Any:
    from real_tools import stand_in_cluster
    from roll.configs.base_config import RouterArguments
    from roll.distributed.scheduler.generate_scheduler import DynamicSamplingScheduler

    query_filter = SimpleNamespace(type="no_filter", filter_args={})
    config = SimpleNamespace(
        seed=1,
        sequence_length=PROMPT + ANSWER,
        prompt_length=PROMPT,
        rollout_mock=None,
        async_generation_ratio=ratio,
        is_use_additional_prompts=False,
        max_additional_running_prompts=0,
        is_num_return_sequences_expand=False,
        router_args=RouterArguments(router_name="PromptAffinityRouter"),
        num_gpus_per_node=0,
        user_defined_rollout_loop_cls="rose_roll.RoseRolloutLoop",
        generate_opt_level=1,
        system_envs={"ROSE_POOL": url},
        rewards={"math": SimpleNamespace(query_filter_config=query_filter)},
    )
    return DynamicSamplingScheduler(
        pipeline_config=config,
        actor_cluster=stand_in_cluster([], model),
        reward_clusters={"math": SimpleNamespace(workers=[rewards])},
        dataset=[{"ids": [10 + number, 20, 30], "domain": "math"} for number in range(8)],
        collect_fn_cls=Collect,
        collect_fn_kwargs={},
    )


@pytest.mark.parametrize("ratio", [0, 1])
async def test_rolls_scheduler_samples_from_the_pool(make_site: Any, model: Path, ratio: int) -> None:
    """Two steps; with a ratio of 1 prompts are under way while ROLL pauses, and go on where they were."""
    from roll.distributed.scheduler.protocol import DataProto

    engines = [FakeEngine(engine_id=EngineId(f"e{n}"), vocab_size=100, token_s=0.05, max_running=2) for n in range(2)]
    site = make_site(*engines)
    rewards = Rewards()
    scheduler = make_scheduler(model, site.url, rewards, ratio)
    await scheduler.initialize()
    settings = {**SETTINGS, "max_new_tokens": ANSWER, "num_return_sequences": SAMPLES}
    for step in range(2):
        meta = {"generation_config": dict(settings), "global_step": step, "collect_unfinished": ratio > 0}
        batch = await asyncio.wait_for(scheduler.get_batch(DataProto(meta_info=meta), step, 2), 60)
        await asyncio.sleep(0.3)  # prompts of the next step are under way now, if there may be any
        await scheduler.pause_sampling()
        batch.prefetch()
        check(batch)
    resumed = [one.meta_info.get("metrics", {}).get("rose/num_resumed_tokens", 0) for one in rewards.seen]
    assert (max(resumed) > 0) == (ratio > 0)
    budgets = {len(one.prompt_ids) + one.sampling.max_tokens for engine in engines for one in engine.requests}
    assert budgets == {3 + ANSWER}, "one budget a sample, over all its parts"
    await scheduler.shutdown()


def check(batch: Any) -> None:
    tensors = batch.batch
    assert tensors["responses"].shape == (2 * SAMPLES, ANSWER)
    assert tensors["infer_logprobs"].shape == (2 * SAMPLES, PROMPT + ANSWER - 1)
    assert tensors["infer_logprobs"].dtype == torch.float32
    drawn = tensors["response_mask"][:, 1:].bool()
    assert (tensors["infer_logprobs"][drawn] < 0).all()
    assert (tensors["infer_logprobs"][~drawn] == 0).all()
    assert len(batch.non_tensor_batch["rose_spans"]) == 2 * SAMPLES
