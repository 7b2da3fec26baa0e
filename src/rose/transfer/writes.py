"""From staged changes to few writes: what belongs to one box of a sink is written at once, however many cells it came in.

The engine is paused while it writes, and a call for every cell would cost more than the writing itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import attrs
import numpy as np

from rose.interfaces.trainer import ShardSpec
from rose.transfer.delta import Bits, Dense, Sparse
from rose.transfer.layout import intersect, rows_of
from rose.transfer.sink import WeightSink


@attrs.frozen(kw_only=True, eq=False)
class Write:
    """One write: new patterns of a box, or of some elements of it."""

    name: str
    box: ShardSpec
    change: Dense | Sparse

    def apply(self, sink: WeightSink) -> None:
        """Write in place."""
        if isinstance(self.change, Dense):
            sink.write_dense(self.name, self.box, self.change.bits)
        else:
            sink.write_sparse(self.name, self.box, self.change.positions, self.change.values)


def plan_writes(
    changes: Mapping[tuple[str, ShardSpec], Dense | Sparse], boxes: Mapping[str, Sequence[ShardSpec]]
) -> list[Write]:
    """Return the writes of staged changes, the sparse ones of a held box joined.

    Args:
        changes: By sink name and part, in row-major order of their positions; sparse ones are new patterns. No two share an element.
        boxes: What the sink holds; every part lies in one of its boxes.
    """
    writes = []
    sparse: defaultdict[tuple[str, ShardSpec], list[tuple[ShardSpec, Sparse]]] = defaultdict(list)
    for (name, part), change in changes.items():
        if isinstance(change, Dense):
            writes.append(Write(name=name, box=part, change=change))
        else:
            sparse[name, _holder(part, boxes[name])].append((part, change))
    for (name, box), parts in sparse.items():
        writes.append(Write(name=name, box=box, change=_joined(box, parts)))
    return writes


def _holder(part: ShardSpec, boxes: Sequence[ShardSpec]) -> ShardSpec:
    return next(box for box in boxes if box == part or intersect(box, part) == part)


def _joined(box: ShardSpec, parts: list[tuple[ShardSpec, Sparse]]) -> Sparse:
    if len(parts) == 1 and parts[0][0] == box:
        return parts[0][1]
    dtype = np.int32 if box.num_elements < 1 << 31 else np.int64
    positions = np.concatenate([_positions_in(box, part, change.positions, np.dtype(dtype)) for part, change in parts])
    values = np.concatenate([change.values for _, change in parts])
    if positions.size > 1 and bool((np.diff(positions) <= 0).any()):
        order = np.argsort(positions, kind="stable")
        positions, values = positions[order], values[order]
    return Sparse(positions=positions, values=values, is_difference=False)


def _positions_in(box: ShardSpec, part: ShardSpec, positions: Bits, dtype: np.dtype[np.signedinteger]) -> Bits:
    """Return positions in a part as positions in the box around it."""
    inner = ShardSpec(offset=tuple(a - b for a, b in zip(part.offset, box.offset, strict=True)), shape=part.shape)
    rows = rows_of(inner, box.shape)
    if rows.num_rows == 1:
        moved: Bits = positions.astype(dtype) + dtype.type(rows.start)
        return moved
    row, column = np.divmod(positions, rows.row_len)
    found: Bits = (row.astype(np.int64) * rows.stride + (column + rows.start)).astype(dtype)
    return found
