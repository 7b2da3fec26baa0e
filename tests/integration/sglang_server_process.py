"""A real SGLang server for tests of what runs inside it, in an environment of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import time
import tomllib
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import aiohttp

from rose.errors import EngineError, EngineLostError

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 300
_FLAGS = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    *("--disable-cuda-graph", "--skip-server-warmup", "--skip-tokenizer-init", "--disable-overlap-schedule"),
    *("--incremental-streaming-output", "--max-total-tokens", "8192", "--max-running-requests", "8"),
    *("--log-level", "warning", "--host", "127.0.0.1"),
)


def find_python() -> Path | None:
    """Return the interpreter of an environment that has SGLang, if there is one."""
    path = Path(os.environ.get("ROSE_SGLANG_PYTHON", ROOT / ".venv-sglang" / "bin" / "python"))
    return path if path.exists() else None


def find_shim() -> Path:
    """Return the folder that lets SGLang start on a CPU."""
    return Path(os.environ.get("ROSE_SGLANG_SHIM", ROOT / "tools" / "sglang" / "shim"))


def write_distribution(folder: Path) -> Path:
    """Make the metadata of an installed ROSE, for an environment where only its source is on the path."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = dict(project["entry-points"])
    groups.setdefault("sglang.srt.plugins", {"rose": "rose.backends.sglang_server.plugin:register"})
    lines = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in names.items()) for group, names in groups.items()]
    info = folder / f"rose_rl-{project['version']}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "entry_points.txt").write_text("\n".join(lines))
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: rose-rl\nVersion: {project['version']}\n")
    return folder


class SglangServer:
    """One server and a client of it. Use ``started``."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process, self.url, self.log = process, url, log
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240))

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, model: Path, folder: Path, *, tp_size: int = 1, flags: Sequence[str] = ()
    ) -> AsyncIterator[Self]:
        """Give a server that answers; it is ended afterwards."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = folder / f"sglang-{port}.log"
        command = [str(find_python()), "-m", "sglang.launch_server", "--model-path", str(model), "--port", str(port)]
        command += [*_FLAGS, "--tp-size", str(tp_size), *flags]
        with log.open("wb") as out:
            process = subprocess.Popen(  # noqa: ASYNC220 - takes no time
                command, env=_environment(folder, tp_size), stdout=out, stderr=out, start_new_session=True
            )
        server = cls(process, f"http://127.0.0.1:{port}", log)
        try:
            await server.wait_until_ready()
            yield server
        finally:
            await server.stop()

    async def wait_until_ready(self) -> None:
        """Wait until the server answers."""
        end_s = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < end_s:
            if self.process.poll() is not None:
                break
            with contextlib.suppress(EngineError):
                await self.get("/server_info")
                return
            await asyncio.sleep(0.5)
        message = f"the server did not start: {self.log.read_text(errors='replace')[-4000:]}"
        raise EngineLostError(message)

    async def stop(self) -> None:
        """End the server and close the client."""
        await self._session.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a body, return the answer's."""
        return await self._request("POST", path, json=dict(body))

    async def get(self, path: str) -> Mapping[str, Any]:
        """Return the answer's body."""
        return await self._request("GET", path)

    async def _request(self, method: str, path: str, **kwargs: Any) -> Any:
        try:
            async with self._session.request(method, self.url + path, **kwargs) as answer:
                text = await answer.text()
        except (aiohttp.ClientError, OSError) as error:
            message = f"{path}: {error!r}"
            raise EngineLostError(message) from error
        if answer.status != 200:
            message = f"{path} answered {answer.status}: {text}"
            raise EngineError(message)
        try:
            return json.loads(text) if text else None
        except ValueError:
            return text

    async def generate(self, prompt: Sequence[int], max_tokens: int = 16, **more: Any) -> Mapping[str, Any]:
        """Return a greedy answer."""
        sampling = {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
        return await self.post("/generate", {"input_ids": list(prompt), "sampling_params": sampling, **more})


def _environment(folder: Path, tp_size: int) -> dict[str, str]:
    paths = [str(ROOT / "src"), str(find_shim()), str(write_distribution(folder / "distribution"))]
    mine = {
        "PYTHONPATH": os.pathsep.join(paths),
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if tp_size > 1:
        mine["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(tp_size))
    return {**os.environ, **mine}
