"""The change streams of ``rose.transfer.kernels``, made on a device for many cells at once; only the coded bytes leave it.

Invariants: the bytes and sums are those that the CPU kernels make, cell for cell; nothing here waits for the device before the one
download of numbers at the end, then of bytes, since every buffer has the size that its worst case needs.

Legend of suffixes: ``_n`` one a change, ``_c`` one a cell (of a group, those with changes only).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import attrs
import numpy as np
import torch

from rose.backends.device_codec.keys import Keys, end_of, to_sum, unsigned
from rose.backends.device_codec.pinned import Array, empty_pinned, is_async, to_device
from rose.transfer.kernels import ChangeStreams, Comparison, Rows
from rose.transfer.kernels.constants import shift_of

_RUN = 255
_ESCAPE, _NUM_CODES = 15, 14
_NIBBLE_BYTES = 2
"""Elements of up to so many bytes have 4-bit codes."""
_WIDE_BYTES = 8


@attrs.frozen(kw_only=True, eq=False)
class Changes:
    """What changed in the cells of a group, cell after cell, on the device.

    Attributes:
        cells: Where each cell lies.
        counts: Changes of each cell.
        positions: Flat positions within the cell, ascending in each, int64 ``[num]``.
        new: Patterns now, signed, ``[num]``.
        old: Patterns before.
    """

    cells: Sequence[Rows]
    counts: Sequence[int]
    positions: torch.Tensor
    new: torch.Tensor
    old: torch.Tensor


def code(changes: Changes, keys: Keys, *, is_overwrite: bool) -> list[Comparison]:
    """Return what the CPU kernels' ``compare`` would find in each cell of a group."""
    nothing = Comparison(num_changed=0, streams=None, sum_delta=(0, 0))
    changed = [i for i, count in enumerate(changes.counts) if count]
    if not changed:
        return [nothing] * len(changes.cells)
    group = _Group(
        attrs.evolve(changes, cells=[changes.cells[i] for i in changed], counts=[changes.counts[i] for i in changed]),
        is_overwrite=is_overwrite,
    )
    found = [nothing] * len(changes.cells)
    for i, one in zip(changed, group.coded(keys), strict=True):
        found[i] = one
    return found


@attrs.frozen(kw_only=True, eq=False)
class Layout:
    """Where the streams of each cell of a group lie in those of the group, as far as counts alone tell.

    Attributes:
        has_nibbles: Whether differences have 4-bit codes; else codes are byte planes.
        counts_c: Changes.
        firsts_c: Changes of all cells before.
        shifts_c: Low bits of gaps.
        low_starts_c: Where low parts begin, in bytes.
        low_ends_c: Where they end.
        code_starts_c: Where codes begin.
        code_ends_c: Where they end.
    """

    has_nibbles: bool
    counts_c: Array
    firsts_c: Array
    shifts_c: Array
    low_starts_c: Array
    low_ends_c: Array
    code_starts_c: Array
    code_ends_c: Array

    @classmethod
    def of(cls, cells: Sequence[Rows], counts: Sequence[int], itemsize: int, *, is_overwrite: bool) -> Layout:
        """Return the layout of cells with so many changes each."""
        has_nibbles = itemsize <= _NIBBLE_BYTES and not is_overwrite
        counts_c = np.array(counts, dtype=np.int64)
        shifts = [shift_of(rows.num_elements, n) for rows, n in zip(cells, counts, strict=True)]
        shifts_c = np.array(shifts, dtype=np.int64)
        low_bytes_c = (counts_c * shifts_c + 7) // 8
        code_bytes_c = (counts_c + 1) // 2 if has_nibbles else counts_c * itemsize
        low_ends_c, code_ends_c = np.cumsum(low_bytes_c), np.cumsum(code_bytes_c)
        return cls(
            has_nibbles=has_nibbles,
            counts_c=counts_c,
            firsts_c=np.cumsum(counts_c) - counts_c,
            shifts_c=shifts_c,
            low_starts_c=low_ends_c - low_bytes_c,
            low_ends_c=low_ends_c,
            code_starts_c=code_ends_c - code_bytes_c,
            code_ends_c=code_ends_c,
        )


@attrs.frozen(kw_only=True, eq=False)
class Coded:
    """The streams of a group on the device, and what only the device knew.

    Attributes:
        gaps: Their bytes, and more.
        lows: Bytes.
        codes: Bytes.
        escapes: Elements, and more.
        gap_ends_c: Where each cell's gaps end.
        escape_ends_c: Where its escapes end, in elements.
        sums_c: int64 ``[4, num_cells]``: by how much its sum moves, and the sum of its new patterns.
    """

    gaps: torch.Tensor
    lows: torch.Tensor
    codes: torch.Tensor
    escapes: torch.Tensor
    gap_ends_c: Array
    escape_ends_c: Array
    sums_c: Array


