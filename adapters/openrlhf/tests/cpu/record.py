"""For tests: writes what the trainer has, by its own hands, to a folder: its weights after each sync, and its experience.

``weights-N.pt`` is written after the N-th sync returned, and the trainer goes on when ``weights-N.seen`` is there: meanwhile a test compares engines.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path
from typing import Any

import torch

_SEEN_S = 120.0
_numbers = itertools.count()
_batches = itertools.count()


def watch(module: Any) -> None:
    """Put a recorder around what the module does."""
    if hasattr(module, "ActorPPOTrainer"):
        _watch_syncs(module.ActorPPOTrainer)
    else:
        _watch_experience(module.RemoteExperienceMaker)


def _folder() -> Path:
    return Path(os.environ["ROSE_TEST_RECORD"])


def _write(name: str, value: Any) -> None:
    path = _folder() / name
    torch.save(value, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _watch_syncs(trainer: Any) -> None:
    broadcast = trainer.broadcast_to_vllm

    def broadcast_to_vllm(self: Any) -> None:
        broadcast(self)
        if torch.distributed.get_rank() != 0:
            return
        number = next(_numbers)
        _write(
            f"weights-{number}.pt",
            {name: value.data.clone() for name, value in self.actor.model.module.named_parameters()},
        )
        give_up_s = time.monotonic() + _SEEN_S
        while not (_folder() / f"weights-{number}.seen").exists() and time.monotonic() < give_up_s:
            time.sleep(0.05)

    trainer.broadcast_to_vllm = broadcast_to_vllm


def _watch_experience(maker: Any) -> None:
    make = maker.make_experience

    def make_experience(self: Any, samples_list: list[Any]) -> list[Any]:
        made = make(self, samples_list)
        names = (
            "sequences",
            "attention_mask",
            "action_mask",
            "rollout_log_probs",
            "action_log_probs",
            "rewards",
            "truncated",
            "total_length",
            "prompts",
            "labels",
            "info",
        )
        _write(f"experience-{next(_batches)}.pt", [{name: getattr(one, name) for name in names} for one in made])
        return made

    maker.make_experience = make_experience
