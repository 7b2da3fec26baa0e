"""Settings of all tests."""

from __future__ import annotations

import importlib.util

import pytest
from hypothesis import settings

# Test machines are shared: an example may take longer than usual, and the same run finds the same examples.
settings.register_profile("rose", deadline=None, derandomize=True)
settings.load_profile("rose")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a real SGLang server where there is none."""
    marked = [item for item in items if item.get_closest_marker("sglang")]
    if not marked or importlib.util.find_spec("aiohttp") is None:
        return
    from sglang_real import why_no_sglang  # noqa: PLC0415 - needs aiohttp

    why = why_no_sglang()
    for item in marked if why else ():
        item.add_marker(pytest.mark.skip(reason=why))