def comparisons(cells: Sequence[Rows], itemsize: int, layout: Layout, coded: Coded) -> list[Comparison]:
    """Bring a group's streams to the host, by one wait, and cut them into cells; those that are no smaller so have none."""
    buffers = [coded.gaps, coded.lows, coded.codes, coded.escapes.view(torch.uint8)]
    ends = [coded.gap_ends_c, layout.low_ends_c, layout.code_ends_c, coded.escape_ends_c * itemsize]
    parts = [_pieces(one, end) for one, end in zip(_downloaded(buffers, ends), ends, strict=True)]
    found = []
    for i, rows in enumerate(cells):
        moved, values = to_sum(coded.sums_c[:2, i].tolist()), to_sum(coded.sums_c[2:, i].tolist())
        num_changed = int(layout.counts_c[i])
        streams = ChangeStreams(
            num_changed=num_changed,
            shift=int(layout.shifts_c[i]),
            gaps=parts[0][i],
            lows=parts[1][i],
            codes=parts[2][i],
            escapes=parts[3][i],
            values_sum=values,
        )
        is_smaller = num_changed > 0 and streams.num_bytes < rows.num_elements * itemsize
        found.append(Comparison(num_changed=num_changed, streams=streams if is_smaller else None, sum_delta=moved))
    return found


