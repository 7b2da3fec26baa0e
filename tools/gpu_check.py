"""What only a GPU can show about ROSE: ``PYTHONPATH=src python tools/gpu_check.py``; see ``rose.bench.gpu_check``."""

from __future__ import annotations

import sys

from rose.bench.gpu_check.runner import main

if __name__ == "__main__":
    sys.exit(main())
