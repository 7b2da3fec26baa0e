"""Checkpoint tensors inside the parameters of a trainer that keeps them fused, stacked or padded.

Pure. A *view* says that a part of a checkpoint tensor is a box of one of the trainer's parameters, element for element in the
same order; several views make up a tensor that lies in several pieces. Parameters have global coordinates of their own, in
which a rank holds one box of each; ``held_tensors`` turns those boxes into boxes of checkpoint tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import attrs
import numpy as np

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec
from rose.transfer.layout import find_box_problem, find_cover_problem, intersect, read_whole, slices_in, whole_box

_Array = np.ndarray[Any, np.dtype[Any]]
_STACK_DIMS = 3  # experts, rows, columns


@attrs.frozen(kw_only=True)
class View:
    """A part of a checkpoint tensor as a box of a parameter.

    Attributes:
        name: Checkpoint name.
        shape: Shape of the whole checkpoint tensor.
        part: The part that this view gives, in the tensor's coordinates.
        parameter: The trainer's name of the parameter.
        box: Where the part lies, in the parameter's coordinates. Its dimensions are those of ``part``, but for those of size 1.
    """

    name: str
    shape: tuple[int, ...]
    part: ShardSpec
    parameter: str
    box: ShardSpec

    def __attrs_post_init__(self) -> None:
        problem = find_box_problem(self.shape, self.part)
        if problem is None and _sizes(self.part) != _sizes(self.box):
            problem = f"a box of {self.box.shape} cannot hold a part of {self.part.shape}"
        if problem is not None:
            message = f"{self.name} in {self.parameter}: {problem}"
            raise LayoutMismatchError(message)

    @classmethod
    def whole(cls, name: str, shape: tuple[int, ...], parameter: str, offset: tuple[int, ...] | None = None) -> View:
        """Return the view of a tensor that lies in one piece, in a parameter of as many dimensions, at ``offset`` (default: 0)."""
        box = ShardSpec(offset=offset or (0,) * len(shape), shape=shape)
        return cls(name=name, shape=shape, part=whole_box(shape), parameter=parameter, box=box)


@attrs.frozen(kw_only=True)
class Piece:
    """A piece of a checkpoint tensor that a rank holds: ``part`` of the tensor is ``box``, in the coordinates of the rank's array."""

    part: ShardSpec
    parameter: str
    box: ShardSpec


@attrs.frozen(kw_only=True)
class HeldTensor:
    """What a rank holds of one checkpoint tensor: a box, and the pieces that make it up."""

    box: ShardSpec
    pieces: tuple[Piece, ...]


def view_specs(views: Iterable[View], parameters: Mapping[str, TensorSpec]) -> dict[str, TensorSpec]:
    """Return the checkpoint tensors that the views give, in their order, in the dtype of the parameters.

    Args:
        views: The views of all ranks.
        parameters: Every parameter of the trainer, with its global shape.

    Raises:
        LayoutMismatchError: A view is not inside a parameter, or the parts of a tensor are not the whole of it; names them all.
    """
    specs: dict[str, TensorSpec] = {}
    parts: dict[str, list[ShardSpec]] = {}
    problems = []
    for view in views:
        parameter = parameters.get(view.parameter)
        problem = "it is no parameter" if parameter is None else find_box_problem(parameter.shape, view.box)
        if parameter is None or problem is not None:
            problems.append(f"{view.name} in {view.parameter}: {problem}")
            continue
        spec = TensorSpec(name=view.name, shape=view.shape, dtype=parameter.dtype)
        if specs.setdefault(view.name, spec) != spec:
            problems.append(f"{view.name} in {view.parameter}: {spec} is not {specs[view.name]} as in other views")
        parts.setdefault(view.name, []).append(view.part)
    covers = ((name, find_cover_problem(spec.shape, parts[name])) for name, spec in specs.items())
    problems += [f"{name} of shape {specs[name].shape}: {problem}" for name, problem in covers if problem is not None]
    if problems:
        message = f"the views do not fit the trainer's parameters: {'; '.join(problems)}"
        raise LayoutMismatchError(message)
    return specs


