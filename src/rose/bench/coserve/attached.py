"""What an idle rollout engine beside it costs a serving engine: throughput on the machine itself, without pacing.

``alone`` is vLLM as it comes, without the scheduler of this project; ``attached`` shares its device with a rollout engine that has a
lease and no request. Both are there all the time and take turns, in alternating order, so that a drift of the machine meets both.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rose.backends.vllm import VllmEngine, VllmOptions
from rose.backends.vllm.options import ROSE_SCHEDULER
from rose.coserving.ledger import Ledger
from rose.policies.admission import Budget, Mode
from rose.testing.models import make_qwen3
from rose.types import EngineId, EngineRequest, RequestId, Sampling

_NUM_REQUESTS, _PROMPT_TOKENS, _OUTPUT_TOKENS = 16, 64, 96
_VOCAB = 512


def _options(name: str, model: Path, rose: dict[str, Any] | None) -> VllmOptions:
    return VllmOptions(
        engine_id=EngineId(name),
        model=str(model),
        max_model_len=512,
        max_num_seqs=_NUM_REQUESTS,
        kv_cache_bytes=32 << 20,
        rose=rose or {},
        scheduler_cls=ROSE_SCHEDULER if rose else None,
    )


async def measure_attached(num_rounds: int = 10) -> dict[str, Any]:
    """Return the ratio of throughputs (median over the rounds), and each round's.

    Args:
        num_rounds: Of one batch for each of the two.
    """
    async with contextlib.AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-")))
        model = make_qwen3(folder / "model", layers=8, hidden=256, heads=4, kv_heads=2, head_dim=64, vocab=_VOCAB)
        ledger = Ledger.create(folder / "ledger")
        ledger.publish_budget(Budget(mode=Mode.SLO, fencing_token=1, expires_s=math.inf, is_granted=True))
        shared = {"device": {"kind": "host", "path": str(folder / "device")}, "ledger": str(folder / "ledger")}
        engines = {}
        for name, rose in (
            ("alone", None),
            ("attached", {"role": "serving", **shared}),
            ("rollout", {"role": "rollout", **shared}),
        ):
            engines[name] = await VllmEngine.create(_options(name, model, rose))
            stack.push_async_callback(engines[name].close)
        pair = ["alone", "attached"]
        rates: dict[str, list[float]] = {name: [] for name in pair}
        for number in range(-1, num_rounds):
            for name in pair if number % 2 else reversed(pair):
                rate = await _tokens_per_s(engines[name], number)
                if number >= 0:
                    rates[name].append(rate)
    ratios = [attached / alone for alone, attached in zip(rates["alone"], rates["attached"], strict=True)]
    return {
        "serving_throughput_attached_over_alone": statistics.median(ratios),
        "ratios": ratios,
        "step_ms": 1e3 * _NUM_REQUESTS / statistics.median(rates["alone"]),
    }


async def _tokens_per_s(engine: VllmEngine, number: int) -> float:
    rng = random.Random(number)

    async def ask(index: int) -> None:
        request = EngineRequest(
            request_id=RequestId(f"{engine.engine_id}-{number}-{index}"),
            prompt_ids=tuple(rng.choices(range(3, _VOCAB), k=_PROMPT_TOKENS)),
            sampling=Sampling(max_tokens=_OUTPUT_TOKENS, temperature=0.0, ignore_eos=True, logprobs=False),
        )
        async for _ in engine.generate(request):
            pass

    begun_s = time.perf_counter()
    await asyncio.gather(*(ask(index) for index in range(_NUM_REQUESTS)))
    return _NUM_REQUESTS * _OUTPUT_TOKENS / (time.perf_counter() - begun_s)
