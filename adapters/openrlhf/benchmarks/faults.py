"""The same fault with OpenRLHF alone and over a pool: what is lost, and whether the job lives. Writes a table as JSON.

``python benchmarks/faults.py --out benchmarks/results/faults.json`` in the environment of the adapter's tests; ten minutes on two cores. Three steps of four
prompts and two samples each, on four engines, of which one fails after the first step. Over the pool they are real vLLM engines, one of them borrowed; alone they
are OpenRLHF's own actors around a Hugging Face model (see ``alone.py``).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "tests")]

from harness import SMALL, Run, make_model, make_prompts
from rose.bench.machine import commit, machine, versions
from rose.testing import PoolSite

FAULTS = ("none", "fails fast", "dies in mid-turn", "hangs", "fails an update")
STEPS, PROMPTS, SAMPLES = 3, 4, 2
PACKAGES = ("torch", "ray", "transformers", "openrlhf", "deepspeed")
_STUCK_S = 90.0


def main() -> None:
    """Run all of it, or what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=HERE / "results/faults.json")
    parser.add_argument("--side", choices=("alone", "pool", "both"), default="both")
    given = parser.parse_args()
    rows = json.loads(given.out.read_text())["rows"] if given.out.exists() else []
    with tempfile.TemporaryDirectory(prefix="rose-faults-") as name:
        folder = Path(name)
        make_model(folder / "model")
        if given.side != "pool":
            for fault in FAULTS:
                add(given.out, rows, "alone", fault, lambda fault=fault: alone(folder, fault))
        if given.side != "alone":
            with PoolSite.start(
                folder / "model", dedicated=3, borrowed=1, dtype="float32", max_seqs=2, stall_s=4.0
            ) as site:
                for fault in sorted(
                    FAULTS[1:], key=lambda fault: fault == "dies in mid-turn"
                ):  # the dead one stays dead
                    add(given.out, rows, "pool", fault, lambda fault=fault: over_pool(folder, site, fault))


def add(out: Path, rows: list[dict[str, Any]], side: str, fault: str, measure: Callable[[], dict[str, Any]]) -> None:
    """Measure a row unless it is there, and write the file."""
    if any((row["side"], row["fault"]) == (side, fault) for row in rows):
        return
    began_s = time.monotonic()
    row = {
        "side": side,
        "fault": fault,
        **measure(),
        "wall_s": round(time.monotonic() - began_s, 1),
        "commit": commit(),
    }
    print(json.dumps(row), flush=True)
    rows.append(row)
    out.parent.mkdir(parents=True, exist_ok=True)
    setting = {"steps": STEPS, "prompts_a_step": PROMPTS, "samples_a_prompt": SAMPLES, "engines": 4}
    text = {"machine": machine(), "versions": versions(PACKAGES), **setting, "rows": rows}
    out.write_text(json.dumps(text, indent=1) + "\n")


def alone(folder: Path, fault: str) -> dict[str, Any]:
    """Run OpenRLHF alone."""
    here = folder / f"alone-{fault.replace(' ', '-')}"
    variables = {"FAULT": fault, "PYTHONPATH": os.pathsep.join([str(HERE.parent / "tests/cpu"), str(HERE)])}
    run = Run.start(
        here, [sys.executable, str(HERE / "alone.py"), "--vllm.num_engines", "4", *flags(folder)], variables
    )
    return outcome(run, lambda _number, _weights: None)


def over_pool(folder: Path, site: PoolSite, fault: str) -> dict[str, Any]:
    """Run over the pool."""
    here = folder / f"pool-{fault.replace(' ', '-')}"
    command = [
        sys.executable,
        "-m",
        "rose_openrlhf",
        "--rose.pool",
        site.url,
        "--rose.weights_dtype",
        "float32",
        "--vllm.num_engines",
        "1",
    ]
    run = Run.start(here, [*command, *flags(folder)], {})
    switch = {"fails fast": site.fail_fast, "hangs": site.hang, "fails an update": site.fail_updates}.get(fault)

    def on_sync(number: int, _: Any) -> None:
        if number == 0 and switch is not None:
            switch("own1")
        elif number == 0 and fault == "dies in mid-turn":
            threading.Thread(target=kill_in_mid_turn, args=(site, "own1"), daemon=True).start()

    try:
        return outcome(run, on_sync)
    finally:
        if switch is not None:
            switch("own1", on=False)  # the next run's first version brings it back


def kill_in_mid_turn(site: PoolSite, engine: str) -> None:
    """Kill an engine once it has a turn."""
    while not site.status()["engines"][engine]["num_in_flight"]:
        time.sleep(0.02)
    site.kill(engine)


def flags(folder: Path) -> list[str]:
    """Return OpenRLHF's own flags, the same on both sides."""
    prompts = make_prompts(folder / "prompts.jsonl", PROMPTS * STEPS)
    words = f"""
        --actor.model_name_or_path {folder / "model"} --actor.num_nodes 1 --actor.num_gpus_per_node 1
        --data.prompt_dataset {prompts} --data.label_key label --reward.remote_url {HERE.parent / "examples/reward.py"}
        --algo.advantage.estimator rloo --algo.advantage.is_correction_level token
    """
    return [
        *words.split(),
        *SMALL,
        "--rollout.batch_size",
        str(PROMPTS),
        "--rollout.n_samples_per_prompt",
        str(SAMPLES),
    ]


def outcome(run: Run, on_sync: Callable[[int, Any], None]) -> dict[str, Any]:
    """Wait for the end, or for a run that is stuck; count."""
    progress = [-1, time.monotonic()]
    timer = threading.Event()

    def watch() -> None:
        while not timer.wait(1):
            if len(run.steps()) != progress[0]:
                progress[:] = [len(run.steps()), time.monotonic()]
            elif progress[0] > 0 and time.monotonic() - progress[1] > _STUCK_S:
                run.end()
                return

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        code = run.wait(on_sync, timeout_s=420)
    finally:
        timer.set()
        watcher.join()
        run.end()
    is_stuck = code < 0
    prompts = [prompt for one in run.experience() for prompt in one["prompts"]]
    return {
        "job": "stuck" if is_stuck else "ended well" if code == 0 else f"died with {code}",
        "steps_ended": len(run.steps()),
        "samples_trained": len(prompts),
        "samples_lost": STEPS * PROMPTS * SAMPLES - len(prompts),
        "groups_lost": STEPS * PROMPTS - len(set(prompts)),
        "last_words": "" if code == 0 else last_error(run.log),
    }


def last_error(log: str) -> str:
    """Return the last line that names an error."""
    lines = [line.strip() for line in log.splitlines() if "Error" in line]
    return lines[-1][:300] if lines else ""


if __name__ == "__main__":
    main()
