"""The policy as a Megatron-Core model, cut by tensor parallelism over all ranks of the learner.

Invariants: parameters are the masters cast to the compute dtype, as Megatron's own mixed-precision optimizer has it; gradients
add up in float32; the start is the same as under any other side, since it is loaded from the same seeded policy.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.distributed.finalize_model_grads import finalize_model_grads
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    param_is_not_tensor_parallel_duplicate,
)
from torch import distributed

from rose import registry
from rose.backends.megatron import MegatronTrainer
from rose.backends.megatron.cpu import causal_mask, cpu_megatron, make_gpt
from rose.interfaces import Trainer
from rose.reference.learner_config import LearnerConfig
from rose.reference.model_side import ModelSide
from rose.reference.policy import build_policy, token_logprobs

_FAMILY = "qwen3"


class MegatronSide(ModelSide):
    """Every rank sees all the data and holds its part of each matrix."""

    def __init__(self, config: LearnerConfig, num_ids: int) -> None:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=distributed.get_world_size())
        cpu_megatron()
        self.data_group = parallel_state.get_data_parallel_group()
        self.data_rank = parallel_state.get_data_parallel_rank()
        self.num_data_ranks = parallel_state.get_data_parallel_world_size()
        start = build_policy(config.policy, num_ids=num_ids, seed=config.seed)
        self.architecture, self._num_ids = start.config, num_ids
        model = make_gpt(start.config.to_dict(), dtype=torch.float32)
        MegatronTrainer(model, family=_FAMILY, vocab_size=num_ids).load_weights(start.state_dict())
        parameters = list(model.parameters())
        self._masters = [parameter.detach().clone() for parameter in parameters]
        self._model = _wrap(model, getattr(torch, config.compute_dtype))
        self._parameters = parameters
        self._is_counted = [param_is_not_tensor_parallel_duplicate(parameter) for parameter in parameters]

    def masters(self) -> list[torch.Tensor]:
        """Return the float32 copies."""
        return self._masters

    def token_logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probs over the real vocabulary: padding takes no part in the softmax."""
        return token_logprobs(self._logits, ids)

    def collect_gradients(self) -> None:
        """Reduce over the data ranks, and over all ranks for what each holds whole but uses in part."""
        finalize_model_grads([self._model])
        for master, parameter in zip(self._masters, self._parameters, strict=True):
            master.grad = parameter.main_grad.float()

    def clip_gradients(self, max_norm: float) -> float:
        """Clip by the norm over all ranks; what is held everywhere counts once."""
        counted = [m.grad for m, is_counted in zip(self._masters, self._is_counted, strict=True) if is_counted]
        squares = torch.stack([gradient.double().square().sum() for gradient in counted if gradient is not None]).sum()
        distributed.all_reduce(squares, group=parallel_state.get_model_parallel_group())
        norm = float(squares.sqrt())
        if norm > max_norm:
            for master in self._masters:
                if master.grad is not None:
                    master.grad.mul_(max_norm / norm)
        return norm

    def refresh(self) -> None:
        """Cast the masters into the model."""
        with torch.no_grad():
            for master, parameter in zip(self._masters, self._parameters, strict=True):
                parameter.copy_(master)
        self._model.zero_grad_buffer()

    def trainer(self) -> Trainer:
        """Return the Megatron trainer."""
        return registry.trainer("megatron", self._model, family=_FAMILY, vocab_size=self._num_ids)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Add up the ranks' boxes of bits, each in a whole tensor of zeros: exact."""
        trainer = self.trainer()
        layout, shards, whole = trainer.layout(), trainer.shards(), {}
        for name, spec in trainer.tensors().items():
            bits = torch.zeros(spec.shape, dtype=torch.int32)
            if name in layout:
                box = layout[name]
                index = tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
                held = shards[name][tuple(slice(0, size) for size in box.shape)]
                bits[index] = torch.from_numpy(held.astype("int32"))
            distributed.all_reduce(bits)
            whole[name] = bits.to(torch.uint16).view(torch.bfloat16)
        return whole

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1]).expand_as(ids)
        local = self._model(input_ids=ids, position_ids=positions, attention_mask=causal_mask(ids))
        logits: torch.Tensor = gather_from_tensor_model_parallel_region(local)
        return logits[..., : self._num_ids]


def _wrap(model: Any, dtype: torch.dtype) -> Any:
    """Return the model in its compute dtype, behind Megatron's gradient buffers in float32."""
    model.to(dtype)
    model.config.bf16 = dtype is torch.bfloat16
    model.config.params_dtype = dtype
    options = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=False, use_distributed_optimizer=False
    )
    return DistributedDataParallel(model.config, options, model)
