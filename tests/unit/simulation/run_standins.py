"""A live run that never was: a little serving engine, the record of its answers, and a simulator that knows it."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import attrs

from rose.backends.paced import Profile, profile_named
from rose.coserving.step_log import StepLog
from rose.interfaces.device import StepWork
from rose.policies.admission import AdmissionConfig, Mode
from rose.policies.compute import ChunkConfig
from rose.policies.memory import MemoryConfig
from rose.simulation.profile_fit import StepScale, scaled_profile
from rose.simulation.run_record import (
    SCHEMA,
    ArrivalRecord,
    DeviceRecord,
    EngineMeasure,
    MachineRecord,
    MeasuredRun,
    RequestMeasure,
    RolloutSetup,
    RunRecord,
    ServingSetup,
    StepSummary,
    TrajectoryMeasure,
    TrajectoryScript,
    TurnScript,
    write_run,
)
from rose.simulation.run_replay import RunPrediction
from rose.simulation.run_tables import write_steps, write_turns
from rose.simulation.serving_site import Answer as SimulatedAnswer

CHUNK_TOKENS = 512
SERVING = "h100:qwen2.5-7b"
POLICIES = {"ungated": Mode.UNGATED, "paper": Mode.PAPER, "slo": Mode.SLO}


@attrs.frozen
class Answer:
    arrival: ArrivalRecord
    first_s: float
    last_s: float

    @property
    def ttft_s(self) -> float:
        return self.first_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float | None:
        num_gaps = self.arrival.output_tokens - 1
        return (self.last_s - self.first_s) / num_gaps if num_gaps else None


def some_arrivals(num_requests: int, *, seed: int = 0) -> tuple[ArrivalRecord, ...]:
    rng, at_s, arrivals = random.Random(seed), 0.0, []
    for _ in range(num_requests):
        at_s += rng.expovariate(6.0)
        arrivals.append(
            ArrivalRecord(
                at_s=at_s, prompt_tokens=rng.randint(1, 1500), output_tokens=rng.choice([1, rng.randint(2, 90)])
            )
        )
    return tuple(arrivals)


def serve(
    arrivals: Sequence[ArrivalRecord], profile: Profile
) -> tuple[list[list[float]], list[StepWork], list[Answer]]:
    """Answer the arrivals one continuous batch at a time; returns log rows, the true work of each, and the answers."""
    waiting = deque([arrival, 0] for arrival in arrivals)
    decoding: list[list[float]] = []  # place in the list of answers, context, tokens left
    rows, works, firsts, lasts, now_s = [], [], {}, {}, 0.0
    places = {arrival: place for place, arrival in enumerate(arrivals)}
    while waiting or decoding:
        if not decoding and not waiting[0][1]:
            now_s = max(now_s, waiting[0][0].at_s)
        positions, done, budget = 0.0, [], CHUNK_TOKENS - len(decoding)
        while waiting and waiting[0][0].at_s <= now_s and budget:
            arrival, num_done = waiting[0]
            chunk = min(budget, arrival.prompt_tokens - num_done)
            budget -= chunk
            waiting[0][1] += chunk
            positions += chunk * (num_done + chunk - chunk / 2)
            if waiting[0][1] == arrival.prompt_tokens:
                done.append(arrival)
                waiting.popleft()
        num_prefill = CHUNK_TOKENS - len(decoding) - budget
        work = StepWork(num_prefill, len(decoding), int(sum(c + 1 for _, c, _ in decoding)), positions)
        took_s = profile.step_s(work)
        rows.append([now_s, took_s, 0.0, 0.0, 0.0, float(num_prefill), float(len(decoding))])
        works.append(work)
        now_s += took_s
        for place, _, left in decoding:
            if left == 1:
                lasts[place] = now_s
        decoding = [[place, context + 1, left - 1] for place, context, left in decoding if left > 1]
        for arrival in done:
            place = places[arrival]
            firsts[place] = lasts[place] = now_s
            if arrival.output_tokens > 1:
                decoding.append([place, arrival.prompt_tokens, arrival.output_tokens - 1])
        now_s += profile.host_gap_s
    return rows, works, [Answer(arrival, firsts[i], lasts[i]) for i, arrival in enumerate(arrivals)]


def small_record(**changes: object) -> RunRecord:
    """Return a record of one dedicated and one shared device, nothing measured yet."""
    record = RunRecord(
        schema=SCHEMA,
        made=MachineRecord(
            date="2026-01-01",
            commit="0" * 40,
            machine="a machine",
            num_cores=2,
            load_1min=0.1,
            versions={"python": "3.11"},
            wall_s=1.0,
        ),
        seed=0,
        k=2.5,
        tokens_per_token=1,
        load_source="made up",
        window_s=5.0,
        serving=ServingSetup(
            profile=SERVING, max_seqs=256, chunk_tokens=CHUNK_TOKENS, block_tokens=32, max_context_tokens=32_768
        ),
        rollout=RolloutSetup(
            profile="h100:qwen3-8b",
            max_seqs=64,
            chunk=ChunkConfig(),
            block_tokens=32,
            max_context_tokens=16_384,
            cap_per_engine=16,
        ),
        admission=AdmissionConfig(),
        memory=MemoryConfig(pool_bytes=40 << 30),
        devices=(
            DeviceRecord(name="own0", rollout_engine="dedicated0"),
            DeviceRecord(name="shared0", rollout_engine="borrowed0", serving_engine="serving0"),
        ),
        arrivals={"shared0": some_arrivals(60)},
        trajectories=(
            TrajectoryScript(
                trajectory_id="g0/t0",
                group_id="g0",
                turns=(TurnScript(new_tokens=100, output_tokens=20, env_s=0.1),),
            ),
        ),
        runs=(),
    )
    return attrs.evolve(record, **changes)


def engine_measure(engine_id: str, rows: Sequence[Sequence[float]] = (), **changes: object) -> EngineMeasure:
    log = StepLog()
    for row in rows:
        log.append(row)
    none = StepSummary(num_steps=0, duration_s=0.0, num_prefill_tokens=0, num_decodes=0)
    measure = EngineMeasure(engine_id=engine_id, pacing=log.report(), steps={"decode": none, "prefill": none})
    return attrs.evolve(measure, **changes)


def alone_run(record: RunRecord, *, scale: StepScale, overhead_s: float, repeat: int = 1) -> tuple[MeasuredRun, list]:
    """Return a run of ``alone`` on a GPU that is ``scale`` of the profile, and its log."""
    rows, _, answers = serve(record.arrivals["shared0"], scaled_profile(profile_named(SERVING), scale))
    requests = tuple(
        RequestMeasure(
            device="shared0",
            index=index,
            arrived_s=answer.arrival.at_s,
            ttft_s=answer.ttft_s + overhead_s,
            tpot_s=answer.tpot_s,
            num_tokens=answer.arrival.output_tokens,
        )
        for index, answer in enumerate(answers)
    )
    run = MeasuredRun(
        arm="alone",
        repeat=repeat,
        duration_s=rows[-1][0] + 1,
        requests=requests,
        engines=(engine_measure("serving0", rows),),
    )
    return run, rows


def policy_run(record: RunRecord, arm: str, *, ttft_s: float, rollout_s: float, repeat: int = 1) -> MeasuredRun:
    """Return a run in which every request took the same."""
    requests = tuple(
        RequestMeasure(device="shared0", index=i, arrived_s=a.at_s, ttft_s=ttft_s, tpot_s=ttft_s / 2, num_tokens=5)
        for i, a in enumerate(record.arrivals["shared0"])
    )
    return MeasuredRun(
        arm=arm,
        mode=POLICIES[arm],
        repeat=repeat,
        rollout_s=rollout_s,
        duration_s=rollout_s + 1,
        requests=requests,
        trajectories=(
            TrajectoryMeasure(trajectory_id="g0/t0", started_s=0.0, ended_s=rollout_s, num_tokens=20, num_hops=0),
        ),
        engines=(
            engine_measure("dedicated0", num_tokens=20, window_tokens=15),
            engine_measure("borrowed0", num_tokens=8, window_tokens=5),
        ),
    )


def write_folder(folder: Path, record: RunRecord, rows: Sequence[Sequence[float]]) -> Path:
    """Write the record; every run of ``alone`` gets the rows as its log, the policies' devices take turns and one more."""
    write_run(record, folder)
    for run in record.runs:
        write_steps(folder, run, {"serving0": rows} if run.arm == "alone" else POLICY_LOGS)
        write_turns(folder, run, TURNS if run.arm != "alone" else [])
    return folder


