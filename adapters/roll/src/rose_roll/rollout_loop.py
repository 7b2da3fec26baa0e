"""RLVR's rollout loop on a pool: ROLL's own loop, whose requests go to the pool instead of ROLL's router.

Life cycle of one request:

1. [loop] ``on_send_request``: waits while ROLL samples nothing (suspended); false once it shuts down.
2. [loop] runs the turn on the pool.
3. [ROLL] ``pause_sampling`` suspends, cancels prompts that are out of date, aborts the rest, and waits for ``on_request_routed``.
4. [loop] an aborted request keeps its tokens, says ``on_request_routed``, and goes back to 1: it resumes where it was, in the same
   request of ROLL's. Only an abort that the user's own loop asked for comes back as "abort".

Invariants: a request returns whole, or aborted by its own loop, or ``None`` at the shutdown; nothing that was drawn is drawn again; the
budget of new tokens holds over all parts.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from roll.distributed.scheduler.protocol import DataProto
from roll.distributed.scheduler.user_defined_rollout_loop import UserDefinedRolloutLoop

from rose.errors import ConfigError
from rose.types import FinishReason, TurnResult
from rose_roll.connection import LoopConnection
from rose_roll.desk import Desk, Request
from rose_roll.fields import check_room, object_array, response_payload, unpadded
from rose_roll.options import ENVIRONMENT, RoseOptions
from rose_roll.partials import NOTHING
from rose_roll.patience import Patience
from rose_roll.sampling import count_sequences, to_sampling
from rose_roll.versions import ends_of, spans_of


class RoseRolloutLoop(UserDefinedRolloutLoop):
    """``user_defined_rollout_loop_cls``: ROLL's loop, filters and rewards, with every sequence on the pool as a request of its own.

    Samples have ``rose_versions`` and ``rose_spans`` in ``non_tensor_batch``; spans count from the first new token.
    """

    def __init__(self) -> None:
        super().__init__()
        self._client: PoolRouterClient | None = None

    async def process_new_prompt(self, context: Any) -> Any:
        """Run a prompt as ROLL's loop does."""
        scheduler = context._scheduler  # noqa: SLF001 - a loop has no other way to its router
        if self._client is None:
            self._client = PoolRouterClient.over(scheduler)
        scheduler.router_client = self._client
        context.is_num_return_sequences_expand = True
        return await super().process_new_prompt(context)


class PoolRouter:
    """Stands before a router of ROLL's: aborts reach the pool's requests, all else the router.

    Args:
        under: ROLL's router.
        client: Who has the requests.
    """

    def __init__(self, under: Any, client: PoolRouterClient) -> None:
        self._under = under
        self._client = client

    async def abort_requests(self, request_ids: Sequence[str], uid: Any) -> None:
        """End what the user's loop wants ended."""
        others = self._client.abort(request_ids, is_by_loop=True)
        if others:
            await self._under.abort_requests(others, uid)

    async def abort_all(self, request_ids: Sequence[str]) -> None:
        """Stop everything, because ROLL suspends."""
        others = self._client.abort(request_ids, is_by_loop=False)
        await self._under.abort_all(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._under, name)


