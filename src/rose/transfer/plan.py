"""Which pieces of the weights travel: the common refinement of what trainer ranks have and engine ranks need.

Pure. A *cell* is a box of one tensor that one trainer rank holds whole and that every known engine rank either needs whole
or not at all, so that a changed element crosses the thin link once and an engine fetches its own share only. A cell is equally
long rows at equal distances in its tensor (``rose.transfer.layout.rows_of``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise, product

import attrs

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import (
    TargetLayout,
    bits_dtype,
    find_box_problem,
    find_cover_problem,
    has_overlap,
    intersect,
    split_into_rows,
    split_to_size,
    whole_box,
)

MAX_CELL_ELEMENTS = 4 << 20

_Need = tuple[str, tuple[ShardSpec, ...]]  # an engine rank, and the boxes it needs of one tensor
_Piece = tuple[ShardSpec, tuple[str, ...]]  # a cell's box, and the engine ranks that need it


@attrs.frozen(kw_only=True)
class Cell:
    """A piece of one tensor.

    Attributes:
        tensor: Checkpoint name.
        box: The piece, never empty.
        source_rank: The trainer rank that holds and sends it.
        targets: The engine ranks that need it, as ``layout_id/rank``, sorted; empty when no known layout does.
    """

    tensor: str
    box: ShardSpec
    source_rank: int
    targets: tuple[str, ...]


def plan_source(
    rank: int,
    layout: Mapping[str, ShardSpec],
    targets: Sequence[TargetLayout],
    aliases: Mapping[str, str],
    *,
    tensors: Mapping[str, TensorSpec] | None = None,
    max_cell_elements: int = MAX_CELL_ELEMENTS,
) -> tuple[Cell, ...]:
    """Cut one trainer rank's boxes along what the engines need; over all ranks every element is in exactly one cell.

    Args:
        rank: The trainer rank; it needs no other rank's layout.
        layout: The box it holds of each tensor; a box may be empty.
        targets: The layouts of the engines, if known.
        aliases: Tied names of the trainer: alias -> the tensor whose bits it shares.
        tensors: The trainer's tensors. A tensor that is neither here nor in a target has an unknown shape, and its boxes are cut
            so that they are rows at equal distances in any shape.
        max_cell_elements: Larger cells are cut into near-equal ones; only a row of the innermost dimension that is larger
            itself is cut within.
    """
    shapes = _shapes(tensors or {}, targets)
    needs = _needs(layout, targets, aliases)
    known: dict[tuple[ShardSpec, tuple[int, ...], tuple[_Need, ...]], list[_Piece]] = {}  # layers are alike
    cells: list[Cell] = []
    for name, box in layout.items():
        shape = shapes.get(name) or tuple(o + n + 1 for o, n in zip(box.offset, box.shape, strict=True))
        key = (box, shape, tuple(needs.get(name, ())))
        pieces = known.get(key)
        if pieces is None:
            pieces = known[key] = _pieces(*key, max_cell_elements)
        cells += [Cell(tensor=name, box=piece, source_rank=rank, targets=takers) for piece, takers in pieces]
    return tuple(cells)


def _pieces(box: ShardSpec, shape: tuple[int, ...], needs: Sequence[_Need], max_elements: int) -> list[_Piece]:
    pieces = []
    for part in _cut(box, [needed for _, boxes in needs for needed in boxes]):
        takers = {key for key, boxes in needs if any(intersect(part, needed) for needed in boxes)}
        targets = tuple(sorted(takers))
        pieces += [
            (cell, targets) for rows in split_into_rows(part, shape) for cell in split_to_size(rows, max_elements)
        ]
    return pieces


def check_sources(tensors: Mapping[str, TensorSpec], source_layouts: Sequence[Mapping[str, ShardSpec]]) -> None:
    """Check that the trainer ranks together hold each element of each tensor exactly once.

    Raises:
        LayoutMismatchError: They do not, or a dtype cannot be carried; names all tensors concerned.
    """
    problems = []
    boxes: defaultdict[str, list[ShardSpec]] = defaultdict(list)
    for layout in source_layouts:
        for name, box in layout.items():
            boxes[name].append(box)
    for name, spec in tensors.items():
        bits_dtype(spec.dtype)
        problem = find_cover_problem(spec.shape, boxes.pop(name, []))
        if problem is not None:
            problems.append(f"{name} of shape {spec.shape}: {problem}")
    problems += [f"{name} is in a rank's layout but not among the tensors" for name in boxes]
    if problems:
        message = f"the trainer ranks do not hold each element exactly once: {'; '.join(problems)}"
        raise LayoutMismatchError(message)


def check_targets(
    tensors: Mapping[str, TensorSpec], targets: Sequence[TargetLayout], aliases: Mapping[str, str]
) -> None:
    """Check that every target layout asks for exactly the trainer's tensors.

    Raises:
        LayoutMismatchError: Names are unknown or missing, or shapes, dtypes or boxes do not fit; names all tensors concerned.
    """
    problems = [problem for target in targets for problem in _target_problems(tensors, target, aliases)]
    if problems:
        message = f"engine layouts do not fit the trainer: {'; '.join(problems)}"
        raise LayoutMismatchError(message)


@attrs.frozen(kw_only=True)
class Coverage:
    """How many of the tensors that a kind of engine requires its ranks hold whole together."""

    num_required: int
    incomplete: Mapping[str, str]

    @property
    def num_covered(self) -> int:
        """Return how many tensors are held whole."""
        return self.num_required - len(self.incomplete)

    @property
    def text(self) -> str:
        """Return covered of required, for example ``399/399``."""
        return f"{self.num_covered}/{self.num_required}"


def find_coverage(target: TargetLayout) -> Coverage:
    """Check that the ranks of an engine together hold every element of every tensor; several may hold the same one."""
    boxes: defaultdict[str, set[ShardSpec]] = defaultdict(set)
    for held in target.ranks:
        for name, held_boxes in held.items():
            boxes[name].update(held_boxes)
    found = {spec.name: _find_gap(spec.shape, boxes[spec.name]) for spec in target.tensors}
    return Coverage(num_required=len(found), incomplete={name: gap for name, gap in found.items() if gap is not None})


def _find_gap(shape: tuple[int, ...], boxes: Collection[ShardSpec]) -> str | None:
    if find_cover_problem(shape, tuple(boxes)) is None:
        return None
    parts = _cut(whole_box(shape), tuple(boxes))  # replicas that overlap in part: look at the common refinement
    missing = sum(part.num_elements for part in parts if not any(intersect(part, box) for box in boxes))
    return f"no rank holds {missing} of its elements" if missing else None


def _target_problems(
    tensors: Mapping[str, TensorSpec], target: TargetLayout, aliases: Mapping[str, str]
) -> Iterator[str]:
    ties = {**aliases, **target.aliases}
    by_group = {ties.get(name, name): spec for name, spec in tensors.items()}
    known = {spec.name: spec for spec in target.tensors}
    for name, spec in known.items():
        sent = by_group.get(ties.get(name, name))
        if sent is None:
            yield f"{name}, required by {target.layout_id}, is not a tensor of the trainer"
        elif (sent.shape, sent.dtype) != (spec.shape, spec.dtype):
            yield f"{name} is {spec.dtype}{spec.shape} in {target.layout_id}, {sent.dtype}{sent.shape} in the trainer"
    groups = {ties.get(name, name) for name in known}
    for name in tensors:
        if ties.get(name, name) not in groups:
            yield f"{name} of the trainer is unknown to {target.layout_id}"
    yield from _held_problems(known, target)


def _held_problems(known: Mapping[str, TensorSpec], target: TargetLayout) -> Iterator[str]:
    for rank, held in enumerate(target.ranks):
        for name, boxes in held.items():
            if name not in known:
                yield f"{name}, held by {target.layout_id}/{rank}, is not among its tensors"
                continue
            problems = [problem for box in boxes if (problem := find_box_problem(known[name].shape, box))]
            if not problems and len(boxes) > 1 and has_overlap(boxes):
                problems = ["boxes overlap, so that elements would be written twice"]
            yield from (f"{name} in {target.layout_id}/{rank}: {problem}" for problem in problems)


def _shapes(tensors: Mapping[str, TensorSpec], targets: Sequence[TargetLayout]) -> dict[str, tuple[int, ...]]:
    shapes = {spec.name: spec.shape for target in targets for spec in target.tensors}
    return shapes | {name: spec.shape for name, spec in tensors.items()}


def _needs(
    layout: Mapping[str, ShardSpec], targets: Sequence[TargetLayout], aliases: Mapping[str, str]
) -> dict[str, list[_Need]]:
    """Return, of the trainer's tensors in this layout, which boxes each target rank needs."""
    needs: defaultdict[str, list[_Need]] = defaultdict(list)
    for target in targets:
        ties = {**aliases, **target.aliases}
        members = _group_members(ties)
        for rank, held in enumerate(target.ranks):
            key = f"{target.layout_id}/{rank}"
            for name, boxes in held.items():
                for member in members.get(ties.get(name, name), (name,)) if members else (name,):
                    if member in layout:
                        needs[member].append((key, boxes))
    return needs


def _group_members(ties: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    members: defaultdict[str, list[str]] = defaultdict(list)
    for alias, name in ties.items():
        members[name] += [alias] if members[name] else [name, alias]
    return {name: tuple(aliases) for name, aliases in members.items()}


def _cut(box: ShardSpec, needed: Sequence[ShardSpec]) -> list[ShardSpec]:
    """Cut a box along every edge of the needed boxes that passes through it; nothing for an empty box."""
    if not box.num_elements:
        return []
    parts = [part for part in (intersect(box, other) for other in needed) if part is not None]
    spans_by_dim = []
    for dim, (start, size) in enumerate(zip(box.offset, box.shape, strict=True)):
        edges = {start, start + size}
        for part in parts:
            edges |= {part.offset[dim], part.offset[dim] + part.shape[dim]}
        spans_by_dim.append(list(pairwise(sorted(edges))))
    return [
        ShardSpec(offset=tuple(a for a, _ in spans), shape=tuple(b - a for a, b in spans))
        for spans in product(*spans_by_dim)
    ]
