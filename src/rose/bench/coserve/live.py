"""One paced device with a real serving engine and a real rollout engine of another model on it, and runs of one policy each.

Both engines run models of one layer, one token of them for one of the modelled model; their steps take a named GPU's time.
Serving's clients have a process of their own, the rollouts' are in this one.

Life cycle of a run: the clock stands still while every rollout slot's first context is computed; then the clock runs, rollouts and serving's load begin together and last ``duration_s``; then the clock stands still again and
everybody's figures are collected. Engines are started once and serve all runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rose.backends.paced import PacedClock, PacedDevice, profile_named
from rose.backends.vllm import VllmEngine, VllmOptions
from rose.bench.coserve.rollout_slots import RolloutSlots
from rose.bench.coserve.settings import LiveSettings
from rose.bench.coserve.world import kv_pool
from rose.coserving.ledger import Ledger
from rose.coserving.step_log import PacingReport, StepLog
from rose.errors import EngineError
from rose.observe.latency import RequestRecord
from rose.policies.admission import Budget, Mode
from rose.reference.demo_models import make_serving_model
from rose.reference.engines import BLOCK_TOKENS, EngineSpec
from rose.reference.fleet import SERVING_MAX_MODEL_LEN, SERVING_VOCAB
from rose.reference.load import ServingLoad
from rose.reference.serving_site import ServingSite
from rose.reference.worker_process import WorkerProcess
from rose.simulation.traces import Arrival
from rose.types import EngineId

MODES: Mapping[str, Mode | None] = {
    "alone": None,
    "ungated": Mode.UNGATED,
    "paper": Mode.PAPER,
    "slo": Mode.SLO,
    "quiet": Mode.QUIET,
}
"""Policy -> mode of the lender; ``None``: nothing is lent and nothing rolls out."""

TAIL_S = 2.0
"""No request is sent in the last seconds of a run, so that each one's first token can be seen."""

SERVING, ROLLOUT = EngineId("serving"), EngineId("rollout")
Rows = Sequence[Sequence[float]]

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - mkdtemp makes a private folder in it
_NANO_KV_BYTES = 128
_CLOSE_TIMEOUT_S = 30.0
_GROWN_FRACTION, _GROW_LIMIT_S = 0.9, 60.0
_CPU_S_A_STEP, _MEDIAN_STEP_S, _CLIENTS = 4.5e-3, 9e-3, 2.0


@attrs.frozen(kw_only=True)
class RunPlan:
    """One run: ``label`` tells it from all others of these engines and chooses its token ids."""

    policy: str
    label: str
    arrivals: tuple[Arrival, ...]
    duration_s: float


@attrs.frozen(kw_only=True)
class LiveRun:
    """What one run measured; times in modelled seconds from its start.

    Attributes:
        policy, label: As planned.
        requests: Serving's requests that had a first token.
        num_unanswered: Those that failed or waited longer than the TTFT budget at the end.
        net_tokens: What the rollout engine computed, without the contexts that evictions threw away.
        decoded_tokens, thrown_tokens: Rollout answer tokens, and those contexts.
        num_evicted: Rollout requests that the engine ended.
        pacing: Engine -> how well its steps kept to their times.
        turns: Engine -> its turns of the device, rows of ``StepRecord``'s values.
        problems: Why the run counts for nothing; empty for a valid one.
    """

    policy: str
    label: str
    duration_s: float
    requests: tuple[RequestRecord, ...]
    num_unanswered: int
    net_tokens: int
    decoded_tokens: int
    thrown_tokens: int
    num_evicted: int
    pacing: Mapping[EngineId, PacingReport]
    turns: Mapping[EngineId, Rows]
    problems: tuple[str, ...]


def choose_k() -> float:
    """Return the slowest clock rate that two busy engines and their clients need on this machine, in steps of a half."""
    num_cores = len(os.sched_getaffinity(0))
    needed = _CLIENTS * 2 * _CPU_S_A_STEP / (num_cores * 0.5 * _MEDIAN_STEP_S)
    return max(1.0, math.ceil(needed * 2) / 2)


