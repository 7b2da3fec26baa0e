"""What a live run on paced devices (or GPUs) leaves, so that the same thing can be simulated: ``RUN_DIR/run.json``.

``benchmarks/fidelity.py`` writes such a folder, ``rose.simulation.calibrate`` reads it. Times are seconds of the run's own
clock (modelled ones on paced devices), counted from the start of their run; tokens are the engines' own, each of which
stands for ``tokens_per_token`` modelled ones; sizes are modelled bytes.

``run.json`` is one object with the fields of ``RunRecord``, nested objects with those of the classes here:

* what was run: ``serving``, ``rollout`` (how the engines were set up), ``admission`` and ``memory`` (of each shared device),
  ``devices``, ``arrivals`` (by shared device), ``trajectories`` (scripted: so many new tokens, so many answered, so long an
  environment), ``window_s``;
* what it was run on: ``k``, ``made``;
* what was measured: ``runs``, one an attempt; those with ``problems`` are kept for the count and used for nothing else.

Beside it, two files a run, see ``rose.simulation.run_tables``: every device turn, and every turn of a trajectory.

Invariants: names refer to what is there, every run answers its own arrivals and trajectories only, an arm that rolls out
has all trajectories exactly once; ``read_run`` refuses anything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path

import attrs

from rose import checks
from rose.config import load
from rose.coserving.step_log import PacingReport
from rose.errors import ConfigError
from rose.policies.admission import AdmissionConfig, Mode
from rose.policies.compute import ChunkConfig
from rose.policies.memory import MemoryConfig

SCHEMA = 1
FILE_NAME = "run.json"
HOW_MADE = "write it with benchmarks/fidelity.py"


@attrs.frozen(kw_only=True)
class MachineRecord:
    """Where and when the run was made."""

    date: str = attrs.field(validator=checks.text())
    commit: str = attrs.field(validator=checks.text())
    machine: str = attrs.field(validator=checks.text())
    num_cores: int = attrs.field(validator=checks.integer(1))
    load_1min: float = attrs.field(validator=checks.number(at_least=0))
    versions: Mapping[str, str]
    wall_s: float = attrs.field(validator=checks.number(at_least=0))


@attrs.frozen(kw_only=True)
class ServingSetup:
    """How each serving engine was set up: profile, requests and prompt tokens of a step at most, KV block."""

    profile: str = attrs.field(validator=checks.text())
    max_seqs: int = attrs.field(validator=checks.integer(1))
    chunk_tokens: int = attrs.field(validator=checks.integer(1))
    block_tokens: int = attrs.field(validator=checks.integer(1))
    max_context_tokens: int = attrs.field(validator=checks.integer(1))


@attrs.frozen(kw_only=True)
class RolloutSetup:
    """How each rollout engine was set up, and how many turns the pool sends to one at a time."""

    profile: str = attrs.field(validator=checks.text())
    max_seqs: int = attrs.field(validator=checks.integer(1))
    chunk: ChunkConfig = attrs.field(validator=checks.instance(ChunkConfig))
    block_tokens: int = attrs.field(validator=checks.integer(1))
    max_context_tokens: int = attrs.field(validator=checks.integer(1))
    cap_per_engine: int = attrs.field(validator=checks.integer(1))


@attrs.frozen(kw_only=True)
class DeviceRecord:
    """One device and its engines; a dedicated one has no serving engine."""

    name: str = attrs.field(validator=checks.text())
    rollout_engine: str = attrs.field(validator=checks.text())
    serving_engine: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))


@attrs.frozen(kw_only=True)
class ArrivalRecord:
    """One serving request as it was planned."""

    at_s: float = attrs.field(validator=checks.number(at_least=0))
    prompt_tokens: int = attrs.field(validator=checks.integer(1))
    output_tokens: int = attrs.field(validator=checks.integer(1))


@attrs.frozen(kw_only=True)
class TurnScript:
    """One turn: ``new_tokens`` join the trajectory's context, ``output_tokens`` are answered, then the environment takes ``env_s``."""

    new_tokens: int = attrs.field(validator=checks.integer(1))
    output_tokens: int = attrs.field(validator=checks.integer(1))
    env_s: float = attrs.field(validator=checks.number(at_least=0))


@attrs.frozen(kw_only=True)
class TrajectoryScript:
    """One trajectory; all are started at once, in order, at the start of a run."""

    trajectory_id: str = attrs.field(validator=checks.text())
    group_id: str = attrs.field(validator=checks.text())
    turns: tuple[TurnScript, ...] = attrs.field(validator=checks.Check("at least one turn", bool))

    @property
    def num_tokens(self) -> int:
        """Return how many tokens the policy makes."""
        return sum(turn.output_tokens for turn in self.turns)


