"""A source of weights for frameworks that hand over only gathered full tensors.

The framework gathers on its own, before each publish; rank 0 gives the result to ``update``. The cutting along the targets'
boxes, the comparison and the sparse coding are those of every other trainer, so engines cannot tell the difference. What is
lost is that every rank sends its own share: rank 0 compares, encodes and sends it all, which ``is_gathered`` says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.transfer.layout import bits_dtype, whole_box

Bits = np.ndarray[Any, np.dtype[Any]]


class GatheredTrainer(Trainer):
    """One rank of a trainer whose rank 0 alone has weights to give.

    Args:
        tensors: Every tensor of the model, the same on every rank.
        rank: This rank.
        world_size: How many ranks publish together.
        aliases: Tied names: alias -> the name whose bits it shares.
    """

    is_gathered = True

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        *,
        rank: int = 0,
        world_size: int = 1,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._tensors = {spec.name: spec for spec in tensors}
        self._aliases = dict(aliases or {})
        self._bits: dict[str, Bits] = {}
        self._buffers: dict[str, Bits] = {}

    def update(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Take the gathered tensors, before each publish. Other ranks than 0 need not call it; there it does nothing.

        Args:
            weights: Full tensors of torch or numpy by name, or pairs one after another as a framework yields them. The
                tensors of a mapping are kept as they are, those of pairs are copied, so that each may be freed at once. An
                array of unsigned integers of the right size is taken for bit patterns.

        Raises:
            LayoutMismatchError: Tensors are unknown, missing, misshapen or mistyped; names all of them. After pairs, which have
                overwritten what was copied before, there is nothing to publish until an update succeeds.
        """
        if self.rank != 0:
            return
        is_kept = isinstance(weights, Mapping)
        if not is_kept:
            self._bits = {}  # an update that ends half-way, for whatever reason, must not be published
        problems: list[str] = []
        fresh: dict[str, Bits] = {}
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            if name in self._aliases:
                continue
            problem = self._problem(name, tensor)
            if problem:
                problems.append(problem)
                continue
            bits = _bits_of(tensor, self._tensors[name])
            fresh[name] = bits if is_kept else self._copied(name, bits)
        problems += [f"{name} is missing" for name in self._tensors if name not in fresh]
        if problems:
            message = f"the gathered tensors are not what was promised: {'; '.join(sorted(set(problems)))}"
            raise LayoutMismatchError(message)
        self._bits = fresh

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor."""
        return self._tensors

    def aliases(self) -> Mapping[str, str]:
        """Return the tied names."""
        return self._aliases

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return the whole of every tensor on rank 0, nothing elsewhere."""
        return {name: whole_box(spec.shape) for name, spec in self._tensors.items()} if self.rank == 0 else {}

    def shards(self) -> Mapping[str, Bits]:
        """Return what ``update`` was given last.

        Raises:
            LayoutMismatchError: It was never called.
        """
        if self.rank == 0 and self._tensors and not self._bits:
            message = "rank 0 has no gathered tensors yet; call update(weights) before publishing"
            raise LayoutMismatchError(message)
        return self._bits

    def _copied(self, name: str, bits: Bits) -> Bits:
        buffer = self._buffers.setdefault(name, np.empty(bits.shape, dtype=bits.dtype))
        np.copyto(buffer, bits)
        return buffer

    def _problem(self, name: str, tensor: Any) -> str:
        """Return what is wrong with a tensor; empty when it fits."""
        spec = self._tensors.get(name)
        if spec is None:
            return f"{name} is unknown"
        dtype = str(tensor.dtype).removeprefix("torch.")
        is_bits = isinstance(tensor, np.ndarray) and tensor.dtype == bits_dtype(spec.dtype)
        if tuple(tensor.shape) != spec.shape or not (is_bits or dtype == spec.dtype):
            return f"{name} is {dtype}{tuple(tensor.shape)}, promised {spec.dtype}{spec.shape}"
        return ""


def _bits_of(tensor: Any, spec: TensorSpec) -> Bits:
    if isinstance(tensor, np.ndarray):
        return tensor.view(bits_dtype(spec.dtype))
    from rose.backends.fsdp.bits import bits_of  # noqa: PLC0415 - needs torch, which whoever has such a tensor has

    return bits_of(tensor)