@attrs.define(eq=False, kw_only=True)
class LiveRig:
    """Running engines on one device, and the hands of a lender and of clients."""

    settings: LiveSettings
    root: Path
    clock: PacedClock
    ledger: Ledger
    rollout_options: VllmOptions
    clients: WorkerProcess
    rollout: VllmEngine
    _token: int = 0
    _is_lent: bool = False

    @classmethod
    @contextlib.asynccontextmanager
    async def start(
        cls, settings: LiveSettings, clients_module: str = "rose.reference.serving_host"
    ) -> AsyncIterator[LiveRig]:
        """Start both engines and the clients' process (``python -m clients_module``); end them when the context is left.

        Raises:
            BackendUnavailableError: vLLM is not installed.
            EngineError: An engine did not start.
        """
        async with contextlib.AsyncExitStack() as stack:
            root = Path(tempfile.mkdtemp(prefix="rose-", dir=_SHARED_MEMORY if _SHARED_MEMORY.is_dir() else None))
            stack.callback(shutil.rmtree, root, ignore_errors=True)
            clock = PacedClock.create(root / "clock", k=settings.k or choose_k())
            clock.freeze()
            ledger = Ledger.create(root / "ledger")
            serving, rollout_options = _options(settings, root)
            clients = await WorkerProcess.start(clients_module, name="clients", error_type=EngineError)
            stack.push_async_callback(clients.close, timeout_s=_CLOSE_TIMEOUT_S)
            await clients.ask({"clock": clock.path, "engines": [attrs.asdict(_spec(serving))]})
            rig = cls(
                settings=settings,
                root=root,
                clock=clock,
                ledger=ledger,
                rollout_options=rollout_options,
                clients=clients,
                rollout=await VllmEngine.create(rollout_options, clock=clock),
            )
            stack.push_async_callback(rig._close_rollout)
            yield rig

    async def _close_rollout(self) -> None:
        await self.rollout.close()

    async def restart_rollout(self) -> None:
        """Replace the rollout engine, for instance after its death."""
        await self.rollout.close()
        self.rollout = await VllmEngine.create(self.rollout_options, clock=self.clock)

    def device(self) -> PacedDevice:
        """Return a handle of one's own on the device."""
        return PacedDevice(self.root / "device", self.settings.setup.serving, self.clock)

    def lend(self, mode: Mode) -> None:
        """Grant the device to the rollout engine, or change the mode of the lease that it has."""
        self._token += not self._is_lent
        self._is_lent = True
        budget = Budget(mode=mode, fencing_token=self._token, expires_s=math.inf, is_granted=True)
        self.ledger.publish_budget(budget)

    def revoke(self) -> None:
        """Take the device back: the kill switch."""
        self._token += 1
        self._is_lent = False
        self.ledger.publish_budget(Budget(fencing_token=self._token))

    def slots(self, label: str) -> RolloutSlots:
        """Return the rollouts of one run."""
        return RolloutSlots(
            engine=self.rollout,
            setup=self.settings.setup,
            seed=self.settings.seed,
            label=label,
        )

    def site(self, arrivals: Sequence[Arrival]) -> ServingSite:
        """Return serving's clients with a load."""
        load = ServingLoad(by_device=(tuple(arrivals),), source="bench")
        return ServingSite(self.clients, load, vocab_size=SERVING_VOCAB)

    @contextlib.asynccontextmanager
    async def running(
        self, mode: Mode | None, label: str, site: ServingSite
    ) -> AsyncIterator[tuple[RolloutSlots, float]]:
        """Let the clock run under serving's load, with all slots in use unless ``mode`` is ``None``; yields them and the start.

        Afterwards the clock stands still and no rollout is in flight.
        """
        slots = self.slots(label)
        self.lend(mode or Mode.CLOSED)
        if mode is not None:
            await self._grow(slots)
            await slots.warm_up()
        await site.begin(label)
        started_s = self.clock.now()
        self.clock.unfreeze()
        if mode is not None:
            slots.start()  # not before: while time stands still steps are free
        try:
            yield slots, started_s
        finally:
            self.clock.freeze()
            await slots.stop()

    async def _grow(self, slots: RolloutSlots) -> None:
        """Let the rollout engine's KV budget grow to what an idle serving engine leaves: it grows with time, while there is work."""
        setup = self.settings.setup
        enough_bytes = _GROWN_FRACTION * (kv_pool(setup) - setup.headroom_bytes)
        if self.ledger.rollout().kv_budget_bytes >= enough_bytes:
            return
        self.clock.unfreeze()
        try:
            async with asyncio.timeout(_GROW_LIMIT_S):
                while self.ledger.rollout().kv_budget_bytes < enough_bytes:
                    await slots.stir()
        except TimeoutError as error:
            message = (
                f"the rollout engine's KV budget did not grow to {enough_bytes / 1e9:.1f} GB in {_GROW_LIMIT_S:g} s"
            )
            raise EngineError(message) from error
        finally:
            self.clock.freeze()

    async def run(self, plan: RunPlan) -> LiveRun:
        """Make one run.

        Raises:
            EngineError: An engine was lost.
        """
        site = self.site([arrival for arrival in plan.arrivals if arrival.at_s < plan.duration_s - TAIL_S])
        async with self.running(MODES[plan.policy], plan.label, site) as (slots, started_s):
            await self.clock.sleep(started_s + plan.duration_s - self.clock.now())
        answered = await site.end(self.settings.slo)
        turns = await self.turns(site, started_s)
        pacing = {engine: _report(rows) for engine, rows in turns.items()}
        run = LiveRun(
            policy=plan.policy,
            label=plan.label,
            duration_s=plan.duration_s,
            requests=answered.records,
            num_unanswered=answered.num_unanswered,
            net_tokens=_num_tokens(turns[ROLLOUT], started_s + plan.duration_s) - slots.thrown_tokens,
            decoded_tokens=slots.num_decoded,
            thrown_tokens=slots.thrown_tokens,
            num_evicted=slots.num_evicted,
            pacing=pacing,
            turns={engine: [[row[0] - started_s, *row[1:]] for row in rows] for engine, rows in turns.items()},
            problems=tuple(_disturbances(pacing)),
        )
        return attrs.evolve(run, problems=(*run.problems, *_missing(run, answered.num_sent)))

    async def turns(self, site: ServingSite, since_s: float) -> dict[EngineId, list[list[float]]]:
        """Return both engines' turns of the device since then."""
        return {ROLLOUT: await self.rollout.step_log(since_s), **await site.step_logs(since_s)}