@attrs.frozen(kw_only=True)
class RequestMeasure:
    """One serving request as it was answered; ``index`` is its place among its device's arrivals."""

    device: str = attrs.field(validator=checks.text())
    index: int = attrs.field(validator=checks.integer(0))
    arrived_s: float = attrs.field(validator=checks.number())
    ttft_s: float = attrs.field(validator=checks.number(at_least=0))
    tpot_s: float | None = attrs.field(default=None, validator=checks.optional(checks.number(at_least=0)))
    num_tokens: int = attrs.field(validator=checks.integer(1))


@attrs.frozen(kw_only=True)
class TrajectoryMeasure:
    """One trajectory as it ran. ``num_hops``: attempts of its turns beyond the first of each."""

    trajectory_id: str = attrs.field(validator=checks.text())
    started_s: float = attrs.field(validator=checks.number())
    ended_s: float = attrs.field(validator=checks.number())
    num_tokens: int = attrs.field(validator=checks.integer(0))
    num_hops: int = attrs.field(validator=checks.integer(0))


@attrs.frozen(kw_only=True)
class StepSummary:
    """Device turns of one kind: how many, how long together, what they computed."""

    num_steps: int = attrs.field(validator=checks.integer(0))
    duration_s: float = attrs.field(validator=checks.number(at_least=0))
    num_prefill_tokens: int = attrs.field(validator=checks.integer(0))
    num_decodes: int = attrs.field(validator=checks.integer(0))


@attrs.frozen(kw_only=True)
class EngineMeasure:
    """One engine in one run.

    Attributes:
        num_tokens: Rollout tokens that the pool had from it by the end of the run; 0 for serving.
        window_tokens: Those by ``window_s``.
        num_ended: Attempts of turns by how they ended.
        kv_budget_bytes: Its KV budget when the run began; ``None`` where memory is not shared.
        pacing: Whether its step times may be believed.
        steps: Device turns, by ``decode`` and ``prefill`` (with prompt tokens).
    """

    engine_id: str = attrs.field(validator=checks.text())
    num_tokens: int = attrs.field(default=0, validator=checks.integer(0))
    window_tokens: int = attrs.field(default=0, validator=checks.integer(0))
    num_ended: Mapping[str, int] = attrs.field(factory=dict)
    kv_budget_bytes: float | None = attrs.field(default=None, validator=checks.optional(checks.number(at_least=0)))
    pacing: PacingReport
    steps: Mapping[str, StepSummary]


@attrs.frozen(kw_only=True)
class MeasuredRun:
    """One attempt at one arm.

    Attributes:
        arm: ``alone`` (serving only) or the policy's name.
        mode: The lender's; ``None`` where nothing was lent.
        repeat: Which of the arm's runs, from 1.
        attempt: Which try at it, from 1.
        problems: Why it must not be used; empty for a valid run.
        rollout_s: Start of the run to the end of the last trajectory; ``None`` without rollouts.
        duration_s: Until everything was answered.
    """

    arm: str = attrs.field(validator=checks.text(r"[\w-]+"))
    mode: Mode | None = None
    repeat: int = attrs.field(validator=checks.integer(1))
    attempt: int = attrs.field(default=1, validator=checks.integer(1))
    problems: tuple[str, ...] = ()
    rollout_s: float | None = attrs.field(default=None, validator=checks.optional(checks.number(above=0)))
    duration_s: float = attrs.field(validator=checks.number(above=0))
    requests: tuple[RequestMeasure, ...]
    trajectories: tuple[TrajectoryMeasure, ...] = ()
    engines: tuple[EngineMeasure, ...]

    @property
    def is_valid(self) -> bool:
        """Return whether its figures may be used."""
        return not self.problems

    @property
    def label(self) -> str:
        """Return what tells it from the other runs."""
        return f"{self.arm}-{self.repeat}.{self.attempt}"


