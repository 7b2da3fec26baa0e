"""Carries bits from trainer ranks to engine ranks by the plan alone, and checks that each element is written once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec
from rose.transfer.layout import TargetLayout, rows_of, slices_in, whole_box
from rose.transfer.plan import Cell, check_sources, check_targets, plan_source
from rose.transfer.source_views import HeldBits, View, held_tensors


@attrs.frozen(kw_only=True)
class Rank:
    """One trainer rank: a box and its bits of each checkpoint tensor."""

    layout: Mapping[str, ShardSpec]
    bits: Mapping[str, ShardBits]

    @classmethod
    def viewed(cls, views: Sequence[View], parameters: Mapping[str, tuple[ShardSpec, np.ndarray]]) -> Rank:
        """Return a rank that holds boxes of fused parameters."""
        held = held_tensors(views, {name: box for name, (box, _) in parameters.items()})
        arrays = {name: array for name, (_, array) in parameters.items()}
        return cls(
            layout={name: one.box for name, one in held.items()},
            bits={name: HeldBits(one, arrays) for name, one in held.items()},
        )

    @classmethod
    def plain(cls, tensors: Mapping[str, np.ndarray]) -> Rank:
        """Return a rank that holds whole tensors."""
        return cls(layout={name: whole_box(array.shape) for name, array in tensors.items()}, bits=tensors)


def plan_all(specs: Sequence[TensorSpec], ranks: Sequence[Rank], targets: Sequence[TargetLayout]) -> list[Cell]:
    """Plan every rank, with every check."""
    tensors = {spec.name: spec for spec in specs}
    check_sources(tensors, [rank.layout for rank in ranks])
    check_targets(tensors, targets, {})
    plans = [plan_source(i, rank.layout, targets, {}, tensors=tensors) for i, rank in enumerate(ranks)]
    return [cell for plan in plans for cell in plan]


def carry(specs: Sequence[TensorSpec], ranks: Sequence[Rank], target: TargetLayout) -> list[dict[str, np.ndarray]]:
    """Return, by engine rank, what arrives of each tensor: its first box's bits, each element written exactly once."""
    arrived: list[dict[str, np.ndarray]] = []
    shapes = {spec.name: spec.shape for spec in specs}
    cells = plan_all(specs, ranks, [target])
    for engine_rank, held in enumerate(target.ranks):
        boxes = {name: boxes[0] for name, boxes in held.items()}
        arrays = {name: np.zeros(box.shape, dtype=np.uint16) for name, box in boxes.items()}
        counts = {name: np.zeros(box.shape, dtype=int) for name, box in boxes.items()}
        for cell in cells:
            if f"{target.layout_id}/{engine_rank}" in cell.targets:
                assert rows_of(cell.box, shapes[cell.tensor]).num_elements == cell.box.num_elements
                source = ranks[cell.source_rank]
                index = slices_in(cell.box, boxes[cell.tensor])
                arrays[cell.tensor][index] = source.bits[cell.tensor][slices_in(cell.box, source.layout[cell.tensor])]
                counts[cell.tensor][index] += 1
        assert all((count == 1).all() for count in counts.values())
        arrived.append(arrays)
    return arrived
