"""How long an SGLang server stands still for new weights: ROSE's sparse update beside SGLang's own dense one, in the same server.

    python benchmarks/sglang_updates.py make MODEL_DIR
    python -m sglang.launch_server --model-path MODEL_DIR --skip-tokenizer-init --incremental-streaming-output ...
    python benchmarks/sglang_updates.py run http://127.0.0.1:PORT MODEL_DIR

The server needs ROSE's plugin, and must have just been started. Each round changes a share of the weights, updates the server sparsely, then
loads the same weights whole with ``update_weights_from_tensor`` between ``pause_generation`` (in place) and ``continue_generation``, and compares
the server's checksums. A request streams tokens all the while. Prints JSON; times are in milliseconds:

* ``call_ms``: from the first call that holds the engine up to the answer of the last one, as the client sees it;
* ``pause_ms``: how long the engine's loop was held up, as it says itself (sparse only);
* ``gap_ms``: the longest time between two events of the streaming request meanwhile; ``step_ms`` is the usual one.

What can be done before (staging; pickling the tensors) is done before, while the server generates.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import json
import pickle
import statistics
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import torch

from rose.backends.memory import MemoryTransport
from rose.backends.sglang.updates import SglangUpdates
from rose.errors import EngineError
from rose.testing.checkpoint import CheckpointTrainer
from rose.testing.models import make_qwen3
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update

RUN = "bench"
CALM_EVENTS = 12
"""How many events of the stream are waited for before and after what is measured."""


class Server:
    """Calls of one server."""

    def __init__(self, url: str, session: aiohttp.ClientSession) -> None:
        self._url, self._session = url, session
        self.events: list[float] = []

    async def post(self, path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """Send a body, return the answer's."""
        async with self._session.post(self._url + path, json=dict(body)) as answer:
            text = await answer.text()
        if answer.status != 200:  # noqa: PLR2004 - HTTP's
            message = f"{path} answered {answer.status}: {text}"
            raise EngineError(message)
        return json.loads(text) if text.startswith("{") else {}

    async def get(self, path: str) -> Mapping[str, Any]:
        """Return the answer's body."""
        async with self._session.get(self._url + path) as answer:
            return dict(await answer.json())

    async def stream(self) -> None:
        """Generate for ever, and note when tokens come."""
        sampling = {"max_new_tokens": 400, "temperature": 0.0, "ignore_eos": True}
        while True:
            body = {"input_ids": [5, 6, 7, 8], "sampling_params": sampling, "stream": True}
            async with self._session.post(f"{self._url}/generate", json=body) as answer:
                async for line in answer.content:
                    if line.startswith(b"data: {"):
                        self.events.append(time.perf_counter())

    async def _calm(self) -> None:
        """Wait for some more events."""
        wanted = len(self.events) + CALM_EVENTS
        async with asyncio.timeout(120):
            while len(self.events) < wanted:  # noqa: ASYNC110 - another coroutine fills the list
                await asyncio.sleep(0.01)

    async def watched(self, work: Any) -> tuple[Any, dict[str, float]]:
        """Await some work; returns its result, and how long it and the stream's longest gap around it took."""
        self.events.clear()
        await self._calm()
        started_s = time.perf_counter()
        result = await work
        took_s = time.perf_counter() - started_s
        await self._calm()
        gaps = np.diff(self.events)
        return result, {
            "call_ms": took_s * 1e3,
            "gap_ms": float(gaps.max()) * 1e3,
            "step_ms": float(np.median(gaps)) * 1e3,
        }


