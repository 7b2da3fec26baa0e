"""One pool of real engines for all whole runs: two of its own, one borrowed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import make_model
from rose.testing import PoolSite


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openrlhf")


@pytest.fixture(scope="session")
def model(folder: Path) -> Path:
    return make_model(folder / "model")


@pytest.fixture(scope="session")
def site(model: Path) -> Iterator[PoolSite]:
    with PoolSite.start(model, dedicated=2, borrowed=1, dtype="float32", max_len=512, max_seqs=3, stall_s=4.0) as site:
        yield site
