"""vLLM's own OpenAI server over a tiny random model, as a process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

from rose.backends.openai import OpenAiEngine
from rose.backends.vllm.environment import engine_environment
from rose.errors import EngineLostError
from rose.testing.models import make_qwen3
from rose.testing.ports import free_ports

MAX_MODEL_LEN, VOCAB_SIZE = 512, 128
_OPTIONS = (
    "--enforce-eager --skip-tokenizer-init --dtype bfloat16 --kv-cache-memory-bytes 16777216 --block-size 32 --max-num-seqs 16 "
    f"--max-model-len {MAX_MODEL_LEN} --host 127.0.0.1"
).split()


@contextlib.asynccontextmanager
async def vllm_server(folder: Path, *, can_pause: bool = True, start_s: float = 240.0) -> AsyncIterator[str]:
    """Start the server; gives its URL once it answers. Its log is ``folder / "server.log"``."""
    model = make_qwen3(folder / "model", max_positions=MAX_MODEL_LEN, vocab=VOCAB_SIZE)
    (port,) = free_ports(1)
    environment = {**os.environ, **engine_environment(is_offline=True), "VLLM_SERVER_DEV_MODE": str(int(can_pause))}
    with (folder / "server.log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port), *_OPTIONS),
            env=environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        await _until_up(f"http://127.0.0.1:{port}", process, start_s)
        yield f"http://127.0.0.1:{port}"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


async def _until_up(url: str, process: asyncio.subprocess.Process, start_s: float) -> None:
    engine = OpenAiEngine(url)
    try:
        async with asyncio.timeout(start_s):
            while True:
                with contextlib.suppress(EngineLostError):
                    await engine.snapshot()
                    return
                assert process.returncode is None, "vLLM's server ended while it started; see server.log"
                await asyncio.sleep(0.5)
    finally:
        await engine.close()