def held_tensors(views: Iterable[View], parameters: Mapping[str, ShardSpec]) -> dict[str, HeldTensor]:
    """Return what a rank holds of each checkpoint tensor; those of which it holds nothing are absent.

    Args:
        views: The views of all its parameters, in the order of the tensors.
        parameters: The box that the rank holds of each parameter; absent: none.

    Raises:
        LayoutMismatchError: What it holds of a tensor is not one box; names all tensors concerned.
    """
    pieces: dict[str, list[Piece]] = {}
    for view in views:
        local = parameters.get(view.parameter)
        common = None if local is None else intersect(view.box, local)
        if local is None or common is None:
            continue
        inner = ShardSpec(offset=_minus(common.offset, local.offset), shape=common.shape)
        piece = Piece(part=_carry(common, view.box, view.part), parameter=view.parameter, box=inner)
        pieces.setdefault(view.name, []).append(piece)
    held = {name: HeldTensor(box=_bounds(parts), pieces=tuple(parts)) for name, parts in pieces.items()}
    problems = [f"{name}: {problem}" for name, one in held.items() if (problem := _held_problem(one)) is not None]
    if problems:
        message = f"a rank must hold one box of each checkpoint tensor: {'; '.join(problems)}"
        raise LayoutMismatchError(message)
    return held


class HeldBits:
    """The bits of a held tensor (a ``ShardBits``): views of the parameters' bits where a slice lies in one piece, else a copy.

    Args:
        held: What the rank holds.
        parameters: Bits of the rank's box of each parameter named in the pieces.
    """

    def __init__(self, held: HeldTensor, parameters: Mapping[str, ShardBits]) -> None:
        self.shape = held.box.shape
        self.dtype = parameters[held.pieces[0].parameter].dtype
        self._held = held
        self._sources = [parameters[piece.parameter] for piece in held.pieces]

    def __getitem__(self, index: tuple[slice, ...], /) -> _Array:
        """Return the bits of a part; slices have start and stop."""
        base = self._held.box.offset
        offset = tuple(start + one.start for start, one in zip(base, index, strict=True))
        wanted = ShardSpec(offset=offset, shape=tuple(one.stop - one.start for one in index))
        found = list(self._parts(wanted))
        if len(found) == 1:
            return found[0][1]
        whole = np.empty(wanted.shape, dtype=self.dtype)
        for part, bits in found:
            whole[slices_in(part, wanted)] = bits
        return whole

    def __array__(self, dtype: np.dtype[Any] | None = None, copy: bool | None = None) -> _Array:  # noqa: FBT001 - numpy's
        """Return the whole box as an array."""
        whole = read_whole(self)
        return np.array(whole, dtype=dtype) if copy else np.asarray(whole, dtype=dtype)

    def _parts(self, wanted: ShardSpec) -> Iterator[tuple[ShardSpec, _Array]]:
        for number, part, box in pieces_in(self._held, wanted):
            source = self._sources[number]
            yield part, source[slices_in(box, whole_box(source.shape))].reshape(part.shape)


def pieces_in(held: HeldTensor, wanted: ShardSpec) -> Iterator[tuple[int, ShardSpec, ShardSpec]]:
    """Yield what a box of a held tensor is made of: number of the piece, the part in the tensor, its box in the parameter."""
    for number, piece in enumerate(held.pieces):
        part = intersect(piece.part, wanted)
        if part is not None:
            yield number, part, _carry(part, piece.part, piece.box)


def fused_expert_views(parameter: str, shape: tuple[int, ...]) -> tuple[View, ...]:
    """Return the views of stacked experts as transformers 5 keeps them.

    Args:
        parameter: ``….experts.gate_up_proj`` (``[E, 2I, H]``, gate above up) or ``….experts.down_proj`` (``[E, H, I]``).
        shape: Its global shape.

    Returns:
        ``….experts.E.gate_proj.weight`` and ``….up_proj.weight`` (``[I, H]``), or ``….down_proj.weight`` (``[H, I]``), by expert.

    Raises:
        LayoutMismatchError: The name or the shape is another.
    """
    prefix, _, kind = parameter.rpartition(".")
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}.get(kind, ())
    if not prefix.endswith("experts") or len(shape) != _STACK_DIMS or not parts or shape[1] % len(parts):
        message = (
            f"{parameter} of shape {shape} is not a stack of experts; expected …experts.gate_up_proj of shape"
            " (experts, 2 x intermediate, hidden) or …experts.down_proj of shape (experts, hidden, intermediate)"
        )
        raise LayoutMismatchError(message)
    num_rows = shape[1] // len(parts)
    return tuple(
        View(
            name=f"{prefix}.{expert}.{part}.weight",
            shape=(num_rows, shape[2]),
            part=whole_box((num_rows, shape[2])),
            parameter=parameter,
            box=ShardSpec(offset=(expert, i * num_rows, 0), shape=(1, num_rows, shape[2])),
        )
        for expert in range(shape[0])
        for i, part in enumerate(parts)
    )


def stacked_experts_in(shapes: Mapping[str, tuple[int, ...]]) -> tuple[View, ...]:
    """Return the views of every stack of experts among parameters, given by name and global shape."""
    names = [name for name in shapes if name.endswith((".experts.gate_up_proj", ".experts.down_proj"))]
    return tuple(view for name in names for view in fused_expert_views(name, shapes[name]))