class PoolRouterClient:
    """What a rollout context asks for a response, in place of ROLL's router client.

    Args:
        connection: The pool.
        scheduler: Whose requests they are.
    """

    def __init__(self, connection: LoopConnection, scheduler: Any) -> None:
        self._connection = connection
        self._options = connection.options
        self._scheduler = scheduler
        self._manager = scheduler.router_manager
        self._eos_ids = [scheduler.tokenizer.eos_token_id, scheduler.tokenizer.pad_token_id]
        self._desk: Desk | None = None
        self._own: set[str] = set()
        self._by_loop: set[str] = set()  # whose abort the user's loop asked for; all others are ROLL's, and are resumed
        self._step: int | None = None

    @classmethod
    def over(cls, scheduler: Any) -> PoolRouterClient:
        """Make one for a scheduler, and put it before its router.

        Raises:
            ConfigError: Nobody said where the pool is.
        """
        envs = getattr(scheduler.pipeline_config, "system_envs", None) or {}
        environ = {**os.environ, **{name: str(envs[name]) for name in ENVIRONMENT if name in envs}}
        client = cls(LoopConnection(RoseOptions.of(environ=environ), environ=environ), scheduler)
        scheduler.router_manager.router = PoolRouter(scheduler.router_manager.router, client)
        return client

    async def generate_request(self, req: DataProto, request_id: str, uid: Any) -> DataProto | None:
        """Run one sequence to its end, over all of ROLL's pauses.

        Args:
            req: The prompt, left-padded, and ``generation_config``.
            request_id: ROLL's id.
            uid: The prompt's id; samples of one prompt are a group.

        Returns:
            What ROLL's router client returns, ``None`` at the shutdown.

        Raises:
            ConfigError: A setting cannot be kept.
            RoseError: The turn failed for good.
        """
        request = self._request(req, str(request_id), uid)
        self._own.add(request.request_id)
        try:
            return await self._parts(req, request)
        finally:
            self._own.discard(request.request_id)
            self._by_loop.discard(request.request_id)

    async def _parts(self, req: DataProto, request: Request) -> DataProto | None:
        done = NOTHING
        while True:
            if not await self._manager.on_send_request(request.request_id):
                return None
            result = done
            try:
                desk = await self._current_desk()
                is_aborted = self._manager.need_suspend or request.request_id in self._by_loop
                if not is_aborted:  # it may have come meanwhile, and found nothing to abort
                    result = await desk.run(request, done=done, patience=Patience(self._options.give_up_s))
            finally:
                await self._manager.on_request_routed(request.request_id)
            is_by_loop = request.request_id in self._by_loop
            if result.finish_reason not in (FinishReason.ABORTED, FinishReason.EVICTED) or is_by_loop:
                return self._response(req, request, result, num_resumed=len(done.token_ids))
            done = result

    def abort(self, request_ids: Sequence[str], *, is_by_loop: bool) -> list[str]:
        """End requests of the pool, also those that wait for ROLL's resume; returns the ids that are none of its."""
        own = [one for one in request_ids if one in self._own]
        if is_by_loop:
            self._by_loop.update(own)
        if self._desk is not None:
            self._desk.abort(own)
        return [one for one in request_ids if one not in self._own]

    async def _current_desk(self) -> Desk:
        desk = self._desk = await self._connection.desk()
        step = self._scheduler.replay_buffer.current_step
        if step != self._step:
            self._step = step
            await desk.begin_step(step)
        return desk

    def _request(self, req: DataProto, request_id: str, uid: Any) -> Request:
        if "multi_modal_data" in req.non_tensor_batch:
            message = "multi_modal_data: a ROSE pool takes token ids only; use ROLL's own loop for images and videos"
            raise ConfigError(message)
        config = dict(req.meta_info["generation_config"])
        if count_sequences(config) != 1:
            message = f"num_return_sequences: {count_sequences(config)} in one request; RoseRolloutLoop expands them"
            raise ConfigError(message)
        limit = req.meta_info.get("max_new_tokens", config["max_new_tokens"])
        config |= {"max_new_tokens": min(limit, config["max_new_tokens"]), "eos_token_id": self._eos_ids}
        return Request(
            request_id=request_id,
            trajectory_id=request_id,
            group_id=f"prompt-{uid}",
            prompt_ids=unpadded(req.batch["input_ids"], req.batch["attention_mask"]),
            sampling=to_sampling(config, encode=self._encode),
        )

    def _response(self, req: DataProto, request: Request, result: TurnResult, *, num_resumed: int) -> DataProto:
        assert self._desk is not None  # noqa: S101 - it has run the request
        check_room(request.prompt_ids, result, setting="prompt_length + response_length")
        spans = spans_of(result, self._desk.versions)
        req.non_tensor_batch["rose_versions"] = object_array([ends_of(spans)])
        req.non_tensor_batch["rose_spans"] = object_array([spans])
        output = DataProto(meta_info=req.meta_info)
        output.meta_info.update(response_payload([result], has_logprobs=request.sampling.logprobs))
        output.meta_info.update(routed_experts=None, eos_token_id=self._eos_ids, pad_token_id=self._eos_ids[1])
        output.meta_info.setdefault("metrics", {}).update(
            {"rose/num_hops": float(len(result.hops)), "rose/num_resumed_tokens": float(num_resumed)}
        )
        return output

    def _encode(self, text: str) -> list[int]:
        return list(self._scheduler.tokenizer(text, add_special_tokens=False)["input_ids"])
