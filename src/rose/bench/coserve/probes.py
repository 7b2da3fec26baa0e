"""Single figures of a device that is lent: how fast it is given back, and what sharing costs when nothing is shared.

Each takes real engines, but for the ledger's and the pages' cost, which need none.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rose.bench.coserve.figures import percentile
from rose.bench.coserve.live import MODES, ROLLOUT, SERVING, LiveRig, LiveRun, RunPlan
from rose.clocks import MonotonicClock
from rose.coserving.executor import GovernorConfig, RolloutGovernor, ServingGovernor, ServingLoad
from rose.coserving.ledger import Ledger
from rose.coserving.step_log import StepLog
from rose.errors import EngineError
from rose.interfaces.device import Device, StepWork
from rose.policies.admission import AdmissionConfig, Budget, Mode
from rose.policies.memory import MemoryConfig
from rose.simulation.traces import Arrival

YIELD_POLICIES = ("alone", "slo", "quiet")
_SPACING_S, _JITTER_S = 0.45, 0.1
_PROBE_PROMPT_TOKENS, _PROBE_OUTPUT_TOKENS = 512, 4
_NUM_YIELDS = 50
_NUM_DRAINS = 3
_SETTLE_S = 3.0
_POLL_S = 0.002
_GIVE_UP_S = 20.0
_NUM_LEDGER_STEPS = 3000
_NUM_DECODES = 32


class _FreeDevice(Device):
    """A device that is always free and never takes time."""

    device_id = "probe"
    clock = MonotonicClock()

    def acquire(self, *, is_blocking: bool) -> bool:
        del is_blocking
        return True

    def release(self) -> None:
        """Give the turn back."""

    def predict_s(self, work: StepWork) -> float:
        del work
        return 1e-6

    def begin_step(self, work: StepWork, ready_at_s: float) -> float:
        del work
        return ready_at_s

    def finish_step(self, end_s: float) -> float:
        del end_s
        return 0.0

    def give_pages(self, address: int, num_bytes: int) -> int:
        del address
        return num_bytes


class _IdleClock(MonotonicClock):
    """Real time; whoever would wait does not."""

    is_frozen = False

    def block(self, duration_s: float) -> None:
        """Go on at once."""


class _TimedLedger:
    """A ledger whose calls are timed together."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.path = ledger.path
        self.spent_s = 0.0

    def __getattr__(self, name: str) -> Any:
        return partial(self._call, getattr(self._ledger, name))

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        begun_s = time.perf_counter()
        try:
            return method(*arguments)
        finally:
            self.spent_s += time.perf_counter() - begun_s


def measure_ledger(num_steps: int = _NUM_LEDGER_STEPS) -> dict[str, float]:
    """Return what one step's reads and writes of the ledger take in each engine's step loop, in microseconds.

    The step loops are the governors that engines run; the device is always free and 32 requests decode.
    """
    with tempfile.TemporaryDirectory(prefix="rose-") as folder:
        ledger = Ledger.create(Path(folder) / "ledger")
        ledger.publish_budget(Budget(mode=Mode.SLO, fencing_token=1, expires_s=float("inf"), is_granted=True))
        timed = {role: _TimedLedger(ledger) for role in ("serving", "rollout")}
        clock, device = _IdleClock(), _FreeDevice()
        config = GovernorConfig(think_s=0.0)  # serving does not wait for the rollout engine's next step
        serving = ServingGovernor(
            device,
            clock,
            config,
            StepLog(0),
            ledgers=[timed["serving"]],  # type: ignore[list-item] # the same methods, timed
            admission=AdmissionConfig(),
            chunk_tokens=2048,
            kv_pool_bytes=4e10,
        )
        rollout = RolloutGovernor(
            device,
            clock,
            config,
            StepLog(0),
            ledgers=[timed["rollout"]],  # type: ignore[list-item] # the same methods, timed
            admission=AdmissionConfig(),
            memory=MemoryConfig(pool_bytes=40_000_000_000),
        )
        spent_us: dict[str, list[float]] = {role: [] for role in timed}
        try:
            for number in range(num_steps):
                for each in timed.values():
                    each.spent_s = 0.0
                _one_step(serving, rollout, number)
                for role, each in timed.items():
                    spent_us[role].append(each.spent_s * 1e6)
        finally:
            serving.close()
            rollout.close()
        return {f"{role}_us": statistics.median(each) for role, each in spent_us.items()}