def grouped_qkv_views(
    parameter: str,
    names: tuple[str, str, str],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    rest: tuple[int, ...],
) -> tuple[View, ...]:
    """Return the views of a fused qkv parameter in Megatron's order: by KV head its query heads, its key, its value.

    Args:
        parameter: The parameter, ``[(num_heads + 2 * num_kv_heads) * head_dim, *rest]``.
        names: Checkpoint names of q, k and v.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Rows of a head.
        rest: The other dimensions: ``(hidden,)`` of a weight, ``()`` of a bias.

    Raises:
        LayoutMismatchError: Query heads cannot be shared out evenly.
    """
    if num_heads % num_kv_heads:
        message = f"{parameter}: {num_heads} query heads cannot be shared out over {num_kv_heads} KV heads"
        raise LayoutMismatchError(message)
    heads_by_kind = (num_heads // num_kv_heads, 1, 1)
    views, row = [], 0
    for group in range(num_kv_heads):
        for name, heads in zip(names, heads_by_kind, strict=True):
            num_rows = heads * head_dim
            views.append(_rows_view(name, (num_rows * num_kv_heads, *rest), parameter, group * num_rows, row, num_rows))
            row += num_rows
    return tuple(views)


def gate_up_views(
    parameter: str, names: tuple[str, str], shape: tuple[int, ...], *, num_ranks: int = 1
) -> tuple[View, ...]:
    """Return the views of a fused gate and up parameter that is ``num_ranks`` shards on top of one another, each ``[gate; up]``.

    Args:
        parameter: The parameter, ``[2 * I, *rest]``; a tensor-parallel rank holds its ``2 * I / num_ranks`` rows.
        names: Checkpoint names of gate and up.
        shape: Shape of each of the two, ``(I, *rest)``.
        num_ranks: Over how many ranks the trainer cuts each of the two.

    Raises:
        LayoutMismatchError: The rows cannot be shared out evenly.
    """
    if shape[0] % num_ranks:
        message = f"{parameter}: {shape[0]} rows of {names[0]} cannot be shared out over {num_ranks} ranks"
        raise LayoutMismatchError(message)
    num_rows = shape[0] // num_ranks
    return tuple(
        _rows_view(name, shape, parameter, rank * num_rows, (2 * rank + i) * num_rows, num_rows)
        for rank in range(num_ranks)
        for i, name in enumerate(names)
    )


def _rows_view(
    name: str, shape: tuple[int, ...], parameter: str, first_row: int, parameter_row: int, num_rows: int
) -> View:
    zeros = (0,) * (len(shape) - 1)
    sizes = (num_rows, *shape[1:])
    return View(
        name=name,
        shape=shape,
        part=ShardSpec(offset=(first_row, *zeros), shape=sizes),
        parameter=parameter,
        box=ShardSpec(offset=(parameter_row, *zeros), shape=sizes),
    )


def _held_problem(held: HeldTensor) -> str | None:
    if len(held.pieces) == 1:
        return None
    shifted = [attrs.evolve(p.part, offset=_minus(p.part.offset, held.box.offset)) for p in held.pieces]
    problem = find_cover_problem(held.box.shape, shifted)
    return None if problem is None else f"within {held.box.offset}+{held.box.shape} its {problem}"


def _bounds(pieces: list[Piece]) -> ShardSpec:
    if len(pieces) == 1:
        return pieces[0].part
    starts = [piece.part.offset for piece in pieces]
    ends = [_plus(piece.part.offset, piece.part.shape) for piece in pieces]
    offset = tuple(map(min, *starts))
    return ShardSpec(offset=offset, shape=_minus(tuple(map(max, *ends)), offset))


def _carry(box: ShardSpec, source: ShardSpec, target: ShardSpec) -> ShardSpec:
    """Carry a box inside ``source`` over to the same elements of ``target``, whose dimensions of size 1 may be others."""
    moves = iter(
        (start - base, size)
        for start, size, base, whole in zip(box.offset, box.shape, source.offset, source.shape, strict=True)
        if whole != 1
    )
    spans = [
        (base, 1) if whole == 1 else (base + move, size)
        for base, whole in zip(target.offset, target.shape, strict=True)
        for move, size in ([(0, 1)] if whole == 1 else [next(moves)])
    ]
    return ShardSpec(offset=tuple(start for start, _ in spans), shape=tuple(size for _, size in spans))


def _sizes(box: ShardSpec) -> tuple[int, ...]:
    return tuple(size for size in box.shape if size != 1)


def _minus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x - y for x, y in zip(a, b, strict=True))


def _plus(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))
