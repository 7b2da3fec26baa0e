"""Settings of the adapter's tests. They run in the adapter's own environment, which has no vLLM."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


def pytest_configure(config: pytest.Config) -> None:
    """Name the markers."""
    config.addinivalue_line("markers", "stock: runs the whole of OpenRLHF over real engines; minutes")


@pytest.fixture(scope="session")
def adapter() -> Path:
    """The adapter's folder."""
    return HERE.parent