class _Group:
    """One group of cells, each with at least one change."""

    def __init__(self, changes: Changes, *, is_overwrite: bool) -> None:
        self.changes, self.is_overwrite = changes, is_overwrite
        self.device, self.itemsize = changes.new.device, changes.new.element_size()
        self.layout = layout = Layout.of(changes.cells, changes.counts, self.itemsize, is_overwrite=is_overwrite)
        self.num = int(layout.counts_c.sum())
        rows = changes.cells
        table = {
            "first": layout.firsts_c,
            "count": layout.counts_c,
            "shift": layout.shifts_c,
            "low_start": layout.low_starts_c,
            "code_start": layout.code_starts_c,
            "row_len": np.array([one.row_len for one in rows], dtype=np.int64),
            "skip": np.array([one.stride - one.row_len for one in rows], dtype=np.int64),
            "start": np.array([one.start for one in rows], dtype=np.int64),
        }
        self._table_c = dict(zip(table, to_device(np.stack(list(table.values())), self.device), strict=True))
        cells = torch.arange(len(rows), dtype=torch.int64, device=self.device)
        self._cell_n = torch.repeat_interleave(cells, self._table_c["count"], output_size=self.num)
        self.rank_n = torch.arange(self.num, dtype=torch.int64, device=self.device) - self.of_cell("first")

    def of_cell(self, name: str) -> torch.Tensor:
        """Return a number of its cell for every change."""
        column = self._table_c[name]
        return column[self._cell_n] if len(self.changes.counts) > 1 else column

    def coded(self, keys: Keys) -> list[Comparison]:
        """Code and bring everything to the host."""
        gaps, gap_ends_n, lows = self._gaps()
        difference_n = self.changes.new - self.changes.old
        values_n = self.changes.new if self.is_overwrite else difference_n
        escapes, escape_ends_n = values_n[:0], torch.zeros_like(self.rank_n)
        if self.layout.has_nibbles:
            codes, escapes, escape_ends_n = self._nibbles(difference_n)
        else:
            codes = self._planes(values_n)
        last_c = to_device(self.layout.firsts_c + self.layout.counts_c - 1, self.device)
        shares = torch.cat([self._moved(keys), self._values(keys)])  # [4, num]
        totals = shares.cumsum(dim=1)[:, last_c]
        numbers = torch.cat([torch.stack([gap_ends_n[last_c], escape_ends_n[last_c]]), totals]).cpu().numpy()
        coded = Coded(
            gaps=gaps,
            lows=lows,
            codes=codes,
            escapes=escapes,
            gap_ends_c=numbers[0] + 1,
            escape_ends_c=numbers[1],
            sums_c=np.diff(numbers[2:], axis=1, prepend=0),
        )
        return comparisons(self.changes.cells, self.itemsize, self.layout, coded)

    def _gaps(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return coded gaps, at which byte each change's ends, and the low parts."""
        positions, shift_n = self.changes.positions, self.of_cell("shift")
        before = torch.roll(positions, 1)
        before.masked_fill_(self.rank_n == 0, -1)
        gap_n = positions - before - 1
        high_n = gap_n >> shift_n
        ends_n = (high_n // _RUN + 1).cumsum(dim=0) - 1
        most = self.num + sum(rows.num_elements // _RUN for rows in self.changes.cells)
        coded = torch.full((most,), _RUN, dtype=torch.uint8, device=self.device)
        coded[ends_n] = (high_n % _RUN).to(torch.uint8)
        return coded, ends_n, self._lows(gap_n, shift_n)

    def _lows(self, gap_n: torch.Tensor, shift_n: torch.Tensor) -> torch.Tensor:
        """Return the low parts of gaps: of a byte its two half bytes, low first, are what 4-bit pieces are, too."""
        num_bytes = int(self.layout.low_ends_c[-1])
        nowhere = 2 * num_bytes
        halves = torch.zeros(nowhere + 1, dtype=torch.uint8, device=self.device)
        at = 2 * self.of_cell("low_start") + self.rank_n * (shift_n >> 2)
        halves[torch.where(shift_n > 0, at, nowhere)] = (gap_n & 15).to(torch.uint8)
        halves[torch.where(shift_n > 4, at + 1, nowhere)] = ((gap_n >> 4) & 15).to(torch.uint8)  # noqa: PLR2004 - 8 bits
        return packed(halves[:nowhere])

    def _nibbles(self, difference_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return 4-bit codes, escapes, and how many of these there are up to each change."""
        signed = difference_n.to(torch.int32)
        code_n = torch.where(signed > 0, 2 * signed - 2, -2 * signed - 1)
        is_escape = code_n >= _NUM_CODES
        code_n.masked_fill_(is_escape, _ESCAPE)
        halves = torch.zeros(2 * int(self.layout.code_ends_c[-1]), dtype=torch.uint8, device=self.device)
        halves[2 * self.of_cell("code_start") + self.rank_n] = code_n.to(torch.uint8)
        ends_n = is_escape.cumsum(dim=0)
        escapes = torch.empty(self.num + 1, dtype=difference_n.dtype, device=self.device)
        escapes[torch.where(is_escape, ends_n - 1, self.num)] = difference_n
        return packed(halves), escapes, ends_n

    def _planes(self, values_n: torch.Tensor) -> torch.Tensor:
        """Return the byte planes of each cell."""
        codes = torch.empty(int(self.layout.code_ends_c[-1]), dtype=torch.uint8, device=self.device)
        at, count_n = self.of_cell("code_start") + self.rank_n, self.of_cell("count")
        pieces = values_n.contiguous().view(torch.uint8).view(self.num, self.itemsize)
        for plane in range(self.itemsize):
            codes[at + plane * count_n] = pieces[:, plane]
        return codes

    def _moved(self, keys: Keys) -> torch.Tensor:
        """Return each change's share of the move of its cell's sum."""
        positions, new, old = self.changes.positions, self.changes.new, self.changes.old
        places = positions + positions // self.of_cell("row_len") * self.of_cell("skip") + self.of_cell("start")
        end = max(end_of(rows) for rows in self.changes.cells)
        if self.itemsize == _WIDE_BYTES:
            return keys.weighed_wide(places, new, old, end=end)
        return keys.weighed(places, unsigned(new) - unsigned(old), end=end)

    def _values(self, keys: Keys) -> torch.Tensor:
        """Return each change's share of the sum of new patterns alone."""
        end = int(self.layout.counts_c.max())
        new = unsigned(self.changes.new)
        if self.itemsize == _WIDE_BYTES:
            return keys.weighed_wide(self.rank_n, new, torch.zeros_like(new), end=end)
        return keys.weighed(self.rank_n, new, end=end)


def packed(halves: torch.Tensor) -> torch.Tensor:
    """Return half bytes, one a byte, as bytes, the first in the low half."""
    return halves[::2] | (halves[1::2] << 4)


def _downloaded(buffers: Sequence[torch.Tensor], ends: Sequence[Array]) -> list[Any]:
    """Bring the used part of each buffer to the host, all by one wait."""
    used = [one[: int(end[-1])] for one, end in zip(buffers, ends, strict=True)]
    device = used[0].device
    if not is_async(device):
        return [one.numpy() for one in used]
    hosts = []
    for one in used:
        host = empty_pinned((one.numel(),), torch.uint8, device)
        hosts.append(host.copy_(one, non_blocking=True))
    torch.cuda.current_stream(device).synchronize()
    return [host.numpy() for host in hosts]


def _pieces(whole: Any, ends: Array) -> list[bytes]:
    return [whole[start:end].tobytes() for start, end in pairwise([0, *ends.tolist()])]
