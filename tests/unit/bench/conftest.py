from __future__ import annotations

import json

import pytest

from rose.bench.model_shapes import Dense, _tensors


@pytest.fixture
def tiny_model(tmp_path):
    """A table of a small model that TP 1 to 8 can hold; returns its file."""
    settings = Dense(hidden=64, inter=128, layers=2, heads=8, kv_heads=8, head_dim=16, vocab=128)
    table = {
        "model": "tiny",
        "config": {
            "hidden": 64,
            "inter": 128,
            "layers": 2,
            "heads": 8,
            "kv": 8,
            "head_dim": 16,
            "vocab": 128,
            "tied": False,
        },
        "params": [[spec.name, list(spec.shape), spec.dtype] for spec in _tensors(settings)],
    }
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(table), encoding="utf-8")
    return path
