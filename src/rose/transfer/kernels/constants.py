"""What both implementations agree on: pseudo-random keys of the sums, and which shift follows from which density."""

from __future__ import annotations

from functools import cache

import numpy as np

from rose.transfer.kernels import Array

SPAN = 1024
"""Elements that share one factor M."""
TABLE_SEEDS = (1, 2)
FACTOR_SEEDS = (3, 4)
_MAX_MEAN_GAP = {0: 96, 4: 1536}


def shift_of(num_elements: int, num_changed: int) -> int:
    """Return how many low bits of a gap are kept apart in a cell with so many changes, at least 1."""
    num_unchanged = num_elements - num_changed
    return next((shift for shift, mean in _MAX_MEAN_GAP.items() if num_unchanged < mean * num_changed), 8)


def splitmix64(seed: int, index: Array) -> Array:
    """Return the outputs number ``index`` (uint64, from 0) of the splitmix64 generator that starts at ``seed``."""
    state = np.uint64(seed) + (index.astype(np.uint64) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = state ^ (state >> np.uint64(31))
    return mixed


@cache
def tables() -> Array:
    """Return T, ``[2, 1024]`` odd uint32: the high halves of the first outputs, the lowest bit set."""
    index = np.arange(SPAN, dtype=np.uint64)
    return np.stack([(splitmix64(seed, index) >> np.uint64(32)).astype(np.uint32) | 1 for seed in TABLE_SEEDS])


def factors(spans: Array) -> Array:
    """Return M, ``[2, num_spans]`` odd uint64, of each span."""
    return np.stack([splitmix64(seed, spans) | np.uint64(1) for seed in FACTOR_SEEDS])
