"""Speed of the codec's inner loops, in C and in numpy, beside a copy of the same bytes by the same core in the same run.

Run with ``python benchmarks/kernels.py [--megabytes 512] [--out FILE]``. Rates are 10^9 dense bytes a second (``compare``,
``state_sum``) or 10^9 changes a second (``decode``, ``gather``, ``scatter``); ``over_copy`` is a dense rate divided by the
copy's, each from its shortest time. Times are of the thread's own processor time, so another process on the core does not count,
but one that shares the memory does: see ``load_1min``.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from rose.errors import BackendUnavailableError
from rose.transfer import kernels
from rose.transfer.kernels import Array, Kernels, Rows
from rose.transfer.kernels.native import NativeKernels
from rose.transfer.kernels.numpy_kernels import NumpyKernels

SEED = 1
NUM_RUNS = 3
TILE_BYTES = 1 << 24
CASES = (("u2", 0.001), ("u2", 0.01), ("u2", 0.1), ("u2", 0.5), ("u1", 0.01), ("u4", 0.01), ("u8", 0.01))
SHARE_OF_ONE_UNIT = 0.88
MAX_NUMPY_BYTES = 1 << 24
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


def seconds(work: Callable[[], object]) -> float:
    """Return the shortest processor time of ``work``, after one run to warm up."""
    work()
    times = []
    for _ in range(NUM_RUNS):
        start = time.thread_time()
        work()
        times.append(time.thread_time() - start)
    return min(times)


def measure(loops: Kernels, new: Array, old: Array, copy_gb_per_s: float) -> dict[str, Any]:
    """Check and time one implementation on one pair of states, numpy on the first 16 MB of them."""
    if loops.name == "numpy":
        new, old = (bits[:, : MAX_NUMPY_BYTES // bits.itemsize] for bits in (new, old))
    rows = Rows(num_rows=1, row_len=new.size, start=0, stride=new.size)
    found = loops.compare(new, old, rows, is_overwrite=False)
    if found.streams is None:
        message = "these changes give no streams"
        raise SystemExit(message)
    streams, target = found.streams, old.copy()
    shape: dict[str, Any] = {"num_elements": new.size, "dtype": new.dtype, "is_overwrite": False}
    positions, moves = loops.decode(streams, **shape)
    values = loops.gather(target, positions) + moves
    loops.scatter(target, positions, values)
    if not np.array_equal(target, new):
        message = f"{loops.name}: the receiver's bits differ from the sender's"
        raise SystemExit(message)
    compare_s = seconds(lambda: loops.compare(new, old, rows, is_overwrite=False))
    sum_s = seconds(lambda: loops.state_sum(new, rows))
    by_change = {
        "decode": seconds(lambda: loops.decode(streams, **shape)),
        "gather": seconds(lambda: loops.gather(target, positions)),
        "scatter": seconds(lambda: loops.scatter(target, positions, values)),
    }
    rates = {"compare": new.nbytes / compare_s / 1e9, "state_sum": new.nbytes / sum_s / 1e9}
    return {
        "measured_bytes": new.nbytes,
        "stream_bytes_per_change": streams.num_bytes / found.num_changed,
        **{f"{name}_gb_per_s": rate for name, rate in rates.items()},
        **{f"{name}_over_copy": rate / copy_gb_per_s for name, rate in rates.items()},
        **{f"{name}_g_changes_per_s": found.num_changed / time_s / 1e9 for name, time_s in by_change.items()},
    }


def results(num_bytes: int) -> Iterator[dict[str, Any]]:
    """Measure every case with every implementation."""
    loops = implementations()
    for name, fraction in CASES:
        new, old = states(np.dtype(name), num_bytes, fraction)
        staging = np.empty_like(new)
        copy_gb_per_s = new.nbytes / seconds(lambda new=new, staging=staging: np.copyto(staging, new)) / 1e9  # type: ignore[misc]
        yield {
            "dtype": name,
            "dense_bytes": new.nbytes,
            "changed_fraction": fraction,
            "copy_gb_per_s": copy_gb_per_s,
            "kernels": {each.name: measure(each, new, old, copy_gb_per_s) for each in loops},
        }


def small_cells() -> Iterator[dict[str, Any]]:
    """Measure what a call costs for cells of a few thousand elements, 1 % changed."""
    for num_elements in SMALL:
        new, old = states(np.dtype("u2"), 2 * num_elements, 0.01)
        rows = Rows(num_rows=1, row_len=num_elements, start=0, stride=num_elements)
        found: dict[str, float] = {}
        for loops in implementations():

            def many(loops: Kernels = loops, new: Array = new, old: Array = old, rows: Rows = rows) -> None:
                for _ in range(1000):
                    loops.compare(new, old, rows, is_overwrite=False)

            found[loops.name] = 1000 * seconds(many)
        yield {"num_elements": num_elements, "compare_us": found}


def machine() -> dict[str, Any]:
    """Return what the figures depend on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "cpu": models[0] if models else platform.processor(),
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "load_1min": os.getloadavg()[0],
    }


def commit() -> str:
    """Return the commit that was measured, with ``-dirty`` where the kernels' sources differ from it."""
    folder = Path(kernels.__file__).parent
    git = ["git", "-C", str(folder)]
    head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    changes = subprocess.run([*git, "status", "--porcelain", "."], capture_output=True, text=True, check=False)
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


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
        "commit": commit(),
        "machine": machine(),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in ("rose-rl", "numpy")}},
        "num_threads": 1,
        "results": list(results(arguments.megabytes << 20)),
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
