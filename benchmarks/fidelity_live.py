"""A live fleet on paced devices, and one run of one arm on it.

Life cycle of a run: the clock stands still while a pool is opened, devices are borrowed and serving's load is made ready; then
the clock runs, all trajectories start at once, serving's load lasts ``window_s`` and is answered to its end; then the clock stands still
again and everybody's figures are collected. So serving's clients and the rollouts count from the same modelled moment.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
from fidelity_plan import MAX_CONTEXT_TOKENS, Options

from rose.coserving.ledger import Ledger
from rose.coserving.step_log import StepLog
from rose.observe.latency import Slo
from rose.policies.admission import Mode
from rose.policies.routing import RoutingConfig
from rose.pool import EngineAccount, PoolConfig, RolloutPool
from rose.reference.demo_config import DemoConfig
from rose.reference.demo_models import make_serving_model
from rose.reference.engines import EngineSpec
from rose.reference.fleet import SERVING_MAX_MODEL_LEN, SERVING_VOCAB, Fleet, Models
from rose.reference.load import ServingLoad, plan_load
from rose.reference.serving_site import ServingArm, ServingSite
from rose.reference.trajectory import derive_seed
from rose.simulation.run_record import (
    EngineMeasure,
    MeasuredRun,
    RequestMeasure,
    StepSummary,
    TrajectoryMeasure,
    TrajectoryScript,
)
from rose.types import EngineId, Sampling, Turn

NANO_KV_BYTES = 128
FIRST_WORD = 3
MAX_OUTPUT_TOKENS = 2048
DRAIN_POLL_S = 0.05
DRAIN_LIMIT_S = 60.0

StepRows = Mapping[EngineId, Sequence[Sequence[float]]]


@attrs.frozen(kw_only=True)
class RunPlan:
    """One run to make: ``mode`` is ``None`` where nothing is lent and nothing rolls out."""

    arm: str
    mode: Mode | None
    repeat: int
    attempt: int
    trajectories: tuple[TrajectoryScript, ...]
    window_s: float

    @property
    def label(self) -> str:
        """Return what tells this run from all others; chooses its token ids."""
        return f"{self.arm}-{self.repeat}.{self.attempt}"


def cut_load(options: Options, config: DemoConfig) -> ServingLoad:
    """Return each shared device's arrivals within ``load_s``."""
    load = plan_load(
        options.trace,
        rate_rps=options.rate_rps,
        offset_s=0.0,
        num_devices=config.num_borrowed,
        seed=options.seed,
        max_prompt_tokens=SERVING_MAX_MODEL_LEN - MAX_OUTPUT_TOKENS,
        max_output_tokens=MAX_OUTPUT_TOKENS,
    )
    by_device = tuple(tuple(a for a in device if a.at_s < options.load_s) for device in load.by_device)
    return attrs.evolve(load, by_device=by_device)


