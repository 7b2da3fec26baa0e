"""How near to the speed of memory the codec runs: everything beside ``np.copyto`` of the same bytes, in turn, in one run.

* ``encode``: compare, cut and code the cells of a real plan, without compression.
* ``whole``: the trainer rank's whole side: that, packing, zstd, checksums, and handing the blobs over.
* ``copy``: the dense copy of the same bytes by the same cores, which are pinned.

The cast from fp32 masters is timed apart.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import attrs
import numpy as np

from rose.bench.job import BitsTrainer, on_cores
from rose.bench.weights import Drawn
from rose.interfaces.trainer import TensorSpec
from rose.transfer import delta, kernels
from rose.transfer.encoder import RankEncoder
from rose.transfer.layout import TargetLayout, bits_dtype, rows_of, slices_in, whole_box
from rose.transfer.plan import Cell, plan_source
from rose.transfer.units import SideBySide, Slot, plan_units

Array = np.ndarray[Any, np.dtype[Any]]

NUM_RUNS = 7
_CAST_ELEMENTS = 1 << 26


@attrs.frozen(kw_only=True)
class CoreRates:
    """Rates with one number of pinned cores, in GB of dense weights a second, medians of ``NUM_RUNS`` interleaved runs."""

    num_cores: int
    copy_gb_per_s: float
    encode_gb_per_s: float
    whole_gb_per_s: float


@attrs.frozen(kw_only=True)
class CodecRates:
    """All rates.

    Attributes:
        kernels: Which inner loops ran.
        num_bytes: Dense size of what was encoded.
        num_cells: Cells of the plan.
        by_cores: One entry a number of cores.
        blob_bytes: What the whole side put.
        cast_gb_per_s: Cast of fp32 masters, in GB of bf16 a second, and with what; ``None`` without torch.
    """

    kernels: str
    num_bytes: int
    num_cells: int
    by_cores: tuple[CoreRates, ...]
    blob_bytes: int
    cast_gb_per_s: float | None


def measure_rates(
    tensors: Sequence[TensorSpec], drawn: Drawn, layouts: Sequence[TargetLayout], *, max_cores: int = 2
) -> CodecRates:
    """Measure with 1 to ``max_cores`` cores, as far as there are that many."""
    trainer = BitsTrainer(tensors, drawn.old)
    cells = plan_source(0, trainer.layout(), layouts, {})
    comparisons = _comparisons(tensors, cells, drawn)
    targets = {name: np.ones_like(bits) for name, bits in drawn.new.items()}
    found, blob_bytes = [], 0
    for wanted in range(1, max_cores + 1):
        with on_cores(wanted) as num_cores:
            if num_cores == wanted:
                rates, blob_bytes = _measure(trainer, cells, comparisons, targets, drawn, num_cores)
                found.append(rates)
    with on_cores(1):
        cast = _cast_rate()
    return CodecRates(
        kernels=kernels.load().name,
        num_bytes=drawn.num_bytes,
        num_cells=len(cells),
        by_cores=tuple(found),
        blob_bytes=blob_bytes,
        cast_gb_per_s=cast,
    )


def _comparisons(tensors: Sequence[TensorSpec], cells: Sequence[Cell], drawn: Drawn) -> list[Callable[[], object]]:
    """Return what the encoder does to compare and code all cells: a call for each of its units."""
    shapes = {spec.name: spec.shape for spec in tensors}
    slots = [
        Slot(
            cell=cell,
            index=slices_in(cell.box, whole_box(shapes[cell.tensor])),
            rows=rows_of(cell.box, shapes[cell.tensor]),
        )
        for cell in cells
    ]
    loops = kernels.load()

    def side_by_side(columns: SideBySide, numbers: Sequence[int]) -> object:
        new, old = drawn.new[columns.tensor], drawn.old[columns.tensor]
        pairs = ((delta.as_rows(new[slab], rows), delta.as_rows(old[slab], rows)) for slab, rows in columns.slabs())
        return loops.compare_columns(pairs, [slots[number].rows for number in numbers], is_overwrite=False)

    def one(slot: Slot) -> object:
        new, old = (delta.as_rows(slot.view(bits[slot.cell.tensor]), slot.rows) for bits in (drawn.new, drawn.old))
        return loops.compare(new, old, slot.rows, is_overwrite=False)

    found: list[Callable[[], object]] = []
    for unit in plan_units(slots, {spec.name: bits_dtype(spec.dtype) for spec in tensors}):
        if unit.columns is not None:
            found.append(partial(side_by_side, unit.columns, unit.numbers))
        else:
            found += [partial(one, slots[number]) for number in unit.numbers]
    return found


def _measure(
    trainer: BitsTrainer,
    cells: Sequence[Cell],
    comparisons: Sequence[Callable[[], object]],
    targets: dict[str, Array],
    drawn: Drawn,
    cores: int,
) -> tuple[CoreRates, int]:
    encoder = RankEncoder(trainer.tensors(), trainer.layout(), cells, num_threads=cores)
    copies = _halved([(targets[name], bits) for name, bits in drawn.new.items()], cores)
    sizes: list[int] = []

    def take(_: str, payload: Any) -> None:
        sizes.append(len(payload))

    def whole() -> None:
        sizes.clear()
        trainer.bits = drawn.new
        encoder.encode(trainer.shards(), take, "bench", is_full=False, on_key=lambda _: None)

    trainer.bits = drawn.old
    encoder.encode(trainer.shards(), lambda *_: None, "bench", is_full=True, on_key=lambda _: None)
    encoder.commit(trainer.shards())
    with ThreadPoolExecutor(cores) as pool:
        works: dict[str, Callable[[], None]] = {
            "copy": lambda: _drain(pool.map(lambda pair: np.copyto(*pair), copies)),
            "encode": lambda: _drain(pool.map(lambda compare: compare(), comparisons)),
            "whole": whole,
        }
        rates = _rates(works, drawn.num_bytes)
    encoder.close()
    return CoreRates(
        num_cores=cores,
        copy_gb_per_s=rates["copy"],
        encode_gb_per_s=rates["encode"],
        whole_gb_per_s=rates["whole"],
    ), sum(sizes)


def _rates(works: dict[str, Callable[[], None]], num_bytes: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(NUM_RUNS):
        for name, work in works.items():
            began = time.perf_counter()
            work()
            times[name].append(time.perf_counter() - began)
    return {name: num_bytes / median(found) / 1e9 for name, found in times.items()}


def _halved(pairs: Sequence[tuple[Array, Array]], parts: int) -> list[tuple[Array, Array]]:
    """Cut large arrays into as many parts as there are cores, so that all have as much to copy."""
    if parts == 1:
        return list(pairs)
    found = []
    for target, source in pairs:
        flat_target, flat_source = target.reshape(-1), source.reshape(-1)
        edges = [flat_source.size * part // parts for part in range(parts + 1)]
        found += [(flat_target[a:b], flat_source[a:b]) for a, b in pairwise(edges)]
    return found


def _drain(results: Any) -> None:
    for _ in results:
        pass


def _cast_rate() -> float | None:
    """Return at what rate torch casts fp32 to bf16, in GB of bf16 a second on one core."""
    try:
        import torch  # noqa: PLC0415 - heavy and optional
    except ImportError:
        return None
    torch.set_num_threads(1)
    masters = torch.ones(_CAST_ELEMENTS, dtype=torch.float32)
    wire = torch.zeros(_CAST_ELEMENTS, dtype=torch.bfloat16)

    def cast() -> None:
        wire.copy_(masters)

    return _rates({"cast": cast}, 2 * _CAST_ELEMENTS)["cast"]
