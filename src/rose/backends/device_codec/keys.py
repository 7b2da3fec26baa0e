"""The keyed sums of ``rose.transfer.kernels`` on a device, bit for bit: int64 arithmetic wraps there as uint64 does.

Keys come from two tables, one of 1024 factors and one of a factor a span of 1024 positions. The second is made once a device and
grows to the longest tensor seen, 16 bytes for 1024 elements; positions beyond ``_MAX_TABLE_SPANS`` spans are computed each.
"""

from __future__ import annotations

import threading

import torch

from rose.backends.device_codec.pinned import SIGNED_BY_SIZE, wait_for
from rose.transfer.kernels import Rows, Sum
from rose.transfer.kernels.constants import FACTOR_SEEDS, SPAN, tables

_MASK = (1 << 64) - 1
_MAX_TABLE_SPANS = 1 << 22
_CHUNK = 1 << 22
"""Elements that a whole cell is summed at a time: about 100 bytes of working memory each."""
_SMALL_CHUNK = 1 << 20
"""The same on a device that others want the memory of."""
_WIDE_BYTES = 8


def _signed(value: int) -> int:
    """Return a 64-bit pattern as torch takes it."""
    return value - (1 << 64) if value >> 63 else value


def _shifted(value: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Return a logical shift to the right: torch's keeps the sign."""
    return (value >> num_bits) & ((1 << (64 - num_bits)) - 1)


def splitmix64(seed: int, index: torch.Tensor) -> torch.Tensor:
    """Return the outputs number ``index`` (int64) of the splitmix64 generator that starts at ``seed``."""
    state = (index + 1) * _signed(0x9E3779B97F4A7C15) + seed
    state = (state ^ _shifted(state, 30)) * _signed(0xBF58476D1CE4E5B9)
    state = (state ^ _shifted(state, 27)) * _signed(0x94D049BB133111EB)
    return state ^ _shifted(state, 31)


def unsigned(values: torch.Tensor) -> torch.Tensor:
    """Return patterns of 1, 2 or 4 bytes as int64 numbers that are not negative; those of 8 bytes as they are."""
    if values.element_size() == _WIDE_BYTES:
        return values
    return values.to(torch.int64) & ((1 << (8 * values.element_size())) - 1)


def to_sum(pair: list[int]) -> Sum:
    """Return two int64 numbers as a sum."""
    return pair[0] & _MASK, pair[1] & _MASK


class Keys:
    """Keys of positions, on one device. Several threads may ask at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lock = threading.Lock()
        self._rows = torch.from_numpy(tables().astype("int64")).to(device)
        self._factors = torch.empty((2, 0), dtype=torch.int64, device=device)

    def weighed(self, places: torch.Tensor, values: torch.Tensor, *, end: int) -> torch.Tensor:
        """Return each element's share of the two sums, ``[2, num]`` int64.

        Args:
            places: Global positions, int64 ``[num]``.
            values: Numbers to weigh: patterns, or differences of patterns of up to 4 bytes, int64 ``[num]``.
            end: No place is beyond it.
        """
        spans = places >> (SPAN.bit_length() - 1)
        return self._rows[:, places & (SPAN - 1)] * self._factors_of(spans, -(-end // SPAN)) * values

    def weighed_wide(self, places: torch.Tensor, new: torch.Tensor, old: torch.Tensor, *, end: int) -> torch.Tensor:
        """Return the shares of 8-byte elements, which count as two halves, low first, at ``2 g`` and ``2 g + 1``."""
        low = self.weighed(2 * places, (new & 0xFFFFFFFF) - (old & 0xFFFFFFFF), end=2 * end)
        high = self.weighed(2 * places + 1, _shifted(new, 32) - _shifted(old, 32), end=2 * end)
        return low + high

    def state_sum(self, bits: torch.Tensor, rows: Rows, *, chunk: int = _CHUNK) -> Sum:
        """Return the sum of a whole cell, ``[num_rows, row_len]`` or any shape of as many elements in that order.

        Args:
            bits: Signed patterns.
            rows: Where the cell lies in its tensor.
            chunk: How many elements are summed at a time.
        """
        flat = bits.reshape(-1)
        total = torch.zeros(2, dtype=torch.int64, device=self._device)
        end = end_of(rows)
        for start in range(0, flat.numel(), chunk):
            values = unsigned(flat[start : start + chunk])
            positions = torch.arange(start, start + values.numel(), dtype=torch.int64, device=self._device)
            places = positions + positions // rows.row_len * (rows.stride - rows.row_len) + rows.start
            if bits.element_size() == _WIDE_BYTES:
                shares = self.weighed_wide(places, values, torch.zeros_like(values), end=end)
            else:
                shares = self.weighed(places, values, end=end)
            total += shares.sum(dim=1)
        return to_sum(total.tolist())

    def _factors_of(self, spans: torch.Tensor, num_spans: int) -> torch.Tensor:
        if num_spans > _MAX_TABLE_SPANS:
            return self._made(spans)
        with self._lock:
            if self._factors.shape[1] < num_spans:
                self._factors = self._made(torch.arange(num_spans, dtype=torch.int64, device=self._device))
                wait_for(
                    self._device
                )  # other threads, which read it on streams of their own, find it made, and the old one unread
            return self._factors[:, spans]

    @staticmethod
    def _made(spans: torch.Tensor) -> torch.Tensor:
        return torch.stack([splitmix64(seed, spans) | 1 for seed in FACTOR_SEEDS])


def sums_of(module: torch.nn.Module) -> dict[str, list[int]] | None:
    """Return the sum of every parameter's bits, on the devices where they are; ``None`` where one has no room to compute it."""
    keys: dict[torch.device, Keys] = {}
    sums = {}
    try:
        for name, parameter in module.named_parameters():
            bits = parameter.detach().reshape(-1).view(SIGNED_BY_SIZE[parameter.element_size()])
            rows = Rows(num_rows=1, row_len=bits.numel(), start=0, stride=bits.numel())
            if bits.device not in keys:
                keys[bits.device] = Keys(bits.device)
            sums[name] = list(keys[bits.device].state_sum(bits, rows, chunk=_SMALL_CHUNK))
    except torch.OutOfMemoryError:
        return None
    return sums


def end_of(rows: Rows) -> int:
    """Return a number that no global position of a cell is beyond."""
    return rows.start + rows.num_rows * max(rows.stride, rows.row_len)
