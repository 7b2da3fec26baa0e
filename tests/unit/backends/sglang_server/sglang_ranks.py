"""Ranks of an engine that is not there: real subscribers over small torch models, gathered by threads."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose.backends.memory import MemoryTransport
from rose.backends.sglang_server.rank import RankModel, RankWeights
from rose.backends.sglang_server.weights import EngineWeights
from rose.errors import EngineError
from rose.interfaces.trainer import TensorSpec
from rose.testing.trainer import FakeTrainer
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.types import WeightUpdate, WeightVersion

SPECS = (
    TensorSpec(name="q", shape=(8, 6), dtype="bfloat16"),
    TensorSpec(name="norm", shape=(6,), dtype="bfloat16"),
)
RUN = "unit"
TIMEOUT_S = 20


class Cut(torch.nn.Module):
    """``q`` cut by rows over the ranks, ``norm`` on each."""

    def __init__(self, rank: int, num_ranks: int) -> None:
        super().__init__()
        self.rank, self.num_rows = rank, 8 // num_ranks
        self.q = _parameter(self.num_rows, 6)
        self.norm = _parameter(6)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        for name, tensor in weights:
            part = tensor.narrow(0, self.rank * self.num_rows, self.num_rows) if name == "q" else tensor
            getattr(self, name).data.copy_(part)


class Loop:
    """Notes what a command does to the scheduler."""

    def __init__(self) -> None:
        self.done: list[str] = []

    def label(self, version: str) -> None:
        self.done.append(f"label {version}")

    def part_prefixes(self) -> None:
        self.done.append("part")

    def recompute(self) -> None:
        self.done.append("recompute")

    def synchronize(self) -> None:
        """Nothing computes here."""


class Ranks:
    """An engine of several ranks, and a trainer that publishes to it. It is an ``Http`` as well.

    Args:
        folder: For the checkpoint.
        num_ranks: Ranks of the engine.
    """

    def __init__(self, folder: Path, num_ranks: int = 2) -> None:
        self.trainer = FakeTrainer(specs=SPECS)
        self.transport = MemoryTransport()
        self.transport.serve()
        layout = TargetLayout.tensor_parallel("unit", SPECS, num_ranks=num_ranks, split_dims={"q": 0})
        self.publisher = Publisher(self.trainer, self.transport, run=RUN, targets=[layout])
        self.publisher.publish_sync()
        write_checkpoint(folder, self.trainer.full())
        self.models = [Cut(rank, num_ranks) for rank in range(num_ranks)]
        for model in self.models:
            model.load_weights(iter(self._tensors().items()))
        self.ranks = [
            RankWeights(
                RankModel(
                    module=m, find_checkpoint=lambda: folder, layout_id="unit", is_tied=False, is_from_checkpoint=True
                )
            )
            for m in self.models
        ]
        self.loops = [Loop() for _ in self.models]
        gathers = _gathers(num_ranks)
        self.engines = [EngineWeights(*parts) for parts in zip(self.ranks, gathers, self.loops, strict=True)]
        self._pool = ThreadPoolExecutor(num_ranks)
        self.posts: list[tuple[str, Mapping[str, Any]]] = []

    def answer(self, text: str) -> list[str]:
        """Let every rank carry a command out; returns what each would send."""
        return [future.result(TIMEOUT_S) for future in [self._pool.submit(e.answer, text) for e in self.engines]]

    def ask(self, command: str, **given: Any) -> list[Any]:
        """Return the ranks' answers, which every rank gives alike."""
        answers = [json.loads(text)["ranks"] for text in self.answer(json.dumps({"command": command, **given}))]
        assert all(answer == answers[0] for answer in answers), "the ranks told different things"
        return answers[0]

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self.posts.append((path, body))
        if path != "/weights_checker":
            return {"success": True}
        if not body["action"].startswith("rose "):
            message = f"Unsupported action={body['action']!r}"
            raise EngineError(message)
        return {"success": True, "message": self.answer(body["action"].removeprefix("rose "))[0]}

    async def get(self, path: str) -> Mapping[str, Any]:
        raise EngineError(path)

    def publish(self, fraction: float = 0.2) -> WeightVersion:
        """Change the weights and publish them."""
        self.trainer.step(fraction)
        return self.publisher.publish_sync().version

    def update(self) -> WeightUpdate:
        """Return how the engine reaches the newest version."""
        update = plan_update(self.transport, self.ranks[0].version)
        assert update is not None
        return update

    def holds_the_trainers_bits(self) -> bool:
        """Return whether the live weights are the trainer's."""
        full = self.trainer.full()
        q = np.concatenate([bits_of(model.q) for model in self.models])
        return np.array_equal(q, full["q"]) and all(np.array_equal(bits_of(m.norm), full["norm"]) for m in self.models)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()
        self.transport.close()
        self._pool.shutdown()

    def _tensors(self) -> dict[str, Any]:
        return {n: torch.from_numpy(b.view(np.int16)).view(torch.bfloat16) for n, b in self.trainer.full().items()}


def write_checkpoint(folder: Path, full: Mapping[str, Any]) -> None:
    """Write a safetensors file."""
    header, data = {}, b""
    for spec in SPECS:
        raw = full[spec.name].tobytes()
        header[spec.name] = {
            "dtype": "BF16",
            "shape": list(spec.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(head).to_bytes(8, "little") + head + data)


def _parameter(*shape: int) -> Any:
    return torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)


def bits_of(parameter: Any) -> Any:
    """Return the live bits of a parameter."""
    return parameter.detach().view(torch.int16).numpy().view(np.uint16)


def _gathers(num_ranks: int) -> list[Callable[[Any], list[Any]]]:
    """Return what each rank gathers with: a barrier on both sides of a shared list."""
    slots: list[Any] = [None] * num_ranks
    meet = threading.Barrier(num_ranks, timeout=TIMEOUT_S)

    def gather_of(rank: int) -> Callable[[Any], list[Any]]:
        def gather(own: Any) -> list[Any]:
            slots[rank] = json.loads(json.dumps(own))
            meet.wait()
            found = list(slots)
            meet.wait()
            return found

        return gather

    return [gather_of(rank) for rank in range(num_ranks)]
