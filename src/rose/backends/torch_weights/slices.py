"""Which part of which live parameter every part of every checkpoint tensor becomes.

Engines fuse (qkv, gate and up), pad (vocabulary) and cut (tensor parallelism) while they load, each model in its own
``load_weights``. The plan is found by running that very method once with tensors that have shapes but no bytes (meta
device) and noting every copy it would make; so there is no table of models, and live weights are only looked at.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

import attrs
import torch
from torch.overrides import TorchFunctionMode

from rose.backends.torch_weights.checkpoint_files import StoredTensor, find_tensors
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LOADER_ERRORS = (RuntimeError, NotImplementedError, ValueError, AssertionError, LookupError, AttributeError, TypeError)


@attrs.frozen(kw_only=True)
class Piece:
    """A box of a checkpoint tensor and the integer view of the live memory that holds it, both of the box's shape."""

    box: ShardSpec
    live: torch.Tensor


@attrs.frozen(kw_only=True)
class SlicePlan:
    """The checkpoint tensors that a rank of an engine loads from, in wire dtype, and the pieces each becomes."""

    tensors: Mapping[str, TensorSpec]
    pieces: Mapping[str, tuple[Piece, ...]]

    @classmethod
    def trace(cls, model: torch.nn.Module, checkpoint: Mapping[str, torch.Tensor]) -> SlicePlan:
        """Find the plan of a loaded model.

        Args:
            model: An engine's model; its ``load_weights`` is called (vLLM's within vLLM's current config).
            checkpoint: Tensor name -> a contiguous meta tensor of the checkpoint's shape and dtype. Names that the
                model does not load are left out of the plan.

        Raises:
            LayoutMismatchError: The loader transforms a tensor beyond cutting and copying, or a parameter of the model
                comes from none of them; names the tensors.
        """
        names = {tensor.untyped_storage()._cdata: name for name, tensor in checkpoint.items()}  # noqa: SLF001 - identity
        found: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        recorder = _record(model, checkpoint)
        for source, live in recorder.copies:
            name = names.get(source.untyped_storage()._cdata)  # noqa: SLF001 - identity
            if name is None:
                message = f"{type(model).__name__} computes a parameter of shape {tuple(live.shape)} while it loads"
                raise LayoutMismatchError(message)
            found.setdefault(name, []).append((source, live))
        padded = {name: held for name, held in recorder.cleared.items() if name in checkpoint and name not in found}
        _check_all_loaded(
            model, [live for _, live in recorder.copies] + [live for held in padded.values() for live in held]
        )
        tensors: dict[str, TensorSpec] = {}
        pieces: dict[str, tuple[Piece, ...]] = {}
        for name, held in padded.items():  # tensors of which this rank holds padding only
            tensors[name], pieces[name] = _spec(name, checkpoint[name], held), ()
        for name, copies in found.items():
            tensors[name] = _spec(name, checkpoint[name], [live for _, live in copies])
            pieces[name] = tuple(_piece(name, checkpoint[name], source, live) for source, live in copies)
        return cls(tensors=tensors, pieces=pieces)

    def find(self, name: str, box: ShardSpec) -> Iterator[torch.Tensor]:
        """Yield the live views (integer, of the box's shape) of every copy of a box that this rank holds."""
        for piece in self.pieces.get(name, ()):
            starts = [a - b for a, b in zip(box.offset, piece.box.offset, strict=True)]
            if all(s >= 0 and s + n <= m for s, n, m in zip(starts, box.shape, piece.box.shape, strict=True)):
                view = piece.live
                for dim, (start, size) in enumerate(zip(starts, box.shape, strict=True)):
                    view = view.narrow(dim, start, size)
                yield view


def read_checkpoint(directory: Path) -> dict[str, torch.Tensor]:
    """Return meta tensors for every tensor of a safetensors checkpoint. Raises what ``find_tensors`` raises."""
    return as_meta(find_tensors(directory))


def as_meta(stored: Mapping[str, StoredTensor]) -> dict[str, torch.Tensor]:
    """Return a tensor without bytes for every tensor of a checkpoint."""
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in stored.items()}


