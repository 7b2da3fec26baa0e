"""What only a GPU can show about ROSE: ``PYTHONPATH=src python tools/gpu_check.py``; see ``rose.bench.gpu_check``."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def build_kernels() -> None:
    """Build the C kernels where they are not there, as in a fresh clone: the card's bytes are compared with theirs."""
    from rose.transfer.kernels.native import library_path  # noqa: PLC0415 - as below

    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    if library_path().exists() or spec is None or spec.loader is None:
        return
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    build.build_kernels(ROOT)  # says it where there is no compiler


def main() -> int:
    """Run the check; without one of the few packages it needs there is nothing to check with."""
    try:
        from rose.bench.gpu_check import runner  # noqa: PLC0415 - what is missing is said

        return runner.main(prepare=build_kernels)
    except ModuleNotFoundError as error:
        if (error.name or "rose").startswith("rose"):
            raise
        print(f"gpu-check: {error.name} is not installed here; nothing was run and nothing is recorded")  # noqa: T201
        return 2 if Path("/dev/nvidiactl").exists() else 0  # with a card it is the environment that is wrong


if __name__ == "__main__":
    sys.exit(main())
