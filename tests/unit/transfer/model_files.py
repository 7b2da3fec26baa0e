"""Real tables of models that lie beside the repository."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from rose.transfer.engine_tables import ModelTable, load_model_table

MODELS = Path(__file__).resolve().parents[3].parent / "shared" / "models"
FILES = (
    "DeepSeek-V3.template.json",
    "Llama-3.1-8B.json",
    "Qwen2.5-0.5B.json",
    "Qwen3-0.6B.json",
    "Qwen3-1.7B.json",
    "Qwen3-30B-A3B.json.gz",
    "Qwen3-32B.json",
    "Qwen3-4B.json",
    "Qwen3-8B.json",
    "gpt-oss-20b.json",
)


@lru_cache(maxsize=16)
def load_file(name: str) -> tuple[ModelTable, dict[str, Any]]:
    """Return a table and the raw file, or skip the test where the file is absent."""
    path = MODELS / name
    if not path.exists():
        pytest.skip(f"needs the model table {path}")
    raw = path.read_bytes()
    return load_model_table(path), json.loads(gzip.decompress(raw) if name.endswith(".gz") else raw)