def step_row(start_s: float, duration_s: float, num_prefill: int, num_decodes: int) -> list[float]:
    return [start_s, duration_s, 0.0, 0.0, 0.0, float(num_prefill), float(num_decodes)]


# One answer of 20 tokens to 100 on a dedicated engine whose steps take 1.5 times the profile's.
ROLLOUT = profile_named("h100:qwen3-8b")
_DECODES = [step_row(1.0 + i, 1.5 * ROLLOUT.step_s(StepWork(0, 1, 100 + i)), 0, 1) for i in range(1, 20)]
POLICY_LOGS = {
    "dedicated0": [step_row(1.0, 0.1, 100, 0), *_DECODES],
    "serving0": [
        step_row(0.0, 0.1, 10, 0),
        step_row(0.4, 0.1, 0, 1),
        step_row(0.7, 0.1, 0, 1),
        step_row(0.9, 0.1, 0, 1),
    ],
    "borrowed0": [step_row(0.1, 0.1, 0, 1), step_row(0.2, 0.1, 0, 1), step_row(0.5, 0.1, 0, 1)],
}
TURNS = [
    ("g0/t0", 0, 0.5, 20.5, 100, 20, "dedicated0:20:finished"),
    ("g0/t0", 1, 1.0, 9.0, 50, 9, "a:4:stalled b:5:finished"),
]


def predict_alone(record: RunRecord, *, serving: Profile, api_overhead_s: float) -> RunPrediction:
    """Simulate ``alone`` exactly, on the GPU that the profile says."""
    _, _, answers = serve(record.arrivals["shared0"], serving)
    requests = tuple(SimulatedAnswer(a.arrival.at_s, a.ttft_s + api_overhead_s, a.tpot_s) for a in answers)
    return RunPrediction(requests=requests, rollout_s=None, num_tokens=0, borrowed_tokens=0, window_tokens=0)


def predict_policy(record: RunRecord, *, ttft_s: float, rollout_s: float) -> RunPrediction:
    """Say that every request takes the same."""
    requests = tuple(SimulatedAnswer(a.at_s, ttft_s, ttft_s / 2) for a in record.arrivals["shared0"])
    return RunPrediction(requests=requests, rollout_s=rollout_s, num_tokens=20, borrowed_tokens=8, window_tokens=20)
