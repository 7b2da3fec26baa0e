"""What measured figures depend on: the machine, the commit, the versions."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import rose


def cpu_name() -> str:
    """Return the processor's name as the system gives it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def machine() -> dict[str, Any]:
    """Return processor, cores, memory, system and the load just now."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def commit(*paths: str | Path) -> str:
    """Return the commit that is measured, with ``-dirty`` where what is measured differs from it, or ``unknown``.

    Args:
        paths: The files or folders that are measured; the whole library by default.
    """
    root = Path(rose.__file__).parent
    git = ["git", "-C", str(root)]
    asked = [str(path) for path in paths] or ["."]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
        changes = subprocess.run([*git, "status", "--porcelain", *asked], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    if head.returncode:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if changes.stdout.strip() else "")


def versions(packages: Sequence[str]) -> Mapping[str, str]:
    """Return Python's version and those of the packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
