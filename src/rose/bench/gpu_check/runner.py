"""Runs the parts one after the other, each in a process of its own, prints what they found, and writes it down.

Invariants: the whole check ends within ten minutes, whatever hangs; what was not run is recorded with its reason; after every part the
record has all that is known by then; no part leaves a process behind; a rehearsal on the CPU never gets a file among the results of GPUs.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.bench.gpu_check.outcome import FAILED, NOT_RUN, Outcome
from rose.bench.machine import commit, machine, versions

SCHEMA = "rose.gpu-check/1"
RESULTS = Path("benchmarks/results")
_PACKAGES = ("torch", "triton", "numpy", "xxhash", "zstandard", "attrs", "kvcached", "vllm", "mooncake-transfer-engine")
_DRIVER = Path("/dev/nvidiactl")
_REMEDY = " (see nvidia-smi and CUDA_VISIBLE_DEVICES, or name a Python whose torch fits: make gpu-check GPU_PYTHON=...)"
_LIMIT_S, _PART_LIMIT_S, _LEAST_S = 570.0, 150.0, 20.0
_REAP_S = 5.0
"""How long a process that was killed is waited for; one that the driver holds does not end."""

RunOne = Callable[[str, str, float, float], Outcome]
"""Runs the part of a name, whose text of what it shows is given, with the copy rate known so far, within so many seconds."""


def main(arguments: Sequence[str] | None = None, *, prepare: Callable[[], None] = lambda: None) -> int:
    """Run the check; return 0 where everything that ran passed, or there is no card. ``prepare`` is called before the first part."""
    options = _parser().parse_args(arguments)
    is_rehearsal = options.device == "cpu"
    if options.page:
        return _write_page()
    if is_rehearsal and (options.out is None or options.out.name.startswith("gpu-")):
        _say("a rehearsal on the CPU is no result of a GPU; name a file with --out that does not begin with gpu-")
        return 2
    if reason := _no_gpu(is_rehearsal=is_rehearsal):
        _say(f"{reason}; nothing was run and nothing is recorded")
        return 2 if _has_driver() else 0
    from rose.bench.gpu_check.parts import parts  # noqa: PLC0415 - needs torch

    card = _card(is_rehearsal=is_rehearsal)
    wanted = {one.name: one.shows for one in parts() if not options.only or one.name in options.only}
    unknown = sorted(set(options.only or ()) - wanted.keys())
    if unknown:
        _say(f"there is no part {', '.join(unknown)}, only {', '.join(one.name for one in parts())}")
        return 2
    prepare()
    _say(f"{card['name']}, torch {versions(['torch'])['torch']}{' (a rehearsal)' if is_rehearsal else ''}")
    path = options.out or RESULTS / f"gpu-{slug(card['name'])}.json"
    path.parent.mkdir(parents=True, exist_ok=True)

    def record(outcomes: Sequence[Outcome]) -> None:
        document = _document(card, outcomes, is_quick=options.quick, is_rehearsal=is_rehearsal)
        path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")

    outcomes = run_parts(wanted, _isolated(options.device, is_quick=options.quick), record, limit_s=_LIMIT_S)
    _say(f"written to {path}")
    return 1 if any(one.status == FAILED for one in outcomes) else 0


def run_parts(
    wanted: Mapping[str, str],
    run_one: RunOne,
    record: Callable[[Sequence[Outcome]], None],
    *,
    limit_s: float,
    clock: Callable[[], float] = time.monotonic,
) -> list[Outcome]:
    """Run parts one after the other, whatever becomes of each; print and record as they end.

    Args:
        wanted: Name of a part -> what it shows.
        run_one: Runs one of them.
        record: Takes all outcomes so far, after every part.
        limit_s: By when all must have ended.
        clock: The time.
    """
    started, outcomes, copy_gb_s = clock(), [], 0.0
    for name, shows in wanted.items():
        left_s = limit_s - (clock() - started)
        if left_s < _LEAST_S:
            reason = f"the check had taken {clock() - started:.0f} s by then"
            outcome = Outcome(name=name, shows=shows, status=NOT_RUN, reason=reason)
        else:
            outcome = run_one(name, shows, copy_gb_s, min(_PART_LIMIT_S, left_s))
        copy_gb_s = next((one.value for one in outcome.figures if one.name == "copy within the device"), copy_gb_s)
        _show(outcome)
        outcomes.append(outcome)
        record(outcomes)
    return outcomes


def _write_page() -> int:
    from rose.bench.gpu_check import page  # noqa: PLC0415 - it uses this module
    from rose.bench.gpu_check.parts import parts  # noqa: PLC0415 - needs torch

    page.write({one.name: one.shows for one in parts()})
    _say(f"{page.PAGE} is made of the records in {RESULTS}")
    return 0


def slug(name: str) -> str:
    """Return a card's name as part of a file's."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _isolated(device: str, *, is_quick: bool) -> RunOne:
    """Return what runs a part in a process of its own."""

    def run_one(name: str, shows: str, copy_gb_s: float, limit_s: float) -> Outcome:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "outcome.json"
            rest = ["quick"] if is_quick else []
            command = [sys.executable, "-m", "rose.bench.gpu_check.one", name, device, str(path), str(copy_gb_s), *rest]
            reason = end_of(command, limit_s)
            if path.exists():
                return Outcome.from_json(json.loads(path.read_text(encoding="utf-8")))
        return Outcome(name=name, shows=shows, status=FAILED, reason=reason)

    return run_one


