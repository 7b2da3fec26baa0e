"""Settings of all tests."""

from __future__ import annotations

from hypothesis import settings

# Test machines are shared: an example may take longer than usual, and the same run finds the same examples.
settings.register_profile("rose", deadline=None, derandomize=True)
settings.load_profile("rose")
