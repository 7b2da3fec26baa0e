"""The texts of answers, against vLLM's own."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from rose.testing.pool_site.client import engine_environment, engine_python

pytestmark = [pytest.mark.stock, pytest.mark.timeout(300)]


def test_texts_are_those_of_vllms_detokenizer(model):
    script = Path(__file__).parent / "texts_as_vllm.py"
    done = subprocess.run(
        [engine_python(), script, model, "1000"],
        env=engine_environment(os.environ, {"TORCHDYNAMO_DISABLE": "1"}),
        capture_output=True,
        text=True,
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    num_cases, num_stopped, num_different = map(int, done.stdout.split()[-3:])
    assert (num_cases, num_different) == (1000, 0), done.stderr[-3000:]
    assert num_stopped > 100
