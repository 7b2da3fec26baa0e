"""Weights of real shapes and what one optimizer step changes in their bit patterns.

The trainer keeps fp32 masters and sends them rounded to the wire's dtype (to nearest, ties to even). A step moves every master by
``lr * u`` where ``u = m / sqrt(v)`` of AdamW after some steps: about 0.23 wide for uncorrelated gradients, with a heavier tail and a scale of
its own in each row. A bit pattern changes where a master crosses a rounding border, so that most changes are one unit in the last
place, and the share of changes follows the learning rate and the size of the weights. Nothing is flipped at random.

Seeded by tensor name: the same tensor has the same bits in every sample of a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from math import prod, sqrt
from typing import Any

import attrs
import numpy as np

from rose.errors import ConfigError
from rose.interfaces.trainer import TensorSpec
from rose.transfer.layout import bits_dtype

Array = np.ndarray[Any, np.dtype[Any]]

_BLOCK_ELEMENTS = 1 << 18
_POOL_ELEMENTS = (1 << 21) + 7
_UPDATE_WIDTH = 0.23  # of m / sqrt(v) with beta1 0.9: sqrt((1 - 0.9) / (1 + 0.9))
_TAIL_FREEDOM = 5.0
_MAX_UPDATE = 3.0
_ROW_SPREAD = 0.4
_WEIGHT_DECAY = 0.01
_EMBEDDING_WIDTH = 0.02
_NORM_WIDTH = 0.05
_PROBE_ELEMENTS = 1 << 18
_MAX_E4M3 = 448.0
LR_RANGE = (1e-9, 1e-2)
"""Learning rates that mean something: below nothing changes, above everything does."""
_NUM_BISECTIONS = 24


@attrs.frozen(kw_only=True, eq=False)
class Drawn:
    """Bit patterns before and after one step, by tensor name.

    Attributes:
        old: Patterns that engines have.
        new: Patterns of the trainer now.
        lr: Learning rate of the step.
        num_elements: Elements of all tensors.
        num_changed: Elements whose pattern changed.
        num_one_ulp: Changed elements whose pattern moved by one.
    """

    old: Mapping[str, Array]
    new: Mapping[str, Array]
    lr: float
    num_elements: int
    num_changed: int
    num_one_ulp: int

    @property
    def changed_fraction(self) -> float:
        """Return the share of elements whose pattern changed."""
        return self.num_changed / self.num_elements

    @property
    def one_ulp_share(self) -> float:
        """Return the share of changes that are one unit in the last place."""
        return self.num_one_ulp / self.num_changed if self.num_changed else 0.0

    @property
    def num_bytes(self) -> int:
        """Return the size of the weights, in bytes."""
        return sum(bits.nbytes for bits in self.new.values())


def draw(tensors: Sequence[TensorSpec], *, lr: float, seed: int) -> Drawn:
    """Draw weights and one step of AdamW, tensor by tensor; masters live for one block only.

    Args:
        tensors: What to draw.
        lr: Learning rate.
        seed: Of everything.

    Raises:
        ConfigError: A tensor's dtype is not one that this draws.
    """
    old: dict[str, Array] = {}
    new: dict[str, Array] = {}
    num_changed = num_one_ulp = 0
    for spec in tensors:
        before = np.empty(spec.shape, dtype=bits_dtype(spec.dtype))
        after = np.empty_like(before)
        at = 0
        for first, second in _blocks(spec, lr=lr, seed=seed):
            before.reshape(-1)[at : at + first.size] = first
            after.reshape(-1)[at : at + first.size] = second
            at += first.size
            moved = second.astype(np.int64) - first if first.itemsize > 2 else second.astype(np.int32) - first  # noqa: PLR2004 - 2 bytes
            num_changed += int(np.count_nonzero(moved))
            num_one_ulp += int(np.count_nonzero(np.abs(moved) == 1))
        old[spec.name], new[spec.name] = before, after
    return Drawn(
        old=old,
        new=new,
        lr=lr,
        num_elements=sum(bits.size for bits in new.values()),
        num_changed=num_changed,
        num_one_ulp=num_one_ulp,
    )


def find_lr(tensors: Sequence[TensorSpec], fraction: float, *, seed: int) -> float:
    """Return the learning rate at which about ``fraction`` of the bf16 patterns change in one step.

    By bisection over the first elements of every tensor, each counted by the tensor's size.

    Raises:
        ConfigError: No learning rate does.
    """
    low, high = LR_RANGE
    probes = _probes(tensors)
    if not _fraction(probes, low, seed) <= fraction <= _fraction(probes, high, seed):
        message = f"no learning rate from {low:g} to {high:g} changes a share of {fraction:g} of the patterns of these tensors; choose another --changed, or more tensors"
        raise ConfigError(message)
    for _ in range(_NUM_BISECTIONS):
        middle = sqrt(low * high)
        low, high = (middle, high) if _fraction(probes, middle, seed) < fraction else (low, middle)
    return sqrt(low * high)


def _probes(tensors: Sequence[TensorSpec]) -> list[tuple[TensorSpec, int]]:
    """Return tensors of few enough rows, one of each kind of shape, and how many elements each stands for."""
    kinds: dict[tuple[tuple[int, ...], str, float], tuple[TensorSpec, int]] = {}
    for spec in tensors:
        key = (spec.shape, spec.dtype, _center_and_width(spec)[1])
        first, count = kinds.get(key, (spec, 0))
        kinds[key] = (first, count + prod(spec.shape))
    return [(_head(spec), count) for spec, count in kinds.values()]


def _head(spec: TensorSpec) -> TensorSpec:
    row_len = prod(spec.shape[1:])
    if len(spec.shape) < 2 or prod(spec.shape) <= _PROBE_ELEMENTS:  # noqa: PLR2004 - rows and columns
        return spec
    return attrs.evolve(spec, shape=(max(1, _PROBE_ELEMENTS // row_len), *spec.shape[1:]))


def _fraction(probes: Sequence[tuple[TensorSpec, int]], lr: float, seed: int) -> float:
    changed = 0.0
    for spec, weight in probes:
        drawn = draw([spec], lr=lr, seed=seed)
        changed += weight * drawn.num_changed / max(drawn.num_elements, 1)
    return changed / sum(weight for _, weight in probes)


def _blocks(spec: TensorSpec, *, lr: float, seed: int) -> Iterator[tuple[Array, Array]]:
    """Yield the patterns before and after the step of some whole rows at a time."""
    rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(spec.name.encode())]))
    pool = _update_pool(seed)
    center, width = _center_and_width(spec)
    row_len = spec.shape[-1] if spec.shape else 1
    num_rows = prod(spec.shape) // row_len if row_len else 0
    step = max(1, _BLOCK_ELEMENTS // max(row_len, 1))
    for first in range(0, num_rows, step):
        rows = min(step, num_rows - first)
        master = rng.standard_normal(rows * row_len, dtype=np.float32)
        master *= np.float32(width)
        master += np.float32(center)
        before = _round(master, spec.dtype)
        scale = np.exp(_ROW_SPREAD * rng.standard_normal((rows, 1), dtype=np.float32))
        update = _some_updates(pool, rng, master.size).reshape(rows, row_len) * scale
        np.clip(update, -_MAX_UPDATE, _MAX_UPDATE, out=update)
        update *= np.float32(-lr)
        master *= np.float32(1 - lr * _WEIGHT_DECAY)
        master += update.reshape(-1)
        yield before, _round(master, spec.dtype)


def _some_updates(pool: Array, rng: np.random.Generator, count: int) -> Array:
    """Return a run of the pool from a random place."""
    if count >= pool.size:
        return np.resize(pool, count)
    at = int(rng.integers(pool.size - count))
    return pool[at : at + count]


def _center_and_width(spec: TensorSpec) -> tuple[float, float]:
    if len(spec.shape) < 2:  # noqa: PLR2004 - norms and biases
        return (0.0, _EMBEDDING_WIDTH) if spec.name.endswith("bias") else (1.0, _NORM_WIDTH)
    if "embed" in spec.name:
        return 0.0, _EMBEDDING_WIDTH
    return 0.0, 1 / sqrt(spec.shape[-1])


_pools: dict[int, Array] = {}


def _update_pool(seed: int) -> Array:
    """Return many draws of m / sqrt(v), Student-distributed; blocks take runs of it from random places."""
    if seed not in _pools:
        rng = np.random.default_rng(seed)
        _pools[seed] = (_UPDATE_WIDTH * rng.standard_t(_TAIL_FREEDOM, _POOL_ELEMENTS)).astype(np.float32)
    return _pools[seed]


def _round(master: Array, dtype: str) -> Array:
    """Return the patterns of fp32 values in the wire's dtype, rounded to nearest, ties to even."""
    if dtype == "float32":
        return master.view(np.uint32).copy()
    if dtype == "bfloat16":
        bits = master.view(np.uint32)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        odd += np.uint32(0x7FFF)
        odd += bits
        odd >>= np.uint32(16)
        return odd.astype(np.uint16)
    if dtype == "float16":
        return master.astype(np.float16).view(np.uint16)
    if dtype == "float8_e4m3fn":
        return _round_e4m3(master)
    message = f"weights of dtype {dtype!r} cannot be drawn; allowed: float32, bfloat16, float16, float8_e4m3fn"
    raise ConfigError(message)


def _round_e4m3(master: Array) -> Array:
    """Round to fp8 with 4 exponent and 3 mantissa bits, the block scale taken as 1/448 of four widths of the weights."""
    scaled = np.abs(master)
    scaled *= np.float32(_MAX_E4M3 / 4 / max(float(master.std()), 1e-12))
    np.minimum(scaled, np.float32(_MAX_E4M3), out=scaled)
    bits = scaled.view(np.uint32)
    normal = (
        (bits + np.uint32((1 << 19) - 1) + ((bits >> np.uint32(20)) & np.uint32(1))) >> np.uint32(20)
    ) - np.uint32(120 << 3)
    subnormal = np.rint(scaled * np.float32(1 << 9)).astype(np.uint32)
    codes = np.where(scaled < np.float32(1 / 64), subnormal, normal).astype(np.uint8)
    return codes | (np.signbit(master).astype(np.uint8) << np.uint8(7))
