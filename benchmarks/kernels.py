"""Speed of the codec's inner loops, in C and in numpy, beside a copy of the same bytes by the same core in the same run.

Run with ``python benchmarks/kernels.py [--megabytes 512] [--out FILE]``. A buffer is compared as cells of 4M elements: whole ones, which
are contiguous, or boxes ``[4096, 4096]`` cut into columns as tensor parallelism cuts them, together (``compare_columns``) and each cell
alone (``compare``). Rates are 10^9 dense bytes a second (``compare``, ``compare_columns``, ``state_sum``) or 10^9 changes a second
(``decode``, ``gather``, ``scatter``, ``add``); ``over_copy`` is a dense rate divided by the copy's. Times are wall times, each the
shortest of a few rounds in which everything, the copy too, is measured once in turn. Implementations other than the fastest take
the first 8 MB only.
"""

from __future__ import annotations

import argparse
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench.machine import commit, machine, versions
from rose.errors import BackendUnavailableError
from rose.transfer import kernels
from rose.transfer.kernels import Array, ChangeStreams, Kernels, Rows
from rose.transfer.kernels.native import NativeKernels
from rose.transfer.kernels.numpy_kernels import NumpyKernels

SEED = 1
NUM_ROUNDS = 3
TILE_BYTES = 1 << 24
CASES = (("u2", 0.001), ("u2", 0.01), ("u2", 0.1), ("u2", 0.5), ("u1", 0.01), ("u4", 0.01), ("u8", 0.01))
SHARE_OF_ONE_UNIT = 0.88
OTHERS_BYTES = 1 << 23
CELL_ELEMENTS = 1 << 22
SIDE = 4096
NUM_COLUMNS = (4, 8)
SMALL = (2_000, 20_000)


def implementations() -> list[Kernels]:
    """Return numpy and every instruction set of the C library that this machine has."""
    found: list[Kernels] = [NumpyKernels()]
    try:
        native = {loops.name: loops for loops in (NativeKernels(level=level) for level in range(3))}
    except BackendUnavailableError as error:
        print(f"note: {error}")
        native = {}
    return [*found, *native.values()]


def states(dtype: np.dtype[Any], num_bytes: int, fraction: float) -> tuple[Array, Array]:
    """Return new and old patterns, ``[1, num_elements]``: 88 % of the changes are by one unit, the others by a few."""
    rng = np.random.default_rng(SEED)
    tile = min(TILE_BYTES, num_bytes) // dtype.itemsize
    old = rng.integers(0, np.iinfo(dtype).max, tile, dtype=dtype)
    size = np.where(rng.random(tile) < SHARE_OF_ONE_UNIT, 1, 1 + rng.geometric(0.25, tile))
    step = (size * rng.choice([-1, 1], tile)).astype(dtype)
    new = np.where(rng.random(tile) < fraction, old + step, old)
    copies = num_bytes // (tile * dtype.itemsize)
    return np.tile(new, copies).reshape(1, -1), np.tile(old, copies).reshape(1, -1)


