"""A source of weights for frameworks that hand over full tensors only, one after another.

The framework gathers on its own before each publish. Cutting along the targets' boxes, comparison and sparse coding are those of every
other trainer, so engines cannot tell the difference; ``is_gathered`` says that a gather came first.

Invariants:

* Every rank is shown the same tensors in the same order, so all agree on who publishes what without a word: each tensor belongs to
  the rank that had the fewest bytes when it first came.
* A rank copies its own tensors as they come, into buffers that it keeps, and holds on to no other.
* A pass that ended half-way, for whatever reason, is never published.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, Iterable, Mapping
from typing import Any

import attrs
import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.transfer.layout import bits_dtype, num_bytes, whole_box

Bits = np.ndarray[Any, np.dtype[Any]]


@attrs.define
class _Pass:
    """What one pass has shown so far."""

    names: set[str] = attrs.field(factory=set)
    problems: list[str] = attrs.field(factory=list)


class StreamedTrainer(Trainer):
    """One rank of a trainer that shows whole tensors.

    Args:
        tensors: Every tensor of the model, the same on every rank; ``None``: the first pass says.
        rank: This rank.
        world_size: How many ranks publish together. All of them are shown all tensors; each publishes a share of them.
        aliases: Tied names: alias -> the name whose bits it shares. They are skipped where they come.
        dtype: What floating-point tensors are cast to, for instance ``bfloat16``; ``None`` keeps each one's own.
    """

    is_gathered = True

    def __init__(
        self,
        tensors: Iterable[TensorSpec] | None = None,
        *,
        rank: int = 0,
        world_size: int = 1,
        aliases: Mapping[str, str] | None = None,
        dtype: str | None = None,
    ) -> None:
        if dtype is not None:
            bits_dtype(dtype)  # refuses what cannot be carried
        self.rank, self.world_size = rank, world_size
        self._dtype = dtype
        self._aliases = dict(aliases or {})
        self._specs: dict[str, TensorSpec] = {}
        self._owners: dict[str, int] = {}
        self._loads = [0] * world_size
        self._buffers: dict[str, Bits] = {}
        self._is_whole = False
        for spec in tensors or ():
            self._learn(spec)
        self._is_learning = tensors is None

    def update(self, weights: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> None:
        """Take the tensors of one pass, before each publish, on every rank.

        Args:
            weights: Full tensors of torch or numpy by name, or pairs one after another; each may be freed when the next one is asked
                for. An array of unsigned integers of the right size is taken for bit patterns where the dtype is known already.

        Raises:
            LayoutMismatchError: Tensors are unknown, missing, misshapen or mistyped; names all of them. Nothing can be published then
                until an update succeeds.
        """
        one = self._begin()
        for name, tensor in weights.items() if isinstance(weights, Mapping) else weights:
            self._take(one, name, tensor)
        self._end(one)

    async def update_async(self, weights: AsyncIterable[tuple[str, Any]]) -> None:
        """Do ``update`` with pairs that come asynchronously."""
        one = self._begin()
        async for name, tensor in weights:
            self._take(one, name, tensor)
        self._end(one)

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor; none before the first pass where nobody said."""
        return self._specs

    def aliases(self) -> Mapping[str, str]:
        """Return the tied names."""
        return self._aliases

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return the whole of every tensor that this rank publishes."""
        return {name: whole_box(spec.shape) for name, spec in self._specs.items() if self._owners[name] == self.rank}

    def shards(self) -> Mapping[str, Bits]:
        """Return what the last pass showed.

        Raises:
            LayoutMismatchError: There was none, or it did not come to its end.
        """
        if not self._is_whole:
            message = "there is no whole pass of tensors to publish; call update(weights) with all of them before"
            raise LayoutMismatchError(message)
        return self._buffers

    def _learn(self, spec: TensorSpec) -> None:
        owner = min(range(self.world_size), key=self._loads.__getitem__)
        self._specs[spec.name], self._owners[spec.name] = spec, owner
        self._loads[owner] += num_bytes(spec)

    def _begin(self) -> _Pass:
        self._is_whole = False
        return _Pass()

    def _take(self, one: _Pass, name: str, tensor: Any) -> None:
        if name in self._aliases:
            return
        dtype = self._wire_dtype(tensor)
        if self._is_learning and name not in self._specs:
            self._learn(TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtype))
        problem = self._problem(name, tensor, dtype)
        one.names.add(name)
        if problem:
            one.problems.append(problem)
        elif self._owners[name] == self.rank:
            self._copy(self._specs[name], tensor)

    def _end(self, one: _Pass) -> None:
        problems = {*one.problems, *(f"{name} is missing" for name in self._specs if name not in one.names)}
        if problems:
            message = f"the tensors are not what was promised: {'; '.join(sorted(problems))}"
            raise LayoutMismatchError(message)
        self._is_learning, self._is_whole = False, True

    def _wire_dtype(self, tensor: Any) -> str:
        own = str(tensor.dtype).removeprefix("torch.")
        return self._dtype if self._dtype is not None and "float" in own else own

    def _problem(self, name: str, tensor: Any, dtype: str) -> str:
        """Return what is wrong with a tensor; empty when it fits."""
        spec = self._specs.get(name)
        if spec is None:
            return f"{name} is unknown"
        is_bits = isinstance(tensor, np.ndarray) and tensor.dtype == bits_dtype(spec.dtype)
        if tuple(tensor.shape) != spec.shape or not (is_bits or dtype == spec.dtype):
            return f"{name} is {dtype}{tuple(tensor.shape)}, promised {spec.dtype}{spec.shape}"
        return ""

    def _copy(self, spec: TensorSpec, tensor: Any) -> None:
        wire = bits_dtype(spec.dtype)
        buffer = self._buffers.setdefault(spec.name, np.empty(spec.shape, dtype=wire))
        np.copyto(buffer, _bits_of(tensor, spec.dtype).view(wire))


def _bits_of(tensor: Any, dtype: str) -> Bits:
    """Return the bits of a tensor as ``dtype``; a numpy array is of it already, or one of its bits."""
    if isinstance(tensor, np.ndarray):
        return tensor
    from rose.backends.fsdp.bits import (  # noqa: PLC0415 - needs torch, which whoever has such a tensor has
        bits_of,
        torch_dtype,
    )

    return bits_of(tensor.detach().to(torch_dtype(dtype)))