@attrs.define(kw_only=True)
class LiveFleet:
    """Running engines."""

    config: DemoConfig
    fleet: Fleet
    site: ServingSite
    load: ServingLoad
    serving_specs: Sequence[EngineSpec]
    turns: list[tuple[object, ...]] = attrs.field(factory=list)  # of the latest run, see ``TURN_COLUMNS``

    @classmethod
    @contextlib.asynccontextmanager
    async def start(cls, options: Options) -> AsyncIterator[LiveFleet]:
        """Start everything; end it when the context is left."""
        config = options.fleet_config()
        load = cut_load(options, config)
        async with contextlib.AsyncExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rose-models-")))
            models = Models(
                policy=make_serving_model(folder / "policy", seed=config.seed + 1),
                serving=make_serving_model(folder / "serving", seed=config.seed),
                policy_max_len=MAX_CONTEXT_TOKENS,
                policy_kv_bytes=NANO_KV_BYTES,
                serving_kv_bytes=NANO_KV_BYTES,
            )
            fleet = Fleet.prepare(config)
            stack.push_async_callback(fleet.close)
            serving = fleet.serving_specs(config, models)
            site = await ServingSite.start(serving, load, clock_path=Path(fleet.clock.path), vocab_size=SERVING_VOCAB)
            stack.push_async_callback(site.close)
            await fleet.start(config, models)
            yield cls(config=config, fleet=fleet, site=site, load=load, serving_specs=serving)

    async def run(self, plan: RunPlan) -> tuple[MeasuredRun, StepRows]:
        """Make one run; returns what was measured and every engine's device turns."""
        fleet = self.fleet
        self.turns.clear()
        prompts = _draw_tokens(plan)
        budgets = {name: ledger.rollout().kv_budget_bytes for name, ledger in fleet.ledgers.items()}
        async with self._pool(plan) as pool:
            await self.site.begin(plan.label)
            started_s = fleet.clock.now()
            fleet.clock.unfreeze()
            try:
                trajectories, window = await self._let_run(plan, pool, prompts, started_s)
                duration_s = fleet.clock.now() - started_s
            finally:
                fleet.clock.freeze()
            accounts = {} if pool is None else pool.accounts()
        slo = Slo(ttft_ms=self.config.slo_ttft_ms, tpot_ms=self.config.slo_tpot_ms)
        serving = await self.site.end(slo)
        logs = await self._logs(started_s)
        budget_of = {fleet.borrowed[i].engine_id: budgets[name] for i, name in enumerate(fleet.ledgers)}
        run = MeasuredRun(
            arm=plan.arm,
            mode=plan.mode,
            repeat=plan.repeat,
            attempt=plan.attempt,
            rollout_s=max((t.ended_s for t in trajectories), default=None),
            duration_s=duration_s,
            requests=_requests(serving, fleet),
            trajectories=tuple(trajectories),
            engines=tuple(
                _engine(engine, rows, accounts.get(engine), window.get(engine), budget_of.get(engine))
                for engine, rows in sorted(logs.items())
            ),
        )
        return attrs.evolve(run, problems=tuple(self._problems(run, serving))), _relative(logs, started_s)

    @contextlib.asynccontextmanager
    async def _pool(self, plan: RunPlan) -> AsyncIterator[RolloutPool | None]:
        if plan.mode is None:
            yield None
            return
        self.fleet.lender.set_mode(plan.mode)
        pool = RolloutPool(
            self.fleet.dedicated,
            config=PoolConfig(routing=RoutingConfig(cap_per_engine=self.config.cap_per_engine)),
            clock=self.fleet.clock,
            seed=self.config.seed,
        )
        async with pool, self.fleet.lend_to(pool):
            if len(self.fleet.lender.leases) != self.config.num_borrowed:
                message = f"only {len(self.fleet.lender.leases)} of {self.config.num_borrowed} devices were lent"
                raise RuntimeError(message)
            yield pool

    async def _let_run(
        self, plan: RunPlan, pool: RolloutPool | None, prompts: Sequence[Sequence[Sequence[int]]], started_s: float
    ) -> tuple[list[TrajectoryMeasure], dict[EngineId, EngineAccount]]:
        """Let the clock run until all trajectories have ended and serving has answered everything."""
        clock, window = self.fleet.clock, {}

        async def watch() -> None:
            await clock.sleep(started_s + plan.window_s - clock.now())
            window.update({} if pool is None else pool.accounts())

        async with asyncio.TaskGroup() as group:
            group.create_task(watch())
            tasks = [
                group.create_task(self._trajectory(pool, script, ids, started_s, plan.label))
                for script, ids in zip(plan.trajectories, prompts, strict=True)
                if pool is not None
            ]
        await self._drain()
        return [task.result() for task in tasks], window

    async def _trajectory(
        self, pool: RolloutPool, script: TrajectoryScript, ids: Sequence[Sequence[int]], started_s: float, label: str
    ) -> TrajectoryMeasure:
        clock, context, num_hops, num_tokens = self.fleet.clock, [], 0, 0
        began_s = clock.now() - started_s
        for number, (turn, new_ids) in enumerate(zip(script.turns, ids, strict=True)):
            context += new_ids
            asked_s, num_prompt_tokens = clock.now() - started_s, len(context)
            sampling = Sampling(max_tokens=turn.output_tokens, temperature=0.0, ignore_eos=True, logprobs=False)
            result = await pool.generate(
                Turn(
                    trajectory_id=f"{label}/{script.trajectory_id}",
                    group_id=f"{label}/{script.group_id}",
                    prompt_ids=tuple(context),
                    sampling=sampling,
                )
            )
            context += result.token_ids
            num_tokens += len(result.token_ids)
            num_hops += len(result.hops) - 1
            hops = " ".join(f"{hop.engine_id}:{hop.num_tokens}:{hop.ended.value}" for hop in result.hops)
            times = (f"{asked_s:.6f}", f"{clock.now() - started_s:.6f}")
            self.turns.append((script.trajectory_id, number, *times, num_prompt_tokens, len(result.token_ids), hops))
            if turn.env_s:
                await clock.sleep(turn.env_s)
        return TrajectoryMeasure(
            trajectory_id=script.trajectory_id,
            started_s=began_s,
            ended_s=clock.now() - started_s,
            num_tokens=num_tokens,
            num_hops=num_hops,
        )

    async def _drain(self) -> None:
        """Wait until no serving engine has a request, then a moment for the last tokens to reach their clients."""
        clock, ledgers = self.fleet.clock, self.fleet.ledgers.values()
        give_up_s = clock.now() + DRAIN_LIMIT_S
        while clock.now() < give_up_s and any(_is_busy(ledger) for ledger in ledgers):  # noqa: ASYNC110 - another process
            await asyncio.sleep(DRAIN_POLL_S)
        await clock.sleep(2 * DRAIN_POLL_S)

    async def _logs(self, since_s: float) -> dict[EngineId, list[list[float]]]:
        own = {engine.engine_id: await engine.step_log(since_s) for engine in self.fleet.engines}
        return {**own, **await self.site.step_logs(since_s)}

    def _problems(self, run: MeasuredRun, serving: ServingArm) -> list[str]:
        problems = [
            f"pacing disturbed: {engine.engine_id} is late by {engine.pacing.late_p99_s * 1e3:.1f} ms (P99) of a median step "
            f"of {engine.pacing.median_step_s * 1e3:.1f} ms, rate error {engine.pacing.rate_error:.1%}"
            for engine in run.engines
            if engine.pacing.num_steps and not engine.pacing.is_valid
        ]
        num_planned = sum(len(device) for device in self.load.by_device)
        if serving.num_unanswered or len(run.requests) != num_planned:
            problems.append(f"serving answered {len(run.requests)} of {num_planned} requests")
        return problems