def seconds(works: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Return the shortest wall time of each work, over rounds in which each is done once, after one round to warm up."""
    best = dict.fromkeys(works, float("inf"))
    for number in range(NUM_ROUNDS + 1):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            if number:
                best[name] = min(best[name], time.perf_counter() - start)
    return best


def per_dense_byte(best: Mapping[str, float], num_bytes: int, names: Sequence[str]) -> dict[str, float]:
    """Return rates and their ratios to the copy's."""
    rates = {f"{name}_gb_per_s": num_bytes / best[name] / 1e9 for name in ("copy", *names)}
    return rates | {f"{name}_over_copy": best["copy"] / best[name] for name in names}


def for_each(work: Callable[..., object], *arguments: Sequence[Any]) -> None:
    """Do a work for every cell and drop what comes of it, as nothing that fills fresh memory is to be measured."""
    for each in zip(*arguments, strict=True):
        work(*each)


class Receiver:
    """What a receiver does with the streams of many cells, each step over all of them."""

    def __init__(self, loops: Kernels, cells: Sequence[tuple[Array, Array, Rows]]) -> None:
        self.loops, self.cells = loops, cells
        self.streams: list[ChangeStreams] = []
        for new, old, rows in cells:
            found = loops.compare(new, old, rows, is_overwrite=False)
            if found.streams is None:
                message = "these changes give no streams"
                raise SystemExit(message)
            self.streams.append(found.streams)
        self.target = [old.copy() for _, old, _ in cells]
        self.changes = [self.decode(streams, new) for streams, (new, _, _) in zip(self.streams, cells, strict=True)]
        self.positions = [positions for positions, _ in self.changes]
        self.moves = [moves for _, moves in self.changes]
        self.values = [loops.gather(*each) for each in zip(self.target, self.positions, strict=True)]

    @property
    def num_changed(self) -> int:
        """Return the changes of all cells."""
        return sum(streams.num_changed for streams in self.streams)

    def decode(self, streams: ChangeStreams, new: Array) -> tuple[Array, Array]:
        """Read a cell's streams."""
        return self.loops.decode(streams, num_elements=new.size, dtype=new.dtype, is_overwrite=False)

    def works(self) -> dict[str, Callable[[], object]]:
        """Return each step over all cells."""
        loops, news = self.loops, [new for new, _, _ in self.cells]
        return {
            "decode": lambda: for_each(self.decode, self.streams, news),
            "gather": lambda: for_each(loops.gather, self.target, self.positions),
            "scatter": lambda: for_each(loops.scatter, self.target, self.positions, self.values),
            "add": lambda: for_each(loops.add, self.target, self.positions, self.moves),
        }

    def check(self) -> None:
        """Add the differences once and refuse to go on if what comes out is not the new state."""
        for_each(self.loops.add, self.target, self.positions, self.moves)
        is_same = all(np.array_equal(target, new) for target, (new, _, _) in zip(self.target, self.cells, strict=True))
        if not is_same:
            message = f"{self.loops.name}: the receiver's bits differ from the sender's"
            raise SystemExit(message)


def measure(loops: Kernels, new: Array, old: Array) -> dict[str, Any]:
    """Check and time one implementation on one pair of states, in contiguous cells."""
    cells = [
        (fresh, stale, Rows(num_rows=1, row_len=fresh.size, start=start, stride=fresh.size))
        for start in range(0, new.size, CELL_ELEMENTS)
        for fresh, stale in [tuple(bits[:, start : start + CELL_ELEMENTS] for bits in (new, old))]
    ]
    receiver, staging = Receiver(loops, cells), np.empty_like(new)
    receiver.check()
    best = seconds(
        {
            "copy": lambda: np.copyto(staging, new),
            "compare": lambda: for_each(partial(loops.compare, is_overwrite=False), *zip(*cells, strict=True)),
            "state_sum": lambda: for_each(
                loops.state_sum, [new for new, _, _ in cells], [rows for _, _, rows in cells]
            ),
            **receiver.works(),
        }
    )
    return {
        "measured_bytes": new.nbytes,
        "stream_bytes_per_change": sum(streams.num_bytes for streams in receiver.streams) / receiver.num_changed,
        **per_dense_byte(best, new.nbytes, ("compare", "state_sum")),
        **{
            f"{name}_g_changes_per_s": receiver.num_changed / best[name] / 1e9
            for name in ("decode", "gather", "scatter", "add")
        },
    }


def measure_columns(loops: Kernels, new: Array, old: Array, num_columns: int) -> dict[str, Any]:
    """Time one implementation on boxes that are cut into columns, cells together and each alone."""
    boxes = [bits.reshape(-1, SIDE) for bits in (new, old)]
    width, staging = SIDE // num_columns, np.empty_like(new)
    height = SIDE if len(boxes[0]) % SIDE == 0 else len(boxes[0])
    pairs = [(boxes[0][row : row + height], boxes[1][row : row + height]) for row in range(0, len(boxes[0]), height)]
    cells = [Rows(num_rows=height, row_len=width, start=start, stride=SIDE) for start in range(0, SIDE, width)]

    def alone() -> None:
        for fresh, stale in pairs:
            for cell in cells:
                columns = slice(cell.start, cell.start + width)
                loops.compare(fresh[:, columns], stale[:, columns], cell, is_overwrite=False)

    best = seconds(
        {
            "copy": lambda: np.copyto(staging, new),
            "compare_columns": lambda: [loops.compare_columns([pair], cells, is_overwrite=False) for pair in pairs],
            "compare": alone,
        }
    )
    return {"measured_bytes": new.nbytes, **per_dense_byte(best, new.nbytes, ("compare_columns", "compare"))}


def results(num_bytes: int) -> Iterator[dict[str, Any]]:
    """Measure every case with every implementation."""
    for name, fraction in CASES:
        new, old = states(np.dtype(name), num_bytes, fraction)
        yield {
            "dtype": name,
            "dense_bytes": new.nbytes,
            "changed_fraction": fraction,
            "kernels": {loops.name: measure(loops, *part) for loops, part in parts(new, old)},
        }


def column_results(num_bytes: int) -> Iterator[dict[str, Any]]:
    """Measure boxes cut into columns with every implementation."""
    for name in ("u2", "u1"):
        new, old = states(np.dtype(name), num_bytes, 0.01)
        for num_columns in NUM_COLUMNS:
            yield {
                "dtype": name,
                "dense_bytes": new.nbytes,
                "changed_fraction": 0.01,
                "num_columns": num_columns,
                "kernels": {loops.name: measure_columns(loops, *part, num_columns) for loops, part in parts(new, old)},
            }


def parts(new: Array, old: Array) -> Iterator[tuple[Kernels, tuple[Array, Array]]]:
    """Yield each implementation and what it is measured on: all of it for the fastest, the last one."""
    loops = implementations()
    for each in loops:
        num = new.size if each is loops[-1] else min(new.size, OTHERS_BYTES // new.itemsize)
        yield each, (new[:, :num], old[:, :num])


def small_cells() -> Iterator[dict[str, Any]]:
    """Measure what a call costs for cells of a few thousand elements, 1 % changed."""
    for num_elements in SMALL:
        new, old = states(np.dtype("u2"), 2 * num_elements, 0.01)
        rows = Rows(num_rows=1, row_len=num_elements, start=0, stride=num_elements)

        def many(loops: Kernels, new: Array = new, old: Array = old, rows: Rows = rows) -> None:
            for _ in range(1000):
                loops.compare(new, old, rows, is_overwrite=False)

        best = seconds({loops.name: partial(many, loops) for loops in implementations()})
        yield {"num_elements": num_elements, "compare_us": {name: 1000 * time_s for name, time_s in best.items()}}


def main() -> None:
    """Run everything and print one JSON object."""
    parser = argparse.ArgumentParser(description="Speed of the delta codec's inner loops, as JSON.")
    parser.add_argument("--megabytes", type=int, default=512, help="dense size of each buffer (three at a time)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the JSON there too")
    arguments = parser.parse_args()
    start = time.perf_counter()
    report = {
        "benchmark": "kernels",
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(Path(kernels.__file__).parent),
        "machine": machine(),
        "versions": dict(versions(("rose-rl", "numpy"))),
        "num_threads": 1,
        "results": list(results(arguments.megabytes << 20)),
        "columns": list(column_results(arguments.megabytes << 20)),
        "small_cells": list(small_cells()),
    }
    report["wall_s"] = round(time.perf_counter() - start, 1)
    text = json.dumps(_rounded(report), indent=2)
    if arguments.out is not None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(text + "\n", encoding="utf-8")
    print(text)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.4g}") if isinstance(value, float) else value


if __name__ == "__main__":
    main()
