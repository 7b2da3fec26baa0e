"""Which pieces of the weights travel: the common refinement of what trainer ranks have and engine ranks need.

Pure. A *cell* is a box of one tensor that one trainer rank holds whole and that every known engine rank either needs whole
or not at all, so that a changed element crosses the thin link once and an engine fetches its own share only.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise, product

import attrs

from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import (
    TargetLayout,
    bits_dtype,
    find_box_problem,
    find_cover_problem,
    intersect,
)


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
    rank: int, layout: Mapping[str, ShardSpec], targets: Sequence[TargetLayout], aliases: Mapping[str, str]
) -> tuple[Cell, ...]:
    """Cut one trainer rank's boxes along what the engines need; over all ranks every element is in exactly one cell.

    Args:
        rank: The trainer rank; it needs no other rank's layout.
        layout: The box it holds of each tensor; a box may be empty.
        targets: The layouts of the engines, if known.
        aliases: Tied names of the trainer: alias -> the tensor whose bits it shares.
    """
    needs = _needs(targets, aliases)
    cells: list[Cell] = []
    for name, box in layout.items():
        held = needs.get(name, {})
        for piece in _cut(box, [needed for boxes in held.values() for needed in boxes]):
            takers = sorted(key for key, boxes in held.items() if any(intersect(piece, needed) for needed in boxes))
            cells.append(Cell(tensor=name, box=piece, source_rank=rank, targets=tuple(takers)))
    return tuple(cells)


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
            problems = (find_box_problem(known[name].shape, box) for box in boxes)
            yield from (f"{name} in {target.layout_id}/{rank}: {problem}" for problem in problems if problem)


def _needs(targets: Sequence[TargetLayout], aliases: Mapping[str, str]) -> dict[str, dict[str, list[ShardSpec]]]:
    """Return trainer's tensor name -> target rank -> boxes it needs."""
    needs: defaultdict[str, defaultdict[str, list[ShardSpec]]] = defaultdict(lambda: defaultdict(list))
    for target in targets:
        ties = {**aliases, **target.aliases}
        group_of_names = _group_members(ties)
        for rank, held in enumerate(target.ranks):
            for name, boxes in held.items():
                for member in group_of_names.get(ties.get(name, name), (name,)):
                    needs[member][f"{target.layout_id}/{rank}"] += boxes
    return {name: dict(held) for name, held in needs.items()}


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