def _one_step(serving: ServingGovernor, rollout: RolloutGovernor, number: int) -> None:
    """Let both step loops make one step, as the engines' schedulers do."""
    work = StepWork(num_decodes=_NUM_DECODES, context_tokens=32_000)
    rollout.is_lease_over()
    rollout.kv_budget_bytes()
    if rollout.ask_rollout(work, _nothing):
        rollout.begin(work)
        rollout.finish(has_more=True)
    rollout.publish(num_running=16, num_waiting=0, kv_used_bytes=1e10, num_evicted=0, num_tokens=16)
    rollout.release()
    serving.ask_serving(_nothing)
    serving.begin(work)
    serving.finish(has_more=True)
    decoding = [(f"r{i}", number + 1) for i in range(_NUM_DECODES)]
    serving.publish(
        ServingLoad(
            num_running=_NUM_DECODES, decoding=decoding, decode_context_tokens=work.context_tokens, kv_used_bytes=1e9
        )
    )
    serving.release()


def _nothing() -> None:
    """Take in nothing."""


def sparse_arrivals(num_arrivals: int, seed: int) -> tuple[Arrival, ...]:
    """Return short requests so far apart that each finds the serving engine idle."""
    rng = random.Random(seed)
    return tuple(
        Arrival(_SPACING_S * (i + 1) + rng.uniform(0, _JITTER_S), _PROBE_PROMPT_TOKENS, _PROBE_OUTPUT_TOKENS)
        for i in range(num_arrivals)
    )


async def measure_yield(rig: LiveRig, num_arrivals: int = _NUM_YIELDS) -> dict[str, Any]:
    """Send prompts to an idle serving engine whose device is lent; return how long each waits for its prefill to begin.

    What it waits in a run of serving alone is subtracted. Times in modelled milliseconds.
    """
    arrivals = sparse_arrivals(num_arrivals, rig.settings.seed)
    duration_s = arrivals[-1].at_s + _SETTLE_S
    runs = {}
    for policy in YIELD_POLICIES:
        runs[policy] = await rig.run(
            RunPlan(policy=policy, label=f"yield-{policy}", arrivals=arrivals, duration_s=duration_s)
        )
    waits = {policy: prefill_waits_s(run) for policy, run in runs.items()}
    base_s = statistics.fmean(waits["alone"])
    figures: dict[str, Any] = {"alone_ms": base_s * 1e3, "num_arrivals": num_arrivals}
    for policy in YIELD_POLICIES[1:]:
        added_ms = [(wait_s - base_s) * 1e3 for wait_s in waits[policy]]
        turns_ms = sorted(row[1] * 1e3 for row in runs[policy].turns[ROLLOUT])
        figures[policy] = {
            "mean_ms": statistics.fmean(added_ms),
            "p99_ms": _percentile(added_ms, 99),
            "max_ms": max(added_ms),
            "step_median_ms": statistics.median(turns_ms),
            "step_bound_ms": turns_ms[-1],
            "ttft_p50_added_ms": _ttft_ms(runs[policy], 50) - _ttft_ms(runs["alone"], 50),
            "ttft_p90_added_ms": _ttft_ms(runs[policy], 90) - _ttft_ms(runs["alone"], 90),
            "idle_used_fraction": idle_used_fraction(runs[policy]),
            "problems": list(runs[policy].problems),
        }
    return figures


def prefill_waits_s(run: LiveRun) -> list[float]:
    """Return how long after its arrival each request's prefill began, of a run whose requests never met.

    Raises:
        EngineError: There are other prefills than one a request.
    """
    starts = [row[0] for row in run.turns[SERVING] if row[5]]
    arrived = sorted(record.arrived_s for record in run.requests)
    if len(starts) != len(arrived):
        message = f"run {run.label}: {len(starts)} prefills of {len(arrived)} requests; they met, or some were lost"
        raise EngineError(message)
    return [start - at for start, at in zip(starts, arrived, strict=True)]


def idle_used_fraction(run: LiveRun, host_gap_s: float = 1.5e-3) -> float:
    """Return which share of the time that serving left was rollouts', their steps with the host's gaps after them."""
    serving_s = sum(row[1] + host_gap_s for row in run.turns[SERVING])
    rollout_s = sum(row[1] + host_gap_s for row in run.turns[ROLLOUT])
    return rollout_s / (run.duration_s - serving_s)


