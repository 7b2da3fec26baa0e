"""OpenRLHF alone, with engines that run on a CPU and fail on command: the other side of ``faults.py``.

The actors are OpenRLHF's own class ``RolloutRayActor``; nothing of ROSE is in the process. What is a double: the ``AsyncLLMEngine`` inside, which is a Hugging
Face model here, since OpenRLHF's vLLM needs a GPU. It has the methods that the actor calls, and ``$FAULT`` makes that of engine 1 fail once the first sync came.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import sys
from types import SimpleNamespace
from typing import Any

import ray
import torch

from rose_openrlhf import workers

workers.set_up()

import openrlhf.trainer.ray as package
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor, SingleTurnAgentExecutor
from openrlhf.utils.distributed_util import stateless_init_process_group

Base: Any = RolloutRayActor.__ray_metadata__.modified_class


class HfEngine:
    """What ``AsyncLLMEngine`` is to the actor."""

    def __init__(self, path: str, fault: str | None) -> None:
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self.model = AutoModelForCausalLM.from_pretrained(
            path, attn_implementation="eager", dtype=torch.bfloat16
        ).eval()
        self.fault, self.num_syncs, self.num_open = fault, 0, 0
        self.output_processor = SimpleNamespace(get_num_unfinished_requests=lambda: self.num_open)

    @property
    def is_due(self) -> bool:
        """Whether the fault happens now."""
        return self.num_syncs >= 1

    async def generate(self, prompt: Any, params: Any, request_id: str) -> Any:
        """Yield one output, as vLLM's engine does in the end."""
        del request_id
        self.num_open += 1
        try:
            if self.is_due and self.fault == "fails fast":
                raise RuntimeError("the engine is dead")
            while self.is_due and self.fault == "hangs":
                await asyncio.sleep(1)
            yield await self._answer(list(prompt["prompt_token_ids"]), params)
        finally:
            self.num_open -= 1

    @torch.no_grad()
    async def _answer(self, ids: list[int], params: Any) -> Any:
        made, logprobs, reason = [], [], "length"
        for number in range(params.max_tokens):
            if self.is_due and self.fault == "dies in mid-turn" and number == 4:
                os._exit(1)
            row = torch.log_softmax(
                self.model(torch.tensor([ids + made])).logits[0, -1].float() / params.temperature, -1
            )
            made.append(int(torch.multinomial(row.exp(), 1)))
            logprobs.append({made[-1]: SimpleNamespace(logprob=float(row[made[-1]]))})
            if made[-1] == self.model.config.eos_token_id:
                reason = "stop"
                break
            await asyncio.sleep(0)
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=made, text="", logprobs=logprobs, finish_reason=reason)]
        )

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> None:
        """Do what OpenRLHF's worker extension does."""
        await asyncio.to_thread(getattr(self, f"_{method}"), *args)

    def _init_process_group(self, address: str, port: int, rank: int, world_size: int, *_: Any) -> None:
        self.group = stateless_init_process_group(address, port, rank, world_size, torch.device("cpu"))

    def _update_weight(self, name: str, dtype: Any, shape: Any, is_last: bool) -> None:
        weight = torch.empty(tuple(shape), dtype=dtype)
        self.group.broadcast(weight, src=0, stream=None)
        if self.is_due and self.fault == "fails an update":
            raise RuntimeError("the engine cannot load the weights")
        self.model.get_parameter(name).data.copy_(weight)
        self.num_syncs += is_last


class Engine(Base):
    """OpenRLHF's actor over that engine."""

    async def __init__(self, path: str, remote_rm_url: Any, fault: str | None) -> None:
        self.executor, self.llm, self._mm_pad_token_ids = (
            SingleTurnAgentExecutor(remote_rm_url),
            HfEngine(path, fault),
            set(),
        )


def create_vllm_engines(
    num_engines: int, _: int, pretrain: str, *__: Any, remote_rm_url: Any = None, **___: Any
) -> list[Any]:
    """Start them."""
    actor = ray.remote(alone.Engine).options(num_cpus=0)
    return [
        actor.remote(pretrain, remote_rm_url, os.environ.get("FAULT") if number == 1 else None)
        for number in range(num_engines)
    ]


if __name__ == "__main__":
    import alone  # this file as a module, so that workers find the classes

    from rose_openrlhf.flags import Options
    from rose_openrlhf.launcher import with_setup

    ray.init = with_setup(ray.init, Options())
    alone.alone = alone
    package.create_vllm_engines = alone.create_vllm_engines
    sys.argv[0] = "openrlhf.cli.train_ppo_ray"
    runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