def _record(model: torch.nn.Module, checkpoint: Mapping[str, torch.Tensor]) -> _CopyRecorder:
    """Return the copies that the loader would make, each as part of a checkpoint tensor and view of a live parameter."""
    recorder = _CopyRecorder()

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in checkpoint.items():
            recorder.taken = name
            yield name, tensor

    try:
        with torch.no_grad(), recorder:
            model.load_weights(weights())
    except _LOADER_ERRORS as error:
        message = (
            f"{type(model).__name__}.load_weights, when it had taken {recorder.taken}, needed more than cuts and copies, or met a parameter "
            f"that the engine replaced after loading, which ROSE cannot update: {error!r}; load the model without quantization"
        )
        raise LayoutMismatchError(message) from error
    return recorder


class _CopyRecorder(TorchFunctionMode):  # type: ignore[misc] # torch is untyped here
    """Notes copies from meta tensors into real ones instead of making them; sees this thread's calls only.

    Attributes:
        copies: Source and live view of each.
        cleared: By the name of ``taken`` then, the live views that were filled with a constant: padding.
        taken: The checkpoint tensor that the loader is at.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.cleared: dict[str, list[torch.Tensor]] = {}
        self.taken = "nothing"

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.copy_ and args[1].is_meta and not args[0].is_meta:
            self._note(args[1], args[0])
            return args[0]
        if func is torch.Tensor.__setitem__ and isinstance(args[2], torch.Tensor) and args[2].is_meta:
            self._note(args[2], args[0][args[1]])
            return None
        if func in (torch.Tensor.fill_, torch.Tensor.zero_) and not args[0].is_meta:
            self.cleared.setdefault(self.taken, []).append(args[0].detach())
            return args[0]  # a real load cleared it already
        return func(*args, **(kwargs or {}))

    def _note(self, source: torch.Tensor, live: torch.Tensor) -> None:
        if source.shape != live.shape:
            message = f"a copy of shape {tuple(source.shape)} into {tuple(live.shape)}"
            raise ValueError(message)
        self.copies.append((source, live.detach()))


def _check_all_loaded(model: torch.nn.Module, loaded: list[torch.Tensor]) -> None:
    storages = {live.untyped_storage().data_ptr() for live in loaded}
    missing = [
        name
        for name, parameter in model.named_parameters()
        if parameter.numel() and parameter.untyped_storage().data_ptr() not in storages
    ]
    empty = [name for name, parameter in model.named_parameters() if not parameter.numel()]
    if missing or empty:
        message = (
            f"these parameters of {type(model).__name__} come from no checkpoint tensor or were repacked, "
            f"so ROSE cannot update them: {', '.join(missing + empty)}"
        )
        raise LayoutMismatchError(message)


def _spec(name: str, tensor: torch.Tensor, live: list[torch.Tensor]) -> TensorSpec:
    dtypes = {str(view.dtype).removeprefix("torch.") for view in live}
    if len(dtypes) > 1:
        message = f"{name} is held in several dtypes: {', '.join(sorted(dtypes))}"
        raise LayoutMismatchError(message)
    return TensorSpec(name=name, shape=tuple(tensor.shape), dtype=dtypes.pop())


def _piece(name: str, whole: torch.Tensor, source: torch.Tensor, live: torch.Tensor) -> Piece:
    shape = tuple(whole.shape)
    bits = live.view(_BITS[live.element_size()])
    if source.numel() == whole.numel() == 1:
        return Piece(box=ShardSpec(offset=(0,) * len(shape), shape=shape), live=bits.view(shape))
    strides = tuple(accumulate((1, *shape[:0:-1]), mul))[::-1]
    if source.dim() != len(shape) or source.stride() != strides:
        message = f"{name} is reshaped or transposed while it is loaded, which ROSE cannot update"
        raise LayoutMismatchError(message)
    offset, rest = [], source.storage_offset()
    for stride in strides:
        start, rest = divmod(rest, stride)
        offset.append(start)
    return Piece(box=ShardSpec(offset=tuple(offset), shape=tuple(source.shape)), live=bits)
