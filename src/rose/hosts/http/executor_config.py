"""Configuration of an executor: one shared device (or a gang of them), its serving engine, its rollout engine, where it listens.

The SLO, how it is spent and how memory is shared are serving's: they stand under ``[serving]`` and both engines run by them. The mode in
force (``slo``, ``quiet`` and so on) and the lease are the lender's, in the ledger.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import attrs

from rose import checks
from rose.backends.vllm.environment import engine_environment
from rose.backends.vllm.options import ROSE_SCHEDULER, VllmOptions
from rose.config import load
from rose.errors import ConfigError
from rose.hosts.http.auth import TokenConfig
from rose.hosts.http.executor_rollout import RestartConfig
from rose.hosts.http.lender_config import ledger_problems
from rose.hosts.http.server import parse_place
from rose.policies.admission import AdmissionConfig
from rose.policies.memory import MemoryConfig, possible_budget
from rose.types import WeightVersion

_OPTIONS_OF_ROSE = ("engine_id", "model", "initial_version", "tensor_parallel_size", "rose", "scheduler_cls")


@attrs.frozen(kw_only=True)
class SharedDevice:
    """The device, or the devices of one node that engines use all together.

    Attributes:
        kind: ``host``: this machine; ``paced``: steps take the time that a profile says.
        paths: The turn's file of each device.
        ledgers: The ledger of each, in the same order; made where missing.
        clock: The paced clock's file; made where missing.
        k: Real seconds of one modelled second, of a clock that is made.
    """

    kind: Literal["host", "paced"]
    paths: tuple[str, ...]
    ledgers: tuple[str, ...]
    clock: str | None = None
    k: float = attrs.field(default=1.0, validator=checks.number(above=0))

    def __attrs_post_init__(self) -> None:
        if not self.paths or len(self.paths) != len(self.ledgers):
            message = f"device: {len(self.paths)} paths and {len(self.ledgers)} ledgers; give each device one of both"
            raise ValueError(message)
        files = [Path(path).absolute() for path in (*self.paths, *self.ledgers, *filter(None, [self.clock]))]
        if twice := next((path for path in files if files.count(path) > 1), None):
            message = f"device: {twice} is named twice; each device has a file and a ledger of its own"
            raise ValueError(message)
        if (self.kind == "paced") != (self.clock is not None):
            message = "device: clock is for paced devices, and they need one"
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class ServingConfig:
    """The serving engine. One of ``attach``, ``command`` and ``model``.

    Attributes:
        attach: It runs already, with ROSE's scheduler on the device's ledger.
        command: How to start it; it survives the executor, and is found again by the next one.
        model: Start vLLM's own server for this checkpoint; ``command`` written out.
        args: Further arguments of that server, for instance ``["--port", "8000"]``.
        environment: Variables for it, beside the executor's own.
        profile: Of a paced device, what serving's model costs: ``gpu:model``.
        admission: The SLO and how it is spent.
        memory: How KV memory is shared; without it only a budget that is set by hand bounds the rollout engine.
        timing: Timing of its step loop, as ``rose.timing`` has it.
        stale_s: A heartbeat older than this is reported as unhealthy.
    """

    attach: bool = False
    command: tuple[str, ...] = ()
    model: str | None = None
    args: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    profile: str | None = None
    admission: AdmissionConfig = attrs.field(factory=AdmissionConfig)
    memory: MemoryConfig | None = None
    timing: Mapping[str, Any] = attrs.field(factory=dict)
    stale_s: float = attrs.field(default=1.0, validator=checks.number(above=0))

    def __attrs_post_init__(self) -> None:
        if sum((self.attach, bool(self.command), self.model is not None)) != 1:
            message = "serving: give exactly one of attach = true, command and model"
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class RolloutConfig:
    """The rollout engine: vLLM in a process that ends with the executor's.

    Attributes:
        model: Checkpoint of the policy.
        engine_id: Its name; the first device's by default.
        initial_version: The published version that the checkpoint is, as ``run:n``; unknown by default.
        profile: Of a paced device, what this model costs: ``gpu:model``.
        tokens_per_token: Modelled tokens that one token of this engine stands for.
        options: Further fields of ``rose.backends.vllm.VllmOptions``.
        timing, chunk: Tables of the same name of ``rose`` settings.
    """

    model: str = attrs.field(validator=checks.text(r".+"))
    engine_id: str | None = None
    initial_version: str | None = None
    profile: str | None = None
    tokens_per_token: int = attrs.field(default=1, validator=checks.integer(1))
    options: Mapping[str, Any] = attrs.field(factory=dict)
    timing: Mapping[str, Any] = attrs.field(factory=dict)
    chunk: Mapping[str, Any] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class ExecutorConfig:
    """One executor.

    Attributes:
        run_dir: Folder for its lock, the serving engine's pid file and log; made where missing.
        device: What is shared.
        serving: Whose it is.
        rollout: Who borrows it.
        listen: ``HOST:PORT``, or ``HOST:FIRST-LAST``: the first free one. Loopback unless tokens are configured.
        tokens: Bearer tokens that are asked for.
        restart: When an engine that died is started again.
        drain_s: How long rollouts may take to end at SIGTERM.
    """

    run_dir: Path
    device: SharedDevice
    serving: ServingConfig
    rollout: RolloutConfig
    listen: str = "127.0.0.1:0"
    tokens: tuple[TokenConfig, ...] = ()
    restart: RestartConfig = attrs.field(factory=RestartConfig)
    drain_s: float = attrs.field(default=2.0, validator=checks.number(above=0))


def load_config(path: Path | str) -> ExecutorConfig:
    """Read and check a configuration as far as that is possible without starting anything.

    Raises:
        ConfigError: One line a problem.
    """
    config = load(ExecutorConfig, path)
    problems = []
    if not re.fullmatch(r"[^\s/\\]+", _engine_id(config)):
        key = (
            "rollout.engine_id" if config.rollout.engine_id is not None else "device.paths[0], which names the engine,"
        )
        problems.append(f"{key}: a name is without spaces and slashes and not empty, got {_engine_id(config)!r}")
    try:
        is_open = not parse_place(config.listen).is_loopback
    except ConfigError as error:
        is_open = False
        problems.append(f"listen: {error}")
    if is_open and not config.tokens:
        problems.append(f"listen = {config.listen!r} can be reached from other machines: configure [[tokens]]")
    names = [token.name for token in config.tokens]
    problems += [
        f"tokens: the name {name!r} is there twice" for name in sorted({n for n in names if names.count(n) > 1})
    ]
    for who, model in (("rollout", config.rollout.model), ("serving", config.serving.model)):
        if model is not None and model.startswith((".", "/")) and not Path(model).is_dir():
            problems.append(f"{who}.model: there is no folder {model}")
    for who, profile in (("rollout", config.rollout.profile), ("serving", config.serving.profile)):
        is_ours = who == "rollout" or config.serving.model is not None
        if (config.device.kind == "paced") != (profile is not None) and is_ours:
            problems.append(
                f"{who}.profile is for paced devices, and they need one; device.kind is {config.device.kind!r}"
            )
    memory = config.serving.memory
    if memory is not None and not possible_budget(memory, math.inf):
        problems.append(
            f"serving.memory: pool_bytes {memory.pool_bytes} less headroom_bytes {memory.headroom_bytes} leaves no granule_bytes "
            f"{memory.granule_bytes} to lend; give less head-room"
        )
    if problems:
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    _check_settings(config, path)
    return config


def _check_settings(config: ExecutorConfig, path: Path | str) -> None:
    from rose.backends.step_settings import read_settings  # noqa: PLC0415 - loads numpy

    for where, settings in (("rollout", rollout_settings(config)), ("serving", serving_settings(config))):
        if where == "serving" and config.serving.model is None:
            continue
        try:
            read_settings(settings)
        except ConfigError as error:
            raise ConfigError("\n".join(f"{path}: {where}: {line}" for line in str(error).splitlines())) from error
    try:
        rollout_options(config)
    except ConfigError as error:
        raise ConfigError("\n".join(f"{path}: {line}" for line in str(error).splitlines())) from error


def place_problems(config: ExecutorConfig) -> list[str]:
    """Return what is wrong with the files and folders that a configuration names, each with its key; nothing is made."""
    problems = []
    found = next(
        folder for folder in (config.run_dir.absolute(), *config.run_dir.absolute().parents) if folder.exists()
    )
    if not found.is_dir() or not os.access(found, os.W_OK | os.X_OK):
        problems.append(f"run_dir: {config.run_dir} cannot be made, {found} is no folder that you may write to")
    shared = config.device
    files = [(f"device.paths[{index}]", path) for index, path in enumerate(shared.paths)]
    files += [(f"device.ledgers[{index}]", path) for index, path in enumerate(shared.ledgers)]
    files += [] if shared.clock is None else [("device.clock", shared.clock)]
    for key, path in files:
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            problems.append(f"{key}: there is no folder {folder}; make it first")
        elif not path or (Path(path).is_dir() and not key.startswith("device.ledgers")):
            problems.append(f"{key}: {path!r} is no file; name one, it is made where missing")
        elif key.startswith("device.ledgers"):
            problems += ledger_problems(key, Path(path))
    return problems


def _engine_id(config: ExecutorConfig) -> str:
    engine_id = config.rollout.engine_id
    return Path(config.device.paths[0]).stem if engine_id is None else engine_id


def rollout_options(config: ExecutorConfig) -> VllmOptions:
    """Return the options of the rollout engine.

    Raises:
        ConfigError: ``rollout.options`` has what is no such option, or what the executor sets itself.
    """
    rollout = config.rollout
    own = sorted(set(rollout.options) & set(_OPTIONS_OF_ROSE))
    if own:
        message = f"rollout.options: {', '.join(own)} is set by the executor itself; see [rollout] and [device]"
        raise ConfigError(message)
    try:
        version = None if rollout.initial_version is None else WeightVersion.parse(rollout.initial_version)
    except ValueError as error:
        message = f"rollout.initial_version: {error}"
        raise ConfigError(message) from error
    given = {
        **rollout.options,
        "engine_id": _engine_id(config),
        "model": rollout.model,
        "initial_version": version,
        "tensor_parallel_size": len(config.device.paths),
        "rose": rollout_settings(config),
    }
    try:
        return load(VllmOptions, given)
    except ConfigError as error:
        raise ConfigError("\n".join(f"rollout.options.{line}" for line in str(error).splitlines())) from error


def rollout_settings(config: ExecutorConfig) -> dict[str, Any]:
    """Return the rollout engine's ``rose`` settings."""
    rollout = config.rollout
    settings = _settings(config, "rollout", rollout.profile, rollout.tokens_per_token, rollout.timing)
    return settings | ({"chunk": dict(rollout.chunk)} if rollout.chunk else {})


