"""What the learner asks of a training framework: one object a rank. Loads torch; for learner processes.

Invariants: the optimizer steps float32 masters, of which a rank holds its own part; ``collect_gradients`` comes between the
last backward pass and the step, ``refresh`` after anything changed the masters; what differs from rank to rank in the data is
told by ``data_rank`` alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from rose import registry
from rose.interfaces import Trainer
from rose.reference.learner_config import LearnerConfig
from rose.reference.policy import build_policy, token_logprobs


class ModelSide(ABC):
    """The model on one rank.

    Attributes:
        architecture: The Hugging Face configuration of the policy.
        data_group: The ranks that see different data and share their gradients; ``None`` stands for all.
        data_rank: This rank's number among them.
        num_data_ranks: How many they are; gradients are averaged over them.
    """

    architecture: Any
    data_group: Any = None
    data_rank: int
    num_data_ranks: int

    @abstractmethod
    def masters(self) -> list[torch.Tensor]:
        """Return this rank's masters, always the same tensors, in a fixed order."""

    @abstractmethod
    def token_logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, tokens]``: log-prob of each token given those before it, with a gradient."""

    @abstractmethod
    def collect_gradients(self) -> None:
        """Make the masters' ``grad`` the average over the data ranks of what the backward passes added up."""

    @abstractmethod
    def clip_gradients(self, max_norm: float) -> float:
        """Clip the masters' gradients to a global norm; returns the norm before."""

    @abstractmethod
    def refresh(self) -> None:
        """Compute with the masters as they are now, from no gradients."""

    @abstractmethod
    def trainer(self) -> Trainer:
        """Return this rank as a source of weights."""

    @abstractmethod
    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Return the whole model in checkpoint names, gathered. A collective."""


class FsdpSide(ModelSide):
    """The policy of transformers, sharded by FSDP2: every rank sees its own data."""

    def __init__(self, config: LearnerConfig, num_ids: int) -> None:
        self.data_rank, self.num_data_ranks = distributed.get_rank(), distributed.get_world_size()
        self._model = build_policy(config.policy, num_ids=num_ids, seed=config.seed)
        self.architecture = self._model.config
        mesh = init_device_mesh("cpu", (self.num_data_ranks,))
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, config.compute_dtype), reduce_dtype=torch.float32)
        for layer in self._model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(self._model, mesh=mesh, mp_policy=policy)
        self._parameters = list(self._model.parameters())

    def masters(self) -> list[torch.Tensor]:
        """Return the sharded parameters."""
        return self._parameters

    def token_logprobs(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the log-probs of the model's own forward pass."""
        return token_logprobs(self._logits, ids)

    def collect_gradients(self) -> None:
        """Do nothing: a backward pass reduces."""

    def clip_gradients(self, max_norm: float) -> float:
        """Clip over all shards."""
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, max_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def refresh(self) -> None:
        """Drop the gradients: the masters are the model's parameters."""
        self._model.zero_grad()

    def trainer(self) -> Trainer:
        """Return the FSDP2 trainer."""
        return registry.trainer("fsdp", self._model)

    def whole_weights(self) -> dict[str, torch.Tensor]:
        """Gather every parameter."""
        with torch.no_grad():
            return {
                name: parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter.detach()
                for name, parameter in self._model.named_parameters()
            }

    def _logits(self, ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._model(input_ids=ids, use_cache=False).logits
        return logits


def make_side(config: LearnerConfig, num_ids: int) -> ModelSide:
    """Return the model side that ``config.trainer`` names. The process group must be up."""
    if config.trainer == "megatron":
        from rose.reference.megatron_side import MegatronSide  # noqa: PLC0415 - only those who train with it have it

        return MegatronSide(config, num_ids)
    return FsdpSide(config, num_ids)
