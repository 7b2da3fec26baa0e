"""What the pool of a job file tells its trainers of the store."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest

from rose.config import load
from rose.errors import ConfigError
from rose.hosts.job import JobConfig, offer_store
from rose.registry import open_transport


def job(folder: Path, **transport: Any) -> JobConfig:
    return load(
        JobConfig,
        {
            "job": {"name": "toy"},
            "resources": {"n_rl": 1, "training": 0, "rollout": 1},
            "model": {"path": str(folder)},
            "engines": {"own": {"backend": "vllm"}},
            "transport": transport,
        },
    )


def test_a_store_that_the_pool_keeps_is_served_while_it_is_offered(tmp_path: Path) -> None:
    with offer_store(job(tmp_path, keeper="pool")) as offer:
        assert offer is not None
        with contextlib.closing(open_transport(offer.address)) as store:
            store.put("a", b"1")
            assert store.get("a") == b"1"
        assert dict(offer.address.options)["host"] == "127.0.0.1"


def test_a_store_of_others_is_named(tmp_path: Path) -> None:
    with offer_store(job(tmp_path, address={"name": "mooncake", "master": "h:50051"})) as offer:
        assert offer is not None
        assert offer.address.name == "mooncake"


def test_nothing_is_offered_where_the_trainer_keeps_the_store(tmp_path: Path) -> None:
    with offer_store(job(tmp_path, listen="127.0.0.1:0")) as offer:
        assert offer is None


def test_targets_come_with_the_numbers_of_the_model(tmp_path: Path) -> None:
    config = job(tmp_path, keeper="pool", targets=[{"engine": "vllm", "tp": 2}])
    with (
        pytest.raises(ConfigError, match=r"transport\.targets needs the numbers of the model, but .*config\.json"),
        offer_store(config),
    ):
        pass
    (tmp_path / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    with offer_store(config) as offer:
        assert offer is not None
        assert offer.model == {"num_attention_heads": 4}
        assert [shape.tp for shape in offer.targets] == [2]
