"""Records the signatures that the doubles of GPU libraries have: ``python tests/gpu_doubles/make.py``.

vLLM and torch are read where they are installed, kvcached from a folder with its source (``$KVCACHED_SRC``, the unpacked source
distribution). ``--fetch FOLDER`` unpacks kvcached's there: pip downloads it and then fails to build it without CUDA, which is of
no matter here. A library that is not there keeps what is recorded of it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu_doubles.signatures import read_library

RECORD = Path(__file__).parent / "signatures.json"
KVCACHED = "0.1.6"


def package_of(name: str) -> Path | None:
    """Return the folder of a library's package; ``None`` where it is not to be had."""
    if name == "kvcached":
        source = os.environ.get("KVCACHED_SRC")
        package = Path(source, "kvcached") if source else None
        return package if package is not None and package.is_dir() else None
    spec = importlib.util.find_spec(name)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def version_of(name: str, package: Path) -> str:
    """Return a library's version without what a build adds to it."""
    if name == "kvcached":
        found = re.search(r"^Version: (\S+)", (package.parent / "PKG-INFO").read_text(), re.MULTILINE)
        return found.group(1) if found else "unknown"
    for distribution in (name, f"{name}-cpu"):
        try:
            return importlib.metadata.version(distribution).split("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def fetch(folder: Path) -> Path:
    """Unpack kvcached's source distribution under ``folder``, unless it is there; return where it is."""
    target = folder.resolve() / f"kvcached-{KVCACHED}"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--no-clean",
            "--no-build-isolation",
        ]
        command += ["--no-binary", ":all:", f"kvcached=={KVCACHED}", "--dest", scratch]
        environment = {**os.environ, "TMPDIR": scratch}
        subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
        found = sorted(Path(scratch).glob("*/kvcached_*/kvcached/control.py"))
        if not found:
            message = f"pip could not download kvcached {KVCACHED}; unpack its source distribution and set KVCACHED_SRC"
            raise SystemExit(message)
        found[0].parents[1].rename(target)
    return target


def record() -> dict[str, Any]:
    """Return the new record: what is there read anew, the rest as it was."""
    recorded: dict[str, Any] = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    for name in ("torch", "vllm", "kvcached"):
        package = package_of(name)
        if package is not None:
            recorded[name] = {"version": version_of(name, package), "names": read_library(name, package)}
    return recorded


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fetch", type=Path, metavar="FOLDER", help="unpack kvcached's source there, and print where")
    arguments = parser.parse_args()
    if arguments.fetch is not None:
        print(fetch(arguments.fetch))  # noqa: T201 - a command
        return
    RECORD.write_text(json.dumps(record(), indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
