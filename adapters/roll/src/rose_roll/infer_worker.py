"""The infer worker: what ROLL's router takes for an engine is a front to the whole pool.

It makes no strategy, loads no model and holds no GPU memory. ROLL's closed list of strategies still wants a name, which is never
made: ``actor_infer.strategy_args.strategy_name: vllm``.

Invariants:

* The front has no state that a turn or an update of shards needs: Ray starts it again when it dies, and calls that were under way are made again.
* An aborted request ends as ROLL expects: with the tokens that it has, ``finish_reasons`` "abort"; never with an error.
* Weights that ROLL broadcasts in full are published when ROLL says that all are there, which is the next ``load_states``.

Broadcasts need this process to stay: a front that died during one fails that update, as any of ROLL's own workers does. Train
workers of ``rose_roll`` publish shards and do not come by here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import ray
from roll.distributed.executor.worker import Worker
from roll.distributed.scheduler.decorator import Dispatch, register
from roll.distributed.scheduler.protocol import DataProto
from roll.models.model_providers import default_tokenizer_provider
from roll.pipeline.base_worker import InferWorker

from rose.errors import ConfigError
from rose.types import TurnResult
from rose_roll.connection import LoopConnection
from rose_roll.desk import Desk, Request
from rose_roll.fields import check_room, response_payload
from rose_roll.full_weights import FullWeights
from rose_roll.launch import launch_name
from rose_roll.options import RoseOptions, wire_dtype
from rose_roll.patience import Patience
from rose_roll.sampling import count_sequences, to_sampling
from rose_roll.trajectories import Trajectories
from rose_roll.versions import spans_of

_MAX_RESTARTS = -1
_MAX_RETRIES = -1


class RoseFront(InferWorker):
    """A worker of ROLL that runs requests on a ROSE pool. Configure ``RoseInferWorker``, which Ray starts again."""

    tokenizer: Any

    def __init__(self, worker_config: Any) -> None:
        super().__init__(worker_config=worker_config)
        self._options = RoseOptions.of()
        self._connection = LoopConnection(self._options)
        self._known = Trajectories(prefix=f"{self.cluster_name}-{self.rank}")
        self._weights: FullWeights | None = None
        self._making = asyncio.Lock()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def initialize(self, pipeline_config: Any) -> None:
        """Check what was configured, and that the pool answers.

        Raises:
            ConfigError: A setting cannot be kept, or nobody said where the pool is.
            TransportError: Nothing answers there.
        """
        Worker.initialize(self, pipeline_config)
        if self.worker_config.model_args.lora_target is not None:
            self._refuse_lora()
        if self.worker_config.num_gpus_per_worker > 1:
            message = (
                "actor_infer: a front is one process; set tensor_parallel_size: 1 (the pool's engines have their own)"
            )
            raise ConfigError(message)
        place = self._options.place()
        await asyncio.to_thread(place.check)
        self.logger.info("%s is a front to the ROSE pool at %s", self.worker_name, place.url)

    # Turns.

    async def generate_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Run one request of ROLL's router.

        Args:
            payload: ``rid``, ``input_ids``, and ``sampling_params`` as the router makes them for vLLM or SGLang.

        Returns:
            ``finish_reasons``, ``output_token_ids``, ``output_logprobs`` (or ``None``) and ``rose_spans``, one entry a sequence. (ROLL's
            own client passes the last one over.)

        Raises:
            ConfigError: A setting cannot be kept, or the request is not of tokens alone.
            RoseError: The turn failed for good.
        """
        if "multi_modal_data" in payload:
            message = "multi_modal_data: a ROSE pool takes token ids only; use ROLL's own workers for images and videos"
            raise ConfigError(message)
        params = dict(payload["sampling_params"])
        if payload.get("return_logprob") is False:
            params["logprobs"] = None
        sampling, prompt_ids = to_sampling(params, encode=self._encode), tuple(payload["input_ids"])
        names = [self._known.find(prompt_ids) for _ in range(count_sequences(params))]
        requests = [
            Request(
                request_id=f"{payload['rid']}#{number}",
                trajectory_id=name,
                group_id=names[0],
                prompt_ids=prompt_ids,
                sampling=sampling,
            )
            for number, name in enumerate(names)
        ]
        results = await self._run(requests)
        versions = (await self._desk()).versions
        spans = [spans_of(result, versions) for result in results]
        return {**response_payload(results, has_logprobs=sampling.logprobs), "rose_spans": spans}

    async def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End requests; each returns the tokens that it has."""
        wanted = {str(one) for one in request_ids}
        desk = await self._desk()
        desk.abort([one for one in desk.live_ids() if one.rpartition("#")[0] in wanted])

    async def _run(self, requests: Sequence[Request]) -> list[TurnResult]:
        desk = await self._desk()
        try:
            async with asyncio.TaskGroup() as group:
                runs = [desk.run(one, patience=Patience(self._options.give_up_s)) for one in requests]
                tasks = [group.create_task(run) for run in runs]
        except ExceptionGroup as failed:
            first = failed.exceptions[0]  # it ended the others
            raise first from first.__cause__
        results = [task.result() for task in tasks]
        for request, result in zip(requests, results, strict=True):
            check_room(request.prompt_ids, result, setting="sequence_length (or prompt_length + response_length)")
            self._known.end(request.trajectory_id, request.prompt_ids + result.token_ids)
        return results

    async def _desk(self) -> Desk:
        return await self._connection.desk()

    def _encode(self, text: str) -> list[int]:
        if self.tokenizer is None:
            self.tokenizer = default_tokenizer_provider(model_args=self.worker_config.model_args)
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    # States: there is nothing to load or to offload here.

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def load_states(self, *_: Any, **__: Any) -> None:
        """Publish weights that came in full since the last time; otherwise nothing is to be done."""
        await self._publish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def offload_states(self, *_: Any, **__: Any) -> None:
        """Do nothing: the pool's engines go on, and their memory is not ROLL's."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def load_states_partial(self, target_dp_ranks: Sequence[int]) -> None:
        """Do what ``load_states`` does, where this front is meant."""
        if self.rank_info.dp_rank in target_dp_ranks:
            await self._publish()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def offload_states_partial(self, target_dp_ranks: Sequence[int]) -> None:
        """Do nothing."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def process_weights_after_loading(self) -> None:
        """Do what ``load_states`` does."""
        await self._publish()

    # Weights in full, as ROLL's own train workers send them.

    async def setup_collective_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str | None = None,
    ) -> None:
        """Join the group of a train cluster's broadcasts."""
        weights = await self._full_weights()
        await asyncio.to_thread(weights.join, master_address, master_port, rank_offset, world_size, group_name, backend)

    async def broadcast_parameter(
        self,
        names: Sequence[str],
        dtypes: Sequence[Any],
        shapes: Sequence[Any],
        group_name: str,
        is_lora: bool = False,  # noqa: FBT001, FBT002 - ROLL's signature
    ) -> None:
        """Receive one bucket of full tensors."""
        if is_lora:
            self._refuse_lora()
        weights = await self._full_weights()
        await asyncio.to_thread(weights.receive, names, dtypes, shapes, group_name)

    async def update_parameter_in_bucket(
        self,
        serialized_named_tensors: Sequence[Any],
        is_lora: bool = False,  # noqa: FBT001, FBT002 - ROLL's signature
    ) -> None:
        """Take one bucket of full tensors that a train worker on the same device hands over."""
        if is_lora:
            self._refuse_lora()
        weights = await self._full_weights()
        await asyncio.to_thread(weights.take, serialized_named_tensors[0])

    async def add_lora(self, *_: Any, **__: Any) -> None:
        """Refuse.

        Raises:
            ConfigError: Always.
        """
        self._refuse_lora()

    async def _publish(self) -> None:
        if self._weights is not None and self._weights.has_news:
            report = await asyncio.to_thread(self._weights.publish)
            if not report.is_with_nobody:
                (await self._desk()).versions.note(report.version)

    async def _full_weights(self) -> FullWeights:
        async with self._making:
            if self._weights is None:
                run = await asyncio.to_thread(launch_name, self, "full-weights")
                dtype = wire_dtype(self._options, self.worker_config.model_args)
                self._weights = FullWeights(
                    self._options, run=run, rank=self.rank, world_size=self.world_size, dtype=dtype
                )
            return self._weights

    def _refuse_lora(self) -> None:
        message = "lora_target: adapters of LoRA cannot be sent to a ROSE pool; train full weights, or leave actor_infer to ROLL's own workers"
        raise ConfigError(message)

    # What else ROLL asks of an infer worker.

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    def get_metrics(self, metric_names: Sequence[str] | None = None) -> DataProto:
        """Return the pool's figures: engines that take turns, turns under way, versions pushed."""
        status = self._options.place().check()
        snapshot = status["snapshot"]
        ready = sum(engine["state"] == "ready" for engine in snapshot["engines"])
        metrics = {
            "rose/num_engines": float(len(snapshot["engines"])),
            "rose/num_ready_engines": float(ready),
            "rose/num_live_turns": float(snapshot["num_live_turns"]),
            "rose/num_waiting_turns": float(snapshot["num_waiting"]),
        }
        wanted = metrics if metric_names is None else {name: metrics[name] for name in metric_names if name in metrics}
        return DataProto(meta_info={"metrics": wanted})

    @register(dispatch_mode=Dispatch.DP_MP_COMPUTE)
    async def generate(self, data: DataProto) -> DataProto:  # noqa: ARG002 - ROLL's signature
        """Refuse whole batches.

        Raises:
            ConfigError: Always.
        """
        message = "generate_opt_level: 0 asks workers for whole batches; set generate_opt_level: 1"
        raise ConfigError(message)

    def get_url(self) -> str:
        """Refuse: SglangRouter speaks to servers.

        Raises:
            ConfigError: Always.
        """
        message = "router_args.router_name: SglangRouter speaks to SGLang servers; set EnvAffinityRouter or PromptAffinityRouter"
        raise ConfigError(message)


RoseInferWorker = ray.remote(max_restarts=_MAX_RESTARTS, max_task_retries=_MAX_RETRIES)(RoseFront)