class Bench:
    """One server and its trainer."""

    def __init__(self, server: Server, model: Path, num_ranks: int) -> None:
        self.server, self.num_ranks = server, num_ranks
        self.updates = SglangUpdates(server, num_ranks)
        self.trainer = CheckpointTrainer(model)
        self.transport = MemoryTransport()
        self.transport.serve()

    async def begin(self) -> None:
        """Prepare both sides."""
        await self.updates.begin(f"{RUN}:0")
        layout = await self.updates.target_layout()
        self.publisher = Publisher(self.trainer, self.transport, run=RUN, targets=[layout])
        self.publisher.publish_sync()

    async def round(self, fraction: float) -> tuple[dict[str, float], dict[str, float], bool]:
        """Update sparsely, then densely with the same weights; returns both times, and whether the weights were the same."""
        self.trainer.step(fraction)
        report = self.publisher.publish_sync()
        await self._stage()
        activation, sparse = await self.server.watched(self.updates.activate())
        sparse |= {"pause_ms": activation.pause_s * 1e3, "stage_ms": activation.stage_s * 1e3}
        sparse |= {"fetched_bytes": float(activation.fetched_bytes)}
        after_sparse = await self.updates.server_checksums()
        payload = self._payload()
        _, dense = await self.server.watched(self._load_whole(payload, str(report.version)))
        is_same = await self.updates.server_checksums() == after_sparse
        self.publisher.publish_sync(anchor=True)  # for ROSE the weights are no version now
        await self._stage()
        await self.updates.activate()
        return sparse, dense, is_same

    async def _stage(self) -> None:
        update = plan_update(self.transport, (await self.updates.state()).version)
        if update is not None:
            await self.updates.stage(update)

    def _payload(self) -> str:
        tensors = [
            (name, torch.from_numpy(np.array(bits).view(np.int16)).view(torch.bfloat16))
            for name, bits in self.trainer.shards().items()
        ]
        return base64.b64encode(pickle.dumps(tensors)).decode()

    async def _load_whole(self, payload: str, version: str) -> None:
        body = {"serialized_named_tensors": [payload] * self.num_ranks, "flush_cache": False, "weight_version": version}
        await self.server.post("/pause_generation", {"mode": "in_place"})
        await self.server.post("/begin_weight_update", {"selector": "all"})
        await self.server.post("/update_weights_from_tensor", body)
        await self.server.post("/end_weight_update", {})
        await self.server.post("/continue_generation", {})


async def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure, and return the figures."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=600)) as session:
        server = Server(arguments.url, session)
        bench = Bench(server, arguments.model, arguments.ranks)
        await bench.begin()
        stream = asyncio.create_task(server.stream())
        try:
            await bench.round(arguments.fraction)  # warms both ways up
            rounds = [await bench.round(arguments.fraction) for _ in range(arguments.rounds)]
        finally:
            stream.cancel()
            bench.transport.close()
    return {
        "model_bytes": sum(bits.nbytes for bits in bench.trainer.shards().values()),
        "changed_fraction": arguments.fraction,
        "ranks": arguments.ranks,
        "rounds": arguments.rounds,
        "are_weights_equal": all(is_same for _, _, is_same in rounds),
        "sparse": _summary([sparse for sparse, _, _ in rounds]),
        "dense": _summary([dense for _, dense, _ in rounds]),
    }


def _summary(rows: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    return {
        name: {
            "min": round(min(row[name] for row in rows), 3),
            "median": round(statistics.median(row[name] for row in rows), 3),
            "max": round(max(row[name] for row in rows), 3),
        }
        for name in rows[0]
    }


def main() -> None:
    """Make a model, or measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write a random model of about 34 MB")
    make.add_argument("model", type=Path)
    measure = commands.add_parser("run", help="measure a server that was just started")
    measure.add_argument("url")
    measure.add_argument("model", type=Path)
    measure.add_argument("--ranks", type=int, default=1, help="tensor-parallel ranks of the server")
    measure.add_argument("--fraction", type=float, default=0.01, help="share of the weights that changes")
    measure.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    if arguments.command == "make":
        make_qwen3(arguments.model, layers=7, hidden=512, heads=8, kv_heads=4, head_dim=64, vocab=1024)
    else:
        print(json.dumps(asyncio.run(run(arguments)), indent=2))


if __name__ == "__main__":
    main()
