"""What only a GPU can show about ROSE: ``PYTHONPATH=src python tools/gpu_check.py``; see ``rose.bench.gpu_check``."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the check; without one of the few packages it needs there is nothing to check with."""
    try:
        from rose.bench.gpu_check import runner  # noqa: PLC0415 - what is missing is said
    except ModuleNotFoundError as error:
        if (error.name or "rose").startswith("rose"):
            raise
        print(f"gpu-check: {error.name} is not installed here; nothing was run and nothing is recorded")  # noqa: T201
        return 0
    return runner.main()


if __name__ == "__main__":
    sys.exit(main())