def serving_settings(config: ExecutorConfig) -> dict[str, Any]:
    """Return the serving engine's ``rose`` settings: what an attached one must have been started with."""
    return _settings(config, "serving", config.serving.profile, 1, config.serving.timing)


def serving_command(config: ExecutorConfig) -> Sequence[str]:
    """Return how the serving engine is started; nothing where it runs already."""
    serving = config.serving
    if serving.model is None:
        return serving.command
    return (
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", serving.model),
        *("--scheduler-cls", ROSE_SCHEDULER),
        *("--tensor-parallel-size", str(len(config.device.paths))),
        *("--additional-config", json.dumps({"rose": serving_settings(config)})),
        *serving.args,
    )


def serving_environment(config: ExecutorConfig) -> Mapping[str, str]:
    """Return the variables of the serving engine beside the executor's own; the configured ones win."""
    model = config.serving.model
    needed = {} if model is None else engine_environment(is_offline=Path(model).is_dir())
    return {**needed, **config.serving.environment}


def _settings(
    config: ExecutorConfig, role: str, profile: str | None, tokens_per_token: int, timing: Mapping[str, Any]
) -> dict[str, Any]:
    shared, serving = config.device, config.serving
    device: dict[str, Any] = {"kind": shared.kind, "path": _one_or_all(shared.paths)}
    if shared.kind == "paced":
        device |= {"clock": shared.clock, "profile": profile, "tokens_per_token": tokens_per_token}
    settings = {
        "role": role,
        "device": device,
        "ledger": _one_or_all(shared.ledgers),
        "admission": _plain(serving.admission),
        "memory": None if serving.memory is None else _plain(serving.memory),
        "timing": dict(timing),
    }
    return {name: value for name, value in settings.items() if value is not None and value != {}}


def _one_or_all(paths: Sequence[str]) -> str | list[str]:
    return paths[0] if len(paths) == 1 else list(paths)


def _plain(record: attrs.AttrsInstance) -> dict[str, Any]:
    """Return a config object as plain data that reads back as itself; what is ``None`` is left out."""

    def render(_owner: object, _field: object, value: Any) -> Any:
        return getattr(value, "value", value)

    data = attrs.asdict(record, value_serializer=render)
    return {name: value for name, value in data.items() if value is not None}