@attrs.frozen(kw_only=True)
class RunRecord:
    """Everything about a live run that a simulation of it needs, and what it is judged by.

    Attributes:
        schema: Of this file; ``SCHEMA``.
        k: Wall seconds of a modelled second; 1 on real devices.
        window_s: Serving's load lasts that long, and rollout tokens are counted up to then as well.
        arrivals: By shared device.
    """

    schema: int = attrs.field(validator=checks.Check(f"{SCHEMA}, the only known one", lambda value: value == SCHEMA))
    made: MachineRecord = attrs.field(validator=checks.instance(MachineRecord))
    seed: int = attrs.field(validator=checks.integer(0))
    k: float = attrs.field(validator=checks.number(above=0))
    tokens_per_token: int = attrs.field(validator=checks.integer(1))
    load_source: str = attrs.field(validator=checks.text())
    window_s: float = attrs.field(validator=checks.number(above=0))
    serving: ServingSetup = attrs.field(validator=checks.instance(ServingSetup))
    rollout: RolloutSetup = attrs.field(validator=checks.instance(RolloutSetup))
    admission: AdmissionConfig = attrs.field(validator=checks.instance(AdmissionConfig))
    memory: MemoryConfig = attrs.field(validator=checks.instance(MemoryConfig))
    devices: tuple[DeviceRecord, ...] = attrs.field(validator=checks.Check("at least one device", bool))
    arrivals: Mapping[str, tuple[ArrivalRecord, ...]]
    trajectories: tuple[TrajectoryScript, ...]
    runs: tuple[MeasuredRun, ...]

    def __attrs_post_init__(self) -> None:
        """Check that the parts fit together."""
        shared = [device.name for device in self.shared_devices]
        if sorted(self.arrivals) != sorted(shared):
            message = (
                f"arrivals are for {_listed(self.arrivals)}, the devices with a serving engine are {_listed(shared)}"
            )
            raise ValueError(message)
        for run in self.runs:
            self._check(run)

    def _check(self, run: MeasuredRun) -> None:
        where = f"run {run.label}"
        keys = [(request.device, request.index) for request in run.requests]
        foreign = [key for key in keys if key[1] >= len(self.arrivals.get(key[0], ()))]
        if foreign or len(set(keys)) < len(keys):
            what = (
                f"request {foreign[0][1]} of {foreign[0][0]!r} never arrived" if foreign else "a request is there twice"
            )
            message = f"{where}: {what}"
            raise ValueError(message)
        planned = sorted(trajectory.trajectory_id for trajectory in self.trajectories)
        done = sorted(trajectory.trajectory_id for trajectory in run.trajectories)
        if run.is_valid and done not in ([], planned):
            message = f"{where}: has {len(done)} trajectories where {len(planned)} were planned, or others"
            raise ValueError(message)
        if run.is_valid and bool(done) != (run.rollout_s is not None):
            message = f"{where}: rollout_s belongs to runs with trajectories, and to no other"
            raise ValueError(message)

    @property
    def arms(self) -> tuple[str, ...]:
        """Return the arms in the order of their first runs."""
        return tuple(dict.fromkeys(run.arm for run in self.runs))

    @property
    def shared_devices(self) -> tuple[DeviceRecord, ...]:
        """Return the devices with a serving engine."""
        return tuple(device for device in self.devices if device.serving_engine is not None)

    @property
    def borrowed_engines(self) -> frozenset[str]:
        """Return the rollout engines on shared devices."""
        return frozenset(device.rollout_engine for device in self.shared_devices)

    def valid_runs(self, arm: str) -> tuple[MeasuredRun, ...]:
        """Return the runs of an arm that may be used."""
        return tuple(run for run in self.runs if run.arm == arm and run.is_valid)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def write_run(record: RunRecord, folder: Path) -> None:
    """Write ``run.json``, replacing an older one as a whole."""
    part = folder / f"{FILE_NAME}.part"
    text = json.dumps(attrs.asdict(record, value_serializer=_plain), allow_nan=False, indent=1)
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(folder / FILE_NAME)


def _plain(_instance: object, _field: object, value: object) -> object:
    return value.value if isinstance(value, Enum) else value


def read_run(folder: Path) -> RunRecord:
    """Read ``run.json`` strictly.

    Raises:
        ConfigError: It cannot be read, is no JSON, or has keys or values that a run does not have; one line each.
    """
    path = folder / FILE_NAME
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        message = f"{folder} has no readable {FILE_NAME} ({error.strerror}); {HOW_MADE}"
        raise ConfigError(message) from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        message = f"{path} is not valid JSON ({error}); {HOW_MADE}"
        raise ConfigError(message) from error
    if not isinstance(data, Mapping):
        message = f"{path} holds no JSON object; {HOW_MADE}"
        raise ConfigError(message)
    try:
        return load(RunRecord, data)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error
