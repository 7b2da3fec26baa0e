"""The trainers' side of ``rose`` in synchronous and colocated modes, where veRL hands weights over in the trainers' own processes."""

from __future__ import annotations

import os
from typing import Any

from verl.workers.rollout.base import BaseRollout

from rose.errors import ConfigError
from rose_verl.plugin import refuse_if_broken
from rose_verl.settings import get
from rose_verl.weights import push_weights


class RoseRollout(BaseRollout):  # type: ignore[misc] # veRL is untyped here
    """Publishes weights. Arguments as of ``BaseRollout``."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, replica_rank: int = -1, **_: Any) -> None:
        refuse_if_broken()
        super().__init__(config, model_config, device_mesh)
        rank = int(os.environ.get("RANK", "0"))
        world_size = (
            self.config.tensor_model_parallel_size
            * self.config.data_parallel_size
            * self.config.pipeline_model_parallel_size
        )
        self.replica_rank = rank // world_size if replica_rank == -1 else replica_rank
        self.is_leader_rank = rank % world_size == 0
        self.sleep_level = 2

    async def resume(self, tags: list[str]) -> None:
        """Do nothing: rollouts hold no memory of this device."""

    async def release(self) -> None:
        """Do nothing, for the same reason."""

    async def update_weights(
        self,
        weights: Any,
        wire_format: str = "named_tensors",
        global_steps: int | None = None,
        peft_config: Any = None,
        **_: Any,
    ) -> None:
        """Publish this rank's weights as those of a step; every rank is called.

        Raises:
            ConfigError: They are an adapter's, or changes in a form of veRL's own.
            RoseError: They could not be published. Engines that do not take them are no error.
        """
        if peft_config is not None:
            message = "engines of a pool take whole weights, no adapters; set actor_rollout_ref.model.lora.merge=True"
            raise ConfigError(message)
        if wire_format != "named_tensors":
            message = f"weights came as {wire_format}; a pool finds changes itself: set checkpoint_engine.backend=rose"
            raise ConfigError(message)
        is_tied = bool(get(self.model_config, "hf_config.tie_word_embeddings"))
        await push_weights(weights, global_steps, is_tied=is_tied)
