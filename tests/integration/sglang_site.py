"""SGLang servers with ROSE's co-serving inside, for tests: processes of their own, in an environment of their own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import attrs

from rose.errors import EngineLostError

_ROOT = Path(__file__).parents[2]
PYTHON = Path(os.environ.get("ROSE_SGLANG_PYTHON", str(_ROOT / ".venv-sglang" / "bin" / "python")))
"""An interpreter that can import sglang."""

_FLAGS = [
    "--device",
    "cpu",
    "--attention-backend",
    "torch_native",
    "--sampling-backend",
    "pytorch",
    "--disable-cuda-graph",
    "--skip-server-warmup",
    "--skip-tokenizer-init",
    "--incremental-streaming-output",
    "--disable-overlap-schedule",
    "--random-seed",
    "0",
    "--log-level",
    "info",
]
_STARTS_IN_S = 240.0
_PLUGIN = """
def register():
    from sglang.srt.plugins.hook_registry import HookRegistry
    from rose.backends.sglang_server.co_serving import install
    install(HookRegistry)
"""
_SHIM = {
    "sgl_kernel/__init__.py": """
def copy_all_layer_kv_cache_cpu(*args, **kwargs):
    raise NotImplementedError
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return copy_all_layer_kv_cache_cpu
""",
    "sitecustomize.py": """
import importlib.abc, importlib.util, sys
class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "torchvision":
            return None
        sys.meta_path.remove(self)
        import torch
        global _lib
        _lib = torch.library.Library("torchvision", "DEF")
        for op in ("nms", "qnms"):
            _lib.define(op + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return importlib.util.find_spec(name)
sys.meta_path.insert(0, _Finder())
""",
    "rose_site_plugin.py": _PLUGIN,
    "rose_site_plugin-0.1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: rose-site-plugin\nVersion: 0.1.0\n",
    "rose_site_plugin-0.1.0.dist-info/entry_points.txt": "[sglang.srt.plugins]\nrose = rose_site_plugin:register\n",
}


@attrs.define
class Http:
    """A server's address."""

    url: str
    session: aiohttp.ClientSession

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        async with self.session.post(self.url + path, json=dict(body)) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def get(self, path: str) -> Any:
        async with self.session.get(self.url + path) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()


@attrs.frozen(kw_only=True)
class Event:
    """What one message of a stream brought, and when by ``time.monotonic``."""

    tokens: tuple[int, ...]
    finish: Mapping[str, Any] | None
    at_s: float
    meta: Mapping[str, Any]


@attrs.define
class Server:
    """A running server."""

    http: Http
    process: subprocess.Popen[bytes]
    log: Path

    async def stream(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, **sampling: Any
    ) -> AsyncIterator[Event]:
        """Answer greedily; an end of the stream without a finish reason is a lost engine."""
        body = {
            "rid": request_id,
            "input_ids": list(prompt),
            "stream": True,
            "sampling_params": {"max_new_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True, **sampling},
        }
        async with self.http.session.post(self.http.url + "/generate", json=body) as answer:
            assert answer.status == 200, await answer.text()
            async for raw in answer.content:
                line = raw.decode().strip()
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                message = json.loads(line[6:])
                assert "error" not in message, message
                meta = message["meta_info"]
                tokens = tuple(message["output_ids"])
                yield Event(tokens=tokens, finish=meta["finish_reason"], at_s=time.monotonic(), meta=meta)

    async def tokens(self, request_id: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return [token async for event in self.stream(request_id, prompt, max_tokens) for token in event.tokens]

    async def abort(self, request_id: str) -> None:
        async with self.http.session.post(self.http.url + "/abort_request", json={"rid": request_id}) as answer:
            assert answer.status == 200

    async def control(self, path: str, **body: Any) -> None:
        """Post to a route whose answer is no JSON."""
        async with self.http.session.post(f"{self.http.url}/{path}", json=body) as answer:
            assert answer.status == 200, await answer.text()

    def is_alive(self) -> bool:
        return self.process.poll() is None


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _environment(root: Path, settings: Mapping[str, Any] | None, ranks: int) -> dict[str, str]:
    shim = root / "sglang-shim"
    for name, text in _SHIM.items():
        (shim / name).parent.mkdir(parents=True, exist_ok=True)
        (shim / name).write_text(text)
    environment = {
        **{name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "VIRTUAL_ENV"}},
        "PYTHONPATH": f"{_ROOT / 'src'}:{shim}",
        "SGLANG_USE_CPU_ENGINE": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if settings is not None:
        environment["ROSE_SGLANG_SETTINGS"] = json.dumps(settings)
    if ranks > 1:
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(ranks))
    return environment


@contextlib.asynccontextmanager
async def sglang_server(
    root: Path, model: Path, settings: Mapping[str, Any] | None, *flags: str, name: str = "sglang", ranks: int = 1
) -> AsyncIterator[Server]:
    """Start a server, wait until it answers, and end it."""
    port, log = _free_port(), root / f"{name}.log"
    command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(model), *_FLAGS, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--tp-size", str(ranks)]
    with log.open("wb") as out:
        process = subprocess.Popen(  # noqa: ASYNC220 - our own command line
            command,
            env=_environment(root, settings, ranks),
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        server = Server(Http(f"http://127.0.0.1:{port}", session), process, log)
        try:
            await _wait_until_up(server)
            yield server
        finally:
            await asyncio.to_thread(_end, process)


async def _wait_until_up(server: Server) -> None:
    give_up_s = time.monotonic() + _STARTS_IN_S
    while time.monotonic() < give_up_s:
        if not server.is_alive():
            message = f"the server ended at its start: {server.log.read_text()[-20_000:]}"
            raise EngineLostError(message)
        try:
            await server.http.get("/server_info")
        except (aiohttp.ClientError, AssertionError):
            await asyncio.sleep(0.25)
        else:
            return
    message = f"the server was not up in {_STARTS_IN_S:.0f} s: {server.log.read_text()[-20_000:]}"
    raise TimeoutError(message)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the server and its children, which end with it."""
    process.terminate()
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