def end_of(command: Sequence[str], limit_s: float) -> str:
    """Run a command, for so many seconds at most, and end whatever it started; return how it ended."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        return f"it had not ended after {limit_s:.0f} s"
    else:
        return f"its process ended with exit code {code}, without a word"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the processes of a part that was cut off would keep the card busy
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_REAP_S)


def _say(text: str) -> None:
    print(f"gpu-check: {text}", flush=True)  # noqa: T201 - a command's own output


def _show(outcome: Outcome) -> None:
    end = f": {outcome.reason}" if outcome.reason else f" in {outcome.seconds:.1f} s"
    _say(f"{outcome.name:16} {outcome.status}{end}")
    for one in outcome.figures:
        verdict = "" if one.is_met is None else f"   ({one.aim}: {'met' if one.is_met else 'MISSED'})"
        _say(f"    {one.name:52} {one.value:12.4g} {one.unit}{verdict}")


def _no_gpu(*, is_rehearsal: bool) -> str:
    """Return why there is nothing to check on, in one line; empty where there is."""
    if importlib.util.find_spec("torch") is None:
        return f"torch is not installed here{_REMEDY if _has_driver() else ''}"
    import torch  # noqa: PLC0415 - only where it is installed

    if is_rehearsal or torch.cuda.is_available():
        return ""
    if _has_driver():
        build = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "a CPU build"
        return f"this machine has NVIDIA's driver, but torch {torch.__version__}, {build}, sees no GPU{_REMEDY}"
    return f"no GPU here (torch {torch.__version__} sees none)"


def _has_driver() -> bool:
    """Return whether NVIDIA's driver is loaded, so that a torch that sees no GPU is the wrong one."""
    return _DRIVER.exists()


def _card(*, is_rehearsal: bool) -> dict[str, Any]:
    if is_rehearsal:
        return {"name": "cpu", "type": "cpu"}
    import torch  # noqa: PLC0415 - is installed by now

    found = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "name": found.name,
        "type": "cuda",
        "capability": f"{found.major}.{found.minor}",
        "memory_bytes": found.total_memory,
        "cuda": torch.version.cuda or torch.version.hip,
        "num_cards": torch.cuda.device_count(),
    }


def _document(
    card: dict[str, Any], outcomes: Sequence[Outcome], *, is_quick: bool, is_rehearsal: bool
) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "made": datetime.datetime.now(tz=datetime.UTC).isoformat(timespec="seconds"),
        "is_rehearsal": is_rehearsal,
        "is_quick": is_quick,
        "card": card,
        "machine": machine(),
        "versions": dict(versions(_PACKAGES)),
        "commit": commit(),
        "parts": [one.to_json() for one in outcomes],
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gpu-check", description="What only a GPU can show about ROSE, in under ten minutes, without the network."
    )
    parser.add_argument("--out", type=Path, help="where the results go; benchmarks/results/gpu-<card>.json by default")
    parser.add_argument("--only", nargs="+", metavar="PART", help="run only these parts")
    parser.add_argument("--page", action="store_true", help="only make docs/gpu.md of the records that there are")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help=argparse.SUPPRESS)
    return parser
