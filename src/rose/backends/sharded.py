"""A source of weights for frameworks that show each rank's own shards, by name and box.

Invariants: nothing here is a collective; shards are kept by reference and read when they are published, so they must not change
between ``update`` and the end of the publish.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec, Trainer
from rose.transfer.layout import bits_dtype, find_box_problem


class ShardedTrainer(Trainer):
    """One rank of a trainer that shows torch shards.

    Args:
        tensors: Every tensor of the whole model, the same on every rank and in the same order, in the dtype in which it travels.
        layout: Which box of each tensor this rank publishes; what other ranks publish is absent. Over all ranks the boxes cover each
            element once, so of replicas one publishes.
        rank: This rank.
        world_size: How many ranks publish together.
        aliases: Tied names: alias -> the name whose bits it shares.
        base_in: Where the last published bits of shards on a GPU are kept: ``pinned`` in page-locked memory of the host, since frameworks
            often lend the GPU to an engine between two steps, ``device`` on the GPU, which is faster; ``host`` compares on the host.

    Raises:
        LayoutMismatchError: A box is of no tensor or does not lie in it; names all of them.
    """

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        layout: Mapping[str, ShardSpec],
        *,
        rank: int,
        world_size: int,
        aliases: Mapping[str, str] | None = None,
        base_in: Literal["device", "pinned", "host"] = "pinned",
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._base_in = base_in
        self._specs = {spec.name: spec for spec in tensors}
        self._layout = dict(layout)
        self._aliases = dict(aliases or {})
        self._shards: dict[str, Any] = {}
        problems = [f"{name}: no such tensor" for name in self._layout if name not in self._specs]
        for name, box in self._layout.items():
            problem = find_box_problem(self._specs[name].shape, box) if name in self._specs else None
            problems += [f"{name}: {problem}"] if problem else []
        _refuse(problems, "boxes do not fit")
        for spec in self._specs.values():
            bits_dtype(spec.dtype)

    def update(self, shards: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Take this rank's shards, before each publish. Of a pass that fails nothing is kept.

        Args:
            shards: Local torch tensors by name, of the shape of their box, in any floating-point dtype: they are cast when they are read.
                Names without a box here are skipped.

        Raises:
            LayoutMismatchError: Shards are missing or misshapen; names all of them.
        """
        self._shards = {}
        given = dict(shards)
        problems = [f"{name} is missing" for name in self._layout if name not in given]
        for name, box in self._layout.items():
            if name in given and tuple(given[name].shape) != box.shape:
                problems.append(f"{name} has shape {tuple(given[name].shape)}, its box {box.shape}")
        _refuse(problems, "shards are not what was promised")
        self._shards = {name: given[name].detach() for name in self._layout}

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor."""
        return self._specs

    def aliases(self) -> Mapping[str, str]:
        """Return the tied names."""
        return self._aliases

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return this rank's boxes."""
        return self._layout

    def shards(self) -> Mapping[str, ShardBits]:
        """Return this rank's bits: views where dtype and strides allow, else cast when a slice is read.

        Raises:
            LayoutMismatchError: No update succeeded.
        """
        from rose.backends.fsdp.bits import torch_dtype  # noqa: PLC0415 - needs torch, which whoever has shards has
        from rose.backends.fsdp.shard_bits import shard_bits  # noqa: PLC0415

        if self._layout and not self._shards:
            message = "there are no shards to publish; call update(shards) before"
            raise LayoutMismatchError(message)
        return {
            name: shard_bits(one, torch_dtype(self._specs[name].dtype), base_in=self._base_in)
            for name, one in self._shards.items()
        }


def _refuse(problems: list[str], what: str) -> None:
    if problems:
        message = f"{what}: {'; '.join(sorted(problems))}"
        raise LayoutMismatchError(message)
