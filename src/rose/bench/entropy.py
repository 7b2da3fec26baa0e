"""The fewest bytes that the changes of a step can take without a model of the weights themselves.

Per tensor: positions cost the entropy of a coin that falls with the tensor's changed share, ``H(p) / p`` bits a change; the
differences of bit patterns cost their order-0 entropy. Tables that a decoder would need are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from typing import Any

import attrs
import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@attrs.frozen(kw_only=True)
class Bound:
    """Changed elements and the bits that they take at least."""

    num_changed: int
    position_bits: float
    value_bits: float

    @property
    def bytes_per_changed(self) -> float:
        """Return the bound in bytes for a changed element, 0 without one."""
        return (self.position_bits + self.value_bits) / 8 / self.num_changed if self.num_changed else 0.0


def bound(old: Mapping[str, Array], new: Mapping[str, Array]) -> Bound:
    """Return the bound of all tensors together, each with its own share and its own differences.

    Args:
        old: Patterns before, unsigned integers, by name.
        new: Patterns after, same names and shapes.
    """
    total, position_bits, value_bits = 0, 0.0, 0.0
    for name, after in new.items():
        flat_old, flat_new = old[name].reshape(-1), after.reshape(-1)
        differences = _differences(flat_old, flat_new)
        if not differences.size:
            continue
        share = differences.size / flat_new.size
        total += differences.size
        position_bits += flat_new.size * _coin_bits(share)
        _, counts = np.unique(differences, return_counts=True)
        value_bits += float(-(counts * np.log2(counts / differences.size)).sum())
    return Bound(num_changed=total, position_bits=position_bits, value_bits=value_bits)


def _differences(old: Array, new: Array) -> Array:
    step = 1 << 22
    found = []
    for start in range(0, new.size, step):
        a, b = old[start : start + step], new[start : start + step]
        at = np.flatnonzero(a != b)
        found.append(b[at] - a[at])
    return np.concatenate(found) if found else new[:0]


def _coin_bits(share: float) -> float:
    return 0.0 if share in (0.0, 1.0) else -(share * log2(share) + (1 - share) * log2(1 - share))
