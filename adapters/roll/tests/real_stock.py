"""Infer workers as ROLL alone has them, with scripted engines: what its vLLM strategy would answer, after as long as its tokens take."""

from __future__ import annotations

import asyncio
import os
from typing import Any

import real_tools  # noqa: F401 - makes ROLL importable
import torch
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.pipeline.base_worker import InferWorker
from roll.utils.collective import collective

TOKEN_S = 0.01


class Answers:
    """What a router asks of a worker; with a fault, if one is wanted."""

    def __init__(self, fault: str | None) -> None:
        self._fault = fault

    async def generate_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        if self._fault == "fails fast":
            message = "engine core died"
            raise RuntimeError(message)
        await asyncio.sleep(3 * TOKEN_S)
        if self._fault == "dies in mid-turn":
            os._exit(1)
        if self._fault == "hangs":
            await asyncio.Event().wait()
        num = payload["sampling_params"]["max_tokens"]
        await asyncio.sleep(num * TOKEN_S)
        return {"finish_reasons": ["length"], "output_token_ids": [[50] * num], "output_logprobs": [[-1.0] * num]}

    async def abort_requests(self, request_ids: list[str]) -> None:
        """There is nothing that could be aborted in time."""


class RefusingWorker(Answers, InferWorker):
    """Takes part in ROLL's broadcasts, as its vLLM workers do; the first of a cluster fails its second update once all is received."""

    def __init__(self, worker_config: Any) -> None:
        InferWorker.__init__(self, worker_config)
        self._fault, self._num_updates = None, 0

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def initialize(self, pipeline_config: Any) -> None:
        Worker.initialize(self, pipeline_config)

    async def setup_collective_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str
    ) -> None:
        await asyncio.to_thread(
            collective.init_collective_group,
            world_size,
            rank=rank_offset,
            backend="gloo",
            group_name=group_name,
            master_addr=master_address,
            master_port=master_port,
        )

    async def broadcast_parameter(
        self, names: list[str], dtypes: list[Any], shapes: list[Any], group_name: str, **_: Any
    ) -> None:
        del names
        await asyncio.to_thread(_receive, dtypes, shapes, group_name)
        if self.rank == 0 and self._num_updates == 1:
            message = "no room for the weights"
            raise RuntimeError(message)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def load_states(self, *_: Any, **__: Any) -> None:
        self._num_updates += 1


def _receive(dtypes: list[Any], shapes: list[Any], group_name: str) -> None:
    handles = []
    for dtype, shape in zip(dtypes, shapes, strict=True):
        tensor = torch.empty(tuple(shape), dtype=dtype)
        handles.append(collective.broadcast(tensor=tensor, src_rank=0, group_name=group_name, async_op=True))
    for handle in handles:
        handle.wait()
