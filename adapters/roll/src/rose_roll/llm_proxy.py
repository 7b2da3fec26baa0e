"""The llm proxy "rose": one turn of one environment goes straight to the pool, past ROLL's router and its workers.

Invariants:

* A turn ends as a batch of exactly the fields of ROLL's policy proxy, or as ``None``, by which ROLL asks the same turn anew.
* Tokens that an interrupted turn has are kept: asked anew with the same prompt it goes on from them, within one budget.
* An error that asking again may mend is never raised before ``give_up_s`` without a new token; any other is raised at once.

``lm_output.meta_info["rose"]`` says which versions made which tokens, how often the turn moved, and how much was resumed.
"""

from __future__ import annotations

import time
from typing import Any

import attrs
from roll.distributed.scheduler.protocol import DataProto
from roll.pipeline.agentic.llm_proxy import BaseLLMProxy, register_llm_proxy
from tensordict import TensorDict

from rose.errors import ConfigError
from rose.types import FinishReason, TurnResult
from rose_roll.connection import new_request_id, shared_connection
from rose_roll.desk import Request
from rose_roll.fields import check_room, sequence_tensors, unpadded
from rose_roll.options import RoseOptions
from rose_roll.partials import NOTHING, Partials
from rose_roll.patience import MENDABLE, Patience
from rose_roll.sampling import count_sequences, to_sampling
from rose_roll.trajectories import Trajectories
from rose_roll.versions import spans_of


@attrs.frozen(kw_only=True)
class TrajectoryName:
    """What a trajectory and its group are called in the pool."""

    trajectory_id: str
    group_id: str


@register_llm_proxy("rose")
class RoseProxy(BaseLLMProxy):
    """One environment's way to the pool. ``llm_proxy.proxy_config`` has its options, see ``RoseOptions``.

    Attributes:
        trajectory: Who asks next, set by ``RoseTrajEnvManager``; without it a turn belongs to the trajectory that its prompt goes on with.
    """

    def __init__(self, generate_scheduler: Any, llm_proxy_config: Any, tokenizer: Any, env: Any) -> None:
        super().__init__(generate_scheduler, llm_proxy_config, tokenizer, env)
        self._options = RoseOptions.of(dict(llm_proxy_config.proxy_config or {}))
        self._connection = shared_connection(self._options)
        is_gated = generate_scheduler is not None and self._options.on_suspend == "abort"
        self._gate = self._connection.gate(generate_scheduler, self._options.poll_s) if is_gated else None
        self._partials = Partials(max_trajectories=16)
        self._known = Trajectories(prefix=new_request_id(), max_sequences=64)
        self._patience = Patience(self._options.give_up_s)
        self.trajectory: TrajectoryName | None = None

    def begin_step(self, step: int) -> None:
        """Note that ROLL begins a step: turns from now on want the weights that the pool has now."""
        self._connection.begin_step(step)

    def generate(
        self,
        messages: list[dict[str, str]],  # noqa: ARG002 - ROLL's signature
        lm_input: DataProto,
        generation_config: dict[str, Any],
    ) -> DataProto | None:
        """Run one turn.

        Args:
            messages: Not looked at: the tokens are what counts.
            lm_input: ``input_ids`` and ``attention_mask`` of one prompt, left-padded.
            generation_config: ``GeneratingArguments.to_dict()``.

        Returns:
            The batch, or ``None``: ask the same turn anew.

        Raises:
            ConfigError: A setting cannot be kept, the prompt leaves no room in the engines' context, or it is not of tokens alone.
            RoseError: The turn failed for good.
        """
        lm_input.meta_info.pop("src_rank", None)
        lm_input.meta_info["pad_to_seq_len"] = False
        request = self._request(lm_input, generation_config)
        done = self._partials.take(request.trajectory_id, request.prompt_ids)
        result = self._run(request, done)
        if result is None or result.finish_reason in (FinishReason.ABORTED, FinishReason.EVICTED):
            self._keep(request, result or NOTHING)
            return None
        check_room(request.prompt_ids, result, setting="sequence_length")
        self._known.end(request.trajectory_id, request.prompt_ids + result.token_ids)
        return self._output(lm_input, request, result, num_resumed=len(done.token_ids))

    def _request(self, lm_input: DataProto, generation_config: dict[str, Any]) -> Request:
        if "multi_modal_data" in lm_input.non_tensor_batch:
            message = "multi_modal_data: a ROSE pool takes token ids only; use ROLL's own proxy for images and videos"
            raise ConfigError(message)
        if count_sequences(generation_config) != 1 or lm_input.batch["input_ids"].shape[0] != 1:
            message = (
                f"num_return_sequences: {count_sequences(generation_config)}: one turn is one sequence; set it to 1"
            )
            raise ConfigError(message)
        config = {"eos_token_id": [self.tokenizer.eos_token_id, self.tokenizer.pad_token_id], **generation_config}
        prompt_ids = unpadded(lm_input.batch["input_ids"], lm_input.batch["attention_mask"])
        name = self.trajectory
        if name is None:
            found = self._known.find(prompt_ids)
            name = TrajectoryName(trajectory_id=found, group_id=found)
        return Request(
            request_id=new_request_id(),
            trajectory_id=name.trajectory_id,
            group_id=name.group_id,
            prompt_ids=prompt_ids,
            sampling=to_sampling(config, encode=self._encode),
        )

    def _run(self, request: Request, done: TurnResult) -> TurnResult | None:
        """Run it behind ROLL's gate, where there is one. ``None``: ROLL shuts down."""
        if self._gate is not None and not self._gate.enter(request.request_id):
            return None
        try:
            result = self._connection.run(request, done, self._gate)
        except MENDABLE as error:
            done = self._patience.mend(error, done)
        else:
            self._patience.reset()
            return result
        finally:
            if self._gate is not None:
                self._gate.leave(request.request_id)
        time.sleep(self._options.retry_s)
        return done

    def _keep(self, request: Request, done: TurnResult) -> None:
        self._partials.keep(request.trajectory_id, request.prompt_ids, done)
        if self.trajectory is None:
            self._known.end(request.trajectory_id, request.prompt_ids)

    def _output(self, lm_input: DataProto, request: Request, result: TurnResult, *, num_resumed: int) -> DataProto:
        batch = sequence_tensors(
            lm_input.batch["input_ids"],
            lm_input.batch["attention_mask"],
            result,
            pad_token_id=self.tokenizer.pad_token_id,
            has_logprobs=request.sampling.logprobs,
        )
        output = DataProto(batch=TensorDict(batch, batch_size=1))
        output.non_tensor_batch = dict(lm_input.non_tensor_batch)
        output.meta_info = dict(lm_input.meta_info)
        output.meta_info.pop("generation_config", None)
        output.meta_info["rose"] = {
            "spans": spans_of(result, self._connection.versions),
            "num_hops": len(result.hops),
            "num_resumed_tokens": num_resumed,
            "is_truncated": result.finish_reason is FinishReason.LENGTH,
        }
        return output

    def _encode(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