def _ttft_ms(run: LiveRun, q: float) -> float:
    return _percentile([record.ttft_s * 1e3 for record in run.requests], q)


def _percentile(values: Sequence[float], q: float) -> float:
    import numpy as np  # noqa: PLC0415 - as in figures

    return percentile(np.array(values), q)


async def measure_drain(rig: LiveRig, arrivals: Sequence[Arrival], num_drains: int = _NUM_DRAINS) -> dict[str, Any]:
    """Throw the kill switch under load; return the real seconds until no rollout request, KV or turn is left on the device."""
    drains = []
    site = rig.site(arrivals)
    async with rig.running(MODES["slo"], "drain", site):
        for _ in range(num_drains):
            await _until(lambda: rig.ledger.rollout().num_running > 0, "rollouts run")
            await rig.clock.sleep(_SETTLE_S)
            num_running = rig.ledger.rollout().num_running
            begun_s = time.monotonic()
            rig.revoke()
            await _until(partial(_is_drained, rig), "the device is drained")
            drains.append({"s": time.monotonic() - begun_s, "num_running": num_running})
            rig.lend(Mode.SLO)
    await site.end(rig.settings.slo)
    return {"drain_s": max(drain["s"] for drain in drains), "drains": drains}


def _is_drained(rig: LiveRig) -> bool:
    state = rig.ledger.rollout()
    return not state.num_running and not state.kv_used_bytes and state.turn_ends_s <= rig.clock.now()


async def _until(is_so: Callable[[], bool], what: str) -> None:
    give_up_s = time.monotonic() + _GIVE_UP_S
    while not is_so():
        if time.monotonic() > give_up_s:
            message = f"waited {_GIVE_UP_S:g} s in vain until {what}"
            raise EngineError(message)
        await asyncio.sleep(_POLL_S)


async def measure_watchdog(rig: LiveRig) -> dict[str, Any]:
    """Stop the rollout engine while it holds the device; return what serving's next request waits for it, and the bound.

    The engine is replaced afterwards.
    """
    arrivals = sparse_arrivals(12, rig.settings.seed + 1)
    site = rig.site(arrivals)
    async with rig.running(MODES["slo"], "watchdog", site) as (slots, started_s):
        await rig.clock.sleep(started_s + arrivals[3].at_s + 0.3 - rig.clock.now())
        state = await _stop_holder(rig)
        died = await _has_ended(state.pid)
        if not died:
            os.kill(state.pid, signal.SIGKILL)
        await rig.clock.sleep(started_s + arrivals[-1].at_s + 1.0 - rig.clock.now())
        slots.abandon()
    answered = await site.end(rig.settings.slo)
    ttfts_s = sorted(record.ttft_s for record in answered.records)
    await rig.restart_rollout()
    config = GovernorConfig()
    return {
        "was_ended": died,
        "delay_ms": (ttfts_s[-1] - statistics.median(ttfts_s)) * 1e3,
        "bound_ms": (state.step_s + config.watchdog_s) * 1e3,
        "step_ms": state.step_s * 1e3,
        "watchdog_ms": config.watchdog_s * 1e3,
        "unanswered": answered.num_unanswered,
    }


async def _stop_holder(rig: LiveRig) -> Any:
    """Stop the rollout engine in the middle of a turn; returns what it said of itself last."""
    device = rig.device()
    try:
        for _ in range(1000):
            state = rig.ledger.rollout()
            if state.turn_ends_s - rig.clock.now() > state.step_s / 3:
                os.kill(state.pid, signal.SIGSTOP)
                if not device.acquire(is_blocking=False):
                    return state
                device.release()
                os.kill(state.pid, signal.SIGCONT)
            await asyncio.sleep(_POLL_S)
    finally:
        device.close()
    message = "the rollout engine never held the device when it was stopped"
    raise EngineError(message)


async def _has_ended(pid: int) -> bool:
    give_up_s = time.monotonic() + 3.0
    while time.monotonic() < give_up_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rsplit(")", 1)[1].split()[0] == "Z":
                return True
        except OSError:
            return True
        await asyncio.sleep(_POLL_S)
    return False
