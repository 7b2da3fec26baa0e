"""Puts the shim in place in every process that has this folder on its PYTHONPATH."""

import sglang_cpu  # noqa: F401 - importing it is what it is for
