"""What of the simulator is fitted to a live run, and to which part of it. Reads the run's tables, else pure.

* Serving's profile, its host gap and the front end's overhead: to ``alone``, serving without any rollout.
* The rollout profile: to the steps of dedicated engines in pure decoding, which no policy touches, of all arms.
* Turns that serving misses: to the step logs of ``ungated``, where both engines want the device and no policy has a say.

So a figure of ``alone`` is a fit, and how ``ungated`` shares its devices is in part; the rest is prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import attrs

from rose.backends.paced import Profile, profile_named
from rose.errors import ConfigError
from rose.simulation.prediction_error import ALONE
from rose.simulation.profile_fit import StepFit, TimedStep, fit_profile, scaled_profile
from rose.simulation.run_record import HOW_MADE, MeasuredRun, RunRecord
from rose.simulation.run_replay import RunPrediction
from rose.simulation.run_tables import read_steps, read_turns
from rose.simulation.step_replay import (
    EndedAnswer,
    ServedRequest,
    StepReplay,
    extra_guest_turns,
    replay_decodes,
    replay_steps,
)

UNGATED = "ungated"


@attrs.frozen(kw_only=True)
class RunFit:
    """What was fitted. Times in seconds.

    Attributes:
        serving: Serving's profile against its steps.
        rollout: The rollout profile against steps of dedicated engines; ``None`` where there were none.
        replayed_fraction: Share of serving's logged steps whose work could be made out.
        api_overhead_s: Added to every first token: what the front end takes on the way in and out.
        first_token_delay_s: Median part of that on the way out, from the log: end of the step to the client.
        missed_turns: A guest's turns beyond one between two of serving's where both wanted the device; 0 without ``ungated``.
        client_lateness_s: Median time by which clients were late to send a request.
    """

    serving: StepFit
    rollout: StepFit | None
    replayed_fraction: float
    api_overhead_s: float
    first_token_delay_s: float
    missed_turns: float
    client_lateness_s: float

    def serving_profile(self, record: RunRecord) -> Profile:
        """Return serving's fitted profile."""
        return scaled_profile(profile_named(record.serving.profile), self.serving.scale)

    def rollout_profile(self, record: RunRecord) -> Profile:
        """Return the fitted rollout profile, or the nominal one."""
        nominal = profile_named(record.rollout.profile)
        return nominal if self.rollout is None else scaled_profile(nominal, self.rollout.scale)


def fit_run(record: RunRecord, run_dir: Path, predict_alone: Callable[[RunFit], RunPrediction]) -> RunFit:
    """Fit everything to a live run.

    Args:
        record: The run.
        run_dir: Its folder.
        predict_alone: Simulates ``alone`` with what is fitted so far, which has no overhead yet.

    Raises:
        ConfigError: There is no valid run of ``alone``, or its tables are malformed or fit none of its requests.
    """
    runs = record.valid_runs(ALONE)
    if not runs:
        message = (
            f"{run_dir}: no valid run of {ALONE!r}, which serving is fitted to; repeat the live run on an idle machine"
        )
        raise ConfigError(message)
    replays = [replay for run in runs for replay in _replays(record, run_dir, run)]
    timed = [step for replay in replays for step in replay.steps]
    gaps_s = [gap_s for replay in replays for gap_s in replay.gaps_s]
    if not timed or not gaps_s:
        message = f"{run_dir}: the step logs of {ALONE!r} fit none of its requests; {HOW_MADE}"
        raise ConfigError(message)
    serving = fit_profile(profile_named(record.serving.profile), timed)
    lateness_s = [
        request.arrived_s - _planned_s(record, run, i) for run in runs for i, request in enumerate(run.requests)
    ]
    bare = RunFit(
        serving=attrs.evolve(serving, scale=attrs.evolve(serving.scale, host_gap_s=median(gaps_s))),
        rollout=_fit_rollout(record, run_dir),
        replayed_fraction=len(timed) / sum(replay.num_logged for replay in replays),
        api_overhead_s=0.0,
        first_token_delay_s=median(delay_s for replay in replays for delay_s in replay.first_token_delays_s),
        missed_turns=_missed_turns(record, run_dir),
        client_lateness_s=max(0.0, median(lateness_s)),
    )
    return attrs.evolve(bare, api_overhead_s=_overhead_s(record, runs, predict_alone(bare)))


def _planned_s(record: RunRecord, run: MeasuredRun, place: int) -> float:
    request = run.requests[place]
    return record.arrivals[request.device][request.index].at_s


def _replays(record: RunRecord, run_dir: Path, run: MeasuredRun) -> list[StepReplay]:
    logs = read_steps(run_dir, run)
    return [
        replay_steps(logs.get(device.serving_engine or "", []), _served(record, run, device.name))
        for device in record.shared_devices
    ]


def _served(record: RunRecord, run: MeasuredRun, device: str) -> list[ServedRequest]:
    arrivals = record.arrivals[device]
    return [
        ServedRequest(
            prompt_tokens=arrivals[request.index].prompt_tokens,
            output_tokens=request.num_tokens,
            first_token_s=request.arrived_s + request.ttft_s,
        )
        for request in sorted((each for each in run.requests if each.device == device), key=lambda each: each.arrived_s)
    ]


def _fit_rollout(record: RunRecord, run_dir: Path) -> StepFit | None:
    dedicated = [device.rollout_engine for device in record.devices if device.serving_engine is None]
    timed: list[TimedStep] = []
    for run in record.runs:
        if not run.is_valid or run.rollout_s is None:
            continue
        logs, turns = read_steps(run_dir, run), read_turns(run_dir, run)
        for engine_id in dedicated:
            answers = [
                EndedAnswer(prompt_tokens=turn.num_prompt_tokens, output_tokens=turn.num_tokens, ended_s=turn.ended_s)
                for turn in turns
                if turn.engine_id == engine_id
            ]
            timed += replay_decodes(logs.get(engine_id, []), answers)
    return fit_profile(profile_named(record.rollout.profile), timed) if timed else None


def _missed_turns(record: RunRecord, run_dir: Path) -> float:
    num_extra = num_contested = 0
    for run in record.valid_runs(UNGATED):
        logs = read_steps(run_dir, run)
        for device in record.shared_devices:
            extra, contested = extra_guest_turns(
                logs.get(device.serving_engine or "", []), logs.get(device.rollout_engine, [])
            )
            num_extra += extra
            num_contested += contested
    return num_extra / num_contested if num_contested else 0.0


def _overhead_s(record: RunRecord, runs: Sequence[MeasuredRun], bare: RunPrediction) -> float:
    """Return by how much first tokens came later than simulated without overhead, the median over the requests, at least 0."""
    predicted = [answer.ttft_s for answer in sorted(bare.requests, key=lambda answer: answer.arrived_s)]
    extras: list[float] = []
    for run in runs:
        order = sorted(range(len(run.requests)), key=lambda place: _planned_s(record, run, place))
        measured = [run.requests[place].ttft_s for place in order]
        if len(measured) == len(predicted):
            extras += [took_s - said_s for took_s, said_s in zip(measured, predicted, strict=True)]
        elif measured and predicted:
            extras.append(median(measured) - median(predicted))
    return max(0.0, median(extras)) if extras else 0.0
