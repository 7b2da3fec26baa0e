"""Real SGLang servers for tests: where they come from, and their options. SGLang has an environment of its own (``make sglang-env``)."""

from __future__ import annotations

import importlib.util
import os
import tomllib
from pathlib import Path
from typing import Any

from rose.backends.sglang import SglangOptions

ROOT = Path(__file__).resolve().parent.parent
SHIM = ROOT / "tools" / "sglang" / "shim"
VOCAB_SIZE, MAX_POSITIONS = 320, 512
MAX_CONTEXT = MAX_POSITIONS - 6


def sglang_python() -> Path:
    """Return the Python of SGLang's environment, which need not be there."""
    return Path(os.environ.get("ROSE_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))


def why_no_sglang() -> str | None:
    """Return why tests with a real server cannot run, ``None`` when they can."""
    if os.environ.get("ROSE_SGLANG") == "0":
        return "tests with SGLang are turned off (ROSE_SGLANG=0)"
    if not sglang_python().exists():
        return "SGLang is not installed: make sglang-env"
    return None


def has_package() -> bool:
    """Return whether there is a ROSE package for the inside of the server."""
    return importlib.util.find_spec("rose.backends.sglang_server") is not None


def make_model(folder: Path) -> Path:
    """Make a tiny model that can be cut in two."""
    from rose.testing.models import make_qwen3  # noqa: PLC0415 - heavy

    return make_qwen3(folder, heads=4, kv_heads=2, vocab=VOCAB_SIZE, max_positions=MAX_POSITIONS)


def server_path(folder: Path) -> tuple[str, ...]:
    """Return what the server's Python needs to find: the shim, this tree's ROSE, and its entry points."""
    if not has_package():
        return (str(SHIM),)
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    lines = [line for group, entries in groups.items() for line in (f"[{group}]", *map(" = ".join, entries.items()))]
    metadata = folder / "rose_rl-0.1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: rose-rl\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    return (str(SHIM), str(folder), str(ROOT / "src"))


def make_options(folder: Path, model: Path, **options: Any) -> SglangOptions:
    """Return the options of a small server whose log and metadata are in ``folder``."""
    known: dict[str, Any] = {
        "engine_id": "sglang",
        "model": str(model),
        "python": str(sglang_python()),
        "python_path": server_path(folder),
        "max_total_tokens": 4096,
        "is_on_cpu": True,
        "log_path": str(folder / "server.log"),
    }
    return SglangOptions(**known | options)