def _is_busy(ledger: Ledger) -> bool:
    state = ledger.serving()
    return bool(state.num_running or state.num_prompts_waiting)


def _draw_tokens(plan: RunPlan) -> list[list[list[int]]]:
    """Draw every trajectory's new token ids, anew for each run, so that no run finds another's prefixes in a cache."""
    if plan.mode is None:
        return [[] for _ in plan.trajectories]
    drawn = []
    for script in plan.trajectories:
        rng = random.Random(derive_seed(plan.label, script.trajectory_id))
        drawn.append([rng.choices(range(FIRST_WORD, SERVING_VOCAB), k=turn.new_tokens) for turn in script.turns])
    return drawn


def _requests(serving: ServingArm, fleet: Fleet) -> tuple[RequestMeasure, ...]:
    return tuple(
        RequestMeasure(
            device=fleet.devices[EngineId(record.device)],
            index=record.index,
            arrived_s=record.arrived_s,
            ttft_s=record.ttft_s,
            tpot_s=record.tpot_s,
            num_tokens=record.num_tokens,
        )
        for record in sorted(serving.records, key=lambda record: (record.device, record.index))
    )


def _engine(
    engine: EngineId,
    rows: Sequence[Sequence[float]],
    account: EngineAccount | None,
    window: EngineAccount | None,
    kv_budget_bytes: float | None,
) -> EngineMeasure:
    log = StepLog()
    for row in rows:
        log.append(row)
    return EngineMeasure(
        engine_id=engine,
        num_tokens=account.num_tokens if account else 0,
        window_tokens=window.num_tokens if window else 0,
        num_ended={end.value: count for end, count in account.num_ended.items() if count} if account else {},
        kv_budget_bytes=kv_budget_bytes,
        pacing=log.report(),
        steps={
            "decode": _summary(row for row in rows if not row[5]),
            "prefill": _summary(row for row in rows if row[5]),
        },
    )


def _summary(rows: Any) -> StepSummary:
    kept = list(rows)
    return StepSummary(
        num_steps=len(kept),
        duration_s=sum(row[1] for row in kept),
        num_prefill_tokens=int(sum(row[5] for row in kept)),
        num_decodes=int(sum(row[6] for row in kept)),
    )


def _relative(logs: StepRows, started_s: float) -> dict[EngineId, list[list[float]]]:
    return {engine: [[row[0] - started_s, *row[1:]] for row in rows] for engine, rows in logs.items()}