def _options(settings: LiveSettings, root: Path) -> tuple[VllmOptions, VllmOptions]:
    """Return the options of the serving and of the rollout engine."""
    setup = settings.setup
    serving, rollout = profile_named(setup.serving), profile_named(setup.rollout)
    pool_bytes = kv_pool(setup)
    model = str(make_serving_model(root / "model", seed=settings.seed))

    def options(role: EngineId, profile: Any, max_num_seqs: int, **further: Any) -> VllmOptions:
        num_blocks = int(pool_bytes / (profile.kv_bytes_per_token * BLOCK_TOKENS))
        rose = {
            "role": str(role),
            "device": {
                "kind": "paced",
                "path": str(root / "device"),
                "clock": str(root / "clock"),
                "profile": profile.name,
            },
            "ledger": str(root / "ledger"),
            "admission": {"slo": attrs.asdict(setup.slo)},
            "memory": {"pool_bytes": pool_bytes, "headroom_bytes": setup.headroom_bytes},
            "chunk": attrs.asdict(setup.chunk),
        }
        return VllmOptions(
            engine_id=role,
            model=model,
            max_model_len=SERVING_MAX_MODEL_LEN,
            max_num_seqs=max_num_seqs,
            kv_cache_bytes=num_blocks * BLOCK_TOKENS * _NANO_KV_BYTES,
            block_size=BLOCK_TOKENS,
            seed=settings.seed,
            rose=rose,
            **further,
        )

    return (
        options(SERVING, serving, setup.serving_max_seqs, max_num_batched_tokens=setup.serving_chunk_tokens),
        options(ROLLOUT, rollout, setup.num_slots),
    )


def _spec(options: VllmOptions) -> EngineSpec:
    """Return the serving engine as its clients' process takes it."""
    return EngineSpec(
        kind="vllm",
        engine_id=options.engine_id,
        model=options.model,
        max_len=SERVING_MAX_MODEL_LEN,
        max_requests=options.max_num_seqs,
        kv_tokens=options.kv_cache_bytes // _NANO_KV_BYTES,
        kv_token_bytes=_NANO_KV_BYTES,
        chunk_tokens=options.max_num_batched_tokens,
        seed=options.seed or 0,
        rose=options.rose,
    )


def _num_tokens(rows: Rows, until_s: float) -> int:
    """Return prompt and answer tokens of the turns that began before ``until_s``."""
    return int(sum(row[5] + row[6] for row in rows if row[0] < until_s))


def _report(rows: Rows) -> PacingReport:
    log = StepLog()
    for row in rows:
        log.append(row)
    return log.report()


def _disturbances(pacing: Mapping[EngineId, PacingReport]) -> list[str]:
    return [
        f"pacing disturbed: {engine} is late by {report.late_p99_s * 1e3:.1f} ms (P99) of a median step of "
        f"{report.median_step_s * 1e3:.1f} ms, rate error {report.rate_error:.1%}"
        for engine, report in pacing.items()
        if report.num_steps and not report.is_valid
    ]


def _missing(run: LiveRun, num_sent: int) -> list[str]:
    num_waiting = num_sent - len(run.requests)
    return [f"{num_waiting} of {num_sent} requests had no token"] if num_waiting > run.num_unanswered else []
