"""Real vLLM engines in one pool: some are the job's own, some are borrowed under leases; serving is a stand-in.

The stand-in does what the ledger sees of a serving engine: it beats, and says how much KV memory it uses. It computes nothing, so
that two cores suffice. Lender, ledgers, borrower, pool and the borrowed engines' governors are the real ones.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Self

import attrs
from attrs import validators as v

from rose import checks
from rose.backends.vllm import VllmOptions
from rose.bench.faults.kept_engine import KeptEngine
from rose.clocks import MonotonicClock
from rose.coserving.ledger import IDLE_SERVING, Ledger
from rose.coserving.lender import Lender
from rose.policies.admission import Mode
from rose.policies.lending import LendingConfig
from rose.pool import Borrower, EngineState, PoolConfig, RolloutPool, RoutingConfig
from rose.testing.models import make_qwen3
from rose.types import DeviceId, EngineId, JobId, WeightVersion

VOCAB = 512
_JOB = JobId("faults")
_BEAT_S = 0.05
_KV_BYTES = 64 << 20
_GRANULE_BYTES = 2 << 20
_ASK_AGAIN_S = 0.5
_STARTS_AT_ONCE = 2


@attrs.frozen(kw_only=True)
class SiteConfig:
    """What a site is made of.

    Attributes:
        folder: For the model, ledgers and devices; made where missing.
        num_dedicated, num_borrowed: Engines.
        dtype: Of weights and activations.
        max_positions: Longest prompt and answer together, in tokens.
        cap_per_engine: Turns in flight on one engine.
        stall_s: A turn without a token for this long is moved.
    """

    folder: Path
    num_dedicated: int = attrs.field(default=2, validator=checks.integer(1))
    num_borrowed: int = attrs.field(default=2, validator=checks.integer(1))
    dtype: str = attrs.field(default="float32", validator=v.in_(("float32", "bfloat16")))
    max_positions: int = attrs.field(default=2048, validator=checks.integer(64))
    cap_per_engine: int = attrs.field(default=12, validator=checks.integer(1))
    stall_s: float = attrs.field(default=5.0, validator=checks.number(above=0))


class ServingStandIn:
    """Beats in the ledgers of all devices from a thread, so that a busy event loop does not make serving look dead."""

    def __init__(self, ledgers: Mapping[DeviceId, Ledger], clock: MonotonicClock) -> None:
        self._ledgers = ledgers
        self._clock = clock
        self._used_bytes = dict.fromkeys(ledgers, 0.0)
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="serving stand-in", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End the thread."""
        self._is_over.set()
        self._thread.join()

    def use(self, device_id: DeviceId, fraction: float) -> None:
        """Use this share of the device's KV memory from now on."""
        self._used_bytes[device_id] = fraction * _KV_BYTES

    def _beat(self) -> None:
        while not self._is_over.is_set():
            now_s = self._clock.now()
            for device_id, ledger in self._ledgers.items():
                used_bytes = self._used_bytes[device_id]
                ledger.publish_serving(attrs.evolve(IDLE_SERVING, kv_used_bytes=used_bytes, kv_pool_bytes=_KV_BYTES))
                ledger.beat(now_s)
            self._is_over.wait(_BEAT_S)


@attrs.define(eq=False)
class Site:
    """A running site; see ``running``."""

    pool: RolloutPool
    lender: Lender
    serving: ServingStandIn
    dedicated: Sequence[KeptEngine]
    borrowed: Mapping[DeviceId, KeptEngine]

    @property
    def engines(self) -> Sequence[KeptEngine]:
        """All engines."""
        return [*self.dedicated, *self.borrowed.values()]

    async def wait_until_all_work(self) -> None:
        """Wait until every engine is well and takes turns."""
        names = {engine.engine_id for engine in self.engines}
        while True:
            ready = {view.engine_id for view in self.pool.snapshot().engines if view.state is EngineState.READY}
            if names <= ready and all(engine.is_well.is_set() for engine in self.engines):
                return
            await asyncio.sleep(_BEAT_S)


@contextlib.asynccontextmanager
async def running(config: SiteConfig) -> AsyncIterator[Site]:
    """Run a site with all engines in the pool; nothing of it is left afterwards.

    Raises:
        ExceptionGroup: Engines do not start.
    """
    folder, clock = config.folder, MonotonicClock()
    folder.mkdir(parents=True, exist_ok=True)
    model = make_qwen3(
        folder / "model", hidden=128, heads=4, kv_heads=2, head_dim=64, vocab=VOCAB, max_positions=config.max_positions
    )
    devices = [DeviceId(f"gpu{i}") for i in range(config.num_borrowed)]
    ledgers = {device_id: Ledger.create(folder / f"{device_id}.ledger") for device_id in devices}
    lending = LendingConfig(ttl_s=10.0, grace_s=0.5, rest_s=1.0, min_hold_s=0.0)
    pool_config = PoolConfig(
        routing=RoutingConfig(cap_per_engine=config.cap_per_engine),
        stall_s=config.stall_s,
        rejoin_s=0.5,
        rejoin_max_s=2.0,
    )
    async with contextlib.AsyncExitStack() as stack:
        serving = stack.enter_context(ServingStandIn(ledgers, clock))
        gate = asyncio.Semaphore(_STARTS_AT_ONCE)
        dedicated = [KeptEngine(_options(config, model, f"own{i}"), gate) for i in range(config.num_dedicated)]
        borrowed = {device_id: KeptEngine(_options(config, model, device_id, device_id), gate) for device_id in devices}
        async with asyncio.TaskGroup() as group:
            for engine in (*dedicated, *borrowed.values()):
                stack.push_async_callback(engine.close)
                group.create_task(engine.start())
        lender = Lender(ledgers, clock, lending, Mode.UNGATED)
        pool = await stack.enter_async_context(RolloutPool(dedicated, config=pool_config, clock=clock))
        borrower = Borrower(lender, pool, borrowed, job=_JOB, clock=clock, ask_again_s=_ASK_AGAIN_S, demand=None)
        await stack.enter_async_context(borrower)
        site = Site(pool, lender, serving, dedicated, borrowed)
        await site.wait_until_all_work()
        yield site


def _options(config: SiteConfig, model: Path, name: str, device_id: DeviceId | None = None) -> VllmOptions:
    rose = {}
    if device_id is not None:
        rose = {
            "role": "rollout",
            "device": {"kind": "host", "path": str(config.folder / f"{device_id}.device")},
            "ledger": str(config.folder / f"{device_id}.ledger"),
            "memory": {
                "pool_bytes": _KV_BYTES,
                "headroom_bytes": 0,
                "granule_bytes": _GRANULE_BYTES,
                "growth_fraction": 1.0,
                "growth_interval_s": 0.0,
            },
        }
    return VllmOptions(
        engine_id=EngineId(name),
        model=str(model),
        initial_version=WeightVersion("faults", 0),
        max_num_seqs=2 * config.cap_per_engine,
        kv_cache_bytes=_KV_BYTES,
        dtype=config.dtype,
        rose=rose,
    )
