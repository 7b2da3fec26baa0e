"""Paced devices with their ledgers, engines on them, and load for live co-serving tests. Times are modelled seconds."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rose.backends.paced import PacedClock
from rose.backends.vllm import VllmEngine, VllmOptions
from rose.coserving.ledger import Ledger
from rose.policies.admission import Budget, Mode
from rose.testing.models import make_qwen3
from rose.types import EngineId, EngineRequest, RequestId, Sampling

SERVING_VOCAB = 512
ROLLOUT_VOCAB = 32
M = 8
"""Modelled tokens of one rollout token."""
_NUM_SLOTS = 8
KV_BYTES_PER_WORD = 147_456 * M
"""Modelled KV of one rollout token."""
_PROFILES = {"serving": "h100:qwen2.5-7b", "rollout": "h100:qwen3-8b"}


@attrs.define
class Site:
    """Devices of one node on one clock (``k`` = 3), nobody lends yet."""

    root: Path
    clock: PacedClock
    models: Mapping[str, Path]
    pool_bytes: float
    ledgers: dict[str, Ledger] = attrs.field(factory=dict)
    engines: dict[str, Any] = attrs.field(factory=dict)
    words: dict[str, int] = attrs.field(factory=dict)
    _ids: Any = attrs.field(factory=itertools.count)
    _token: int = 0

    @classmethod
    def make(cls, root: Path, *devices: str, pool_bytes: float = 42e9) -> Site:
        """Make the clock, the tiny models and the ledgers. ``pool_bytes``: KV memory of a device, modelled."""
        models = {
            "serving": make_qwen3(root / "serving", layers=1, vocab=SERVING_VOCAB, max_positions=4096),
            "rollout": make_qwen3(
                root / "rollout", layers=2, hidden=128, heads=4, kv_heads=2, vocab=ROLLOUT_VOCAB, max_positions=1024
            ),
        }
        site = cls(root, PacedClock.create(root / "clock", k=3.0), models, pool_bytes)
        site.ledgers = {device: Ledger.create(site.ledger_path(device)) for device in devices}
        return site

    def ledger_path(self, device: str) -> str:
        return str(self.root / f"{device}.ledger")

    def options(self, name: str, kind: str, *devices: str, admission: Any = None, **options: Any) -> VllmOptions:
        """Return the options of an engine of ``kind`` serving or rollout on one device or several."""
        paths = [str(self.root / f"{device}.device") for device in devices]
        ledgers = [self.ledger_path(device) for device in devices]
        rose = {
            "role": kind,
            "device": {
                "kind": "paced",
                "path": paths if len(paths) > 1 else paths[0],
                "clock": str(self.root / "clock"),
                "profile": _PROFILES[kind],
                "tokens_per_token": 1 if kind == "serving" else M,
            },
            "ledger": ledgers if len(ledgers) > 1 else ledgers[0],
            "admission": admission or {},
            "memory": {"pool_bytes": int(self.pool_bytes)},
            "timing": {"watchdog_s": 2.0},  # a busy machine is no frozen engine
        }
        defaults: dict[str, Any] = {"max_num_seqs": 32, "max_num_batched_tokens": 2048, "kv_cache_bytes": 32 << 20}
        return VllmOptions(engine_id=EngineId(name), model=str(self.models[kind]), rose=rose, **{**defaults, **options})

    async def start(self, stack: contextlib.AsyncExitStack, *all_options: VllmOptions) -> None:
        """Start engines, two at a time; ``stack`` closes them."""
        gate = asyncio.Semaphore(2)

        async def start_one(options: VllmOptions) -> None:
            async with gate:
                engine = await VllmEngine.create(options, clock=self.clock)
            self.engines[options.engine_id] = engine
            stack.push_async_callback(engine.close)

        async with asyncio.TaskGroup() as group:
            for options in all_options:
                group.create_task(start_one(options))

    def lend(self, mode: Mode, *devices: str, kv_cap_bytes: float = math.inf) -> None:
        """Grant these devices, or all of them."""
        self._token += 1
        budget = Budget(
            mode=mode, kv_cap_bytes=kv_cap_bytes, fencing_token=self._token, expires_s=math.inf, is_granted=True
        )
        for device in devices or self.ledgers:
            self.ledgers[device].publish_budget(budget)

    def revoke(self, *devices: str) -> None:
        self._token += 1
        for device in devices or self.ledgers:
            self.ledgers[device].publish_budget(Budget(fencing_token=self._token))

    async def stream(self, name: str, prompt: Sequence[int], max_tokens: int) -> AsyncIterator[Any]:
        sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, logprobs=False)
        request_id = RequestId(f"{name}-{next(self._ids)}")
        request = EngineRequest(request_id=request_id, prompt_ids=tuple(prompt), sampling=sampling)
        async for chunk in self.engines[name].generate(request):
            yield chunk

    async def tokens(self, name: str, prompt: Sequence[int], max_tokens: int) -> list[int]:
        return [token async for chunk in self.stream(name, prompt, max_tokens) for token in chunk.token_ids]

    async def times(self, name: str, prompt: Sequence[int], max_tokens: int) -> list[float]:
        """Return when each token came, begin of the request first."""
        times = [self.clock.now()]
        async for chunk in self.stream(name, prompt, max_tokens):
            times += [self.clock.now()] * len(chunk.token_ids)
        return times

    @contextlib.asynccontextmanager
    async def rollouts(self, *names: str, max_tokens: int = 12) -> AsyncIterator[None]:
        """Keep the slots of these rollout engines busy; ``words`` counts their tokens."""

        async def slot(name: str) -> None:
            while True:
                prompt = [random.randrange(3, ROLLOUT_VOCAB) for _ in range(60)]
                async for chunk in self.stream(name, prompt, max_tokens):
                    self.words[name] = self.words.get(name, 0) + len(chunk.token_ids)
                await asyncio.sleep(0.02)

        tasks = [asyncio.create_task(slot(name)) for name in names for _ in range(_NUM_SLOTS)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def arrivals(self, num: int, rate: float, answer: Callable[[list[int]], Any], seed: str) -> list[Any]:
        """Call ``answer`` with fresh prompts at the same random times and of the same lengths for every seed; its results in order."""
        times, tokens = random.Random(0), random.Random(seed)
        tasks = []
        async with asyncio.TaskGroup() as group:
            for _ in range(num):
                await self.clock.sleep(times.expovariate(rate))
                prompt = [tokens.randrange(3, SERVING_VOCAB) for _ in range(times.randrange(50, 1500))]
                tasks.append(group.create_task(answer(prompt)))
        return [task.result() for task in tasks]

    async def doubts(self, since_s: float) -> list[Any]:
        """Return the pacing reports of engines whose times may not be believed."""
        reports = [await engine.pacing_report(since_s) for engine in self.engines.values()]
        return [report for report in reports if not report["is_valid"]]
