"""The job file: what a job reserves, what it may borrow, its engines, and where its weights go.

One file for ``rose pool``, ``rose run`` and ``RolloutPool.open``; each reads the tables that concern it. ``[loop]`` and ``[learner]`` are
the reference loop's and not looked at here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import attrs

from rose import checks, registry
from rose.config import load
from rose.errors import ConfigError
from rose.hosts.http.auth import TokenConfig
from rose.hosts.http.server import parse_place
from rose.policies.demand import DemandConfig
from rose.pool.config import PoolConfig
from rose.pool.store_offer import TargetShape

_NAME = r"[A-Za-z0-9_.-]+"
_URL = r"https?://[^\s/]+(/\S*)?"


@attrs.frozen(kw_only=True)
class JobTable:
    """``[job]``.

    Attributes:
        name: The job's name: at the lender, and of the run of its weights.
        seed: Of everything that is drawn.
    """

    name: str = attrs.field(validator=checks.text(_NAME))
    seed: int = attrs.field(default=0, validator=checks.integer(0))


@attrs.frozen(kw_only=True)
class ResourcesConfig:
    """``[resources]``: devices, by number.

    Attributes:
        n_rl: Devices that are reserved for the job: ``training + rollout``.
        training: Those of them that train.
        rollout: Those of them that roll out.
        n_serving: Devices of serving clusters that the job has leased at most at any time.
    """

    n_rl: int = attrs.field(validator=checks.integer(1))
    training: int = attrs.field(validator=checks.integer(0))
    rollout: int = attrs.field(validator=checks.integer(0))
    n_serving: int = attrs.field(default=0, validator=checks.integer(0))

    def __attrs_post_init__(self) -> None:
        """Check that the parts are the whole.

        Raises:
            ValueError: They are not.
        """
        if self.training + self.rollout != self.n_rl:
            message = (
                f"training + rollout must be n_rl, got {self.training} + {self.rollout} and {self.n_rl}; "
                "say what each reserved device does"
            )
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class ModelConfig:
    """``[model]``.

    Attributes:
        path: Folder of the checkpoint that engines start from; ``rose run`` writes one where there is none.
        name: What the lender knows the model as, where its devices run some models only.
    """

    path: Path
    name: str | None = None


@attrs.frozen(kw_only=True)
class DedicatedConfig:
    """One of ``[engines]``: engines of the job's own, started (``backend``) or found (``url``).

    Attributes:
        backend: Name of a serving backend, for instance ``vllm``.
        options: For it; the engine's id and the model come by themselves.
        url: An engine that an executor offers already.
        token_file: The bearer token for ``url``.
        count: Engines of this kind that are started.
        num_devices: Reserved devices that each takes.
    """

    backend: str | None = None
    options: Mapping[str, Any] = attrs.field(factory=dict)
    url: str | None = attrs.field(default=None, validator=checks.optional(checks.text(_URL)))
    token_file: Path | None = None
    count: int = attrs.field(default=1, validator=checks.integer(1))
    num_devices: int = attrs.field(default=1, validator=checks.integer(1))

    def __attrs_post_init__(self) -> None:
        """Check that there is one way to the engine.

        Raises:
            ValueError: There is none, or there are two.
        """
        if (self.backend is None) == (self.url is None):
            message = "give either backend, to start the engine, or url, where it runs already"
            raise ValueError(message)
        if self.url is not None and self.count != 1:
            message = f"count must be 1 with url, got {self.count}; name each running engine by itself"
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class LenderPlace:
    """``[lender]``: where ``rose lend`` listens.

    Attributes:
        url: Its address.
        token_file: The job's bearer token.
        ask_again_s: How long to wait before asking again for what was not granted.
        demand: How the job's demand for borrowed engines is followed.
    """

    url: str = attrs.field(validator=checks.text(_URL))
    token_file: Path | None = None
    ask_again_s: float = attrs.field(default=10.0, validator=checks.number(above=0))
    demand: DemandConfig = attrs.field(factory=DemandConfig)


@attrs.frozen(kw_only=True)
class ExecutorPlace:
    """One of ``[executors]``: where ``rose serve`` of a device listens."""

    url: str = attrs.field(validator=checks.text(_URL))
    token_file: Path | None = None


@attrs.frozen(kw_only=True)
class TransportConfig:
    """``[transport]``: the store that the trainer publishes to.

    Attributes:
        listen: The store is kept in memory, by the trainer or by the pool, and served here.
        keeper: With ``listen``: who keeps the store, ``trainer`` (``rose run``) or ``pool`` (``rose pool``, for loops of other frameworks).
        token_file: With ``listen``: its token, read from the file or written to it where there is none.
        address: A store that others keep: ``name`` and options as ``rose.open_transport`` takes them.
        targets: The engines to cut weights for, where a trainer asks the pool: ``{engine = "vllm", tp = 2}`` for each kind.
    """

    listen: str | None = None
    keeper: str = attrs.field(default="trainer", validator=checks.text("trainer|pool"))
    token_file: Path | None = None
    address: Mapping[str, Any] | None = None
    targets: Sequence[TargetShape] = ()

    def __attrs_post_init__(self) -> None:
        """Check that there is one store.

        Raises:
            ValueError: There are two or none.
        """
        if self.keeper == "pool" and self.address is not None:
            message = 'address is a store that others keep; leave it out with keeper = "pool", or leave keeper out'
            raise ValueError(message)
        if self.keeper != "pool" and (self.listen is None) == (self.address is None):
            message = "give either listen, to serve a store, or address, of one that others keep"
            raise ValueError(message)

    @property
    def place(self) -> str:
        """Return where a store that is kept in memory is served; on loopback, at a free port, where nothing is said."""
        return self.listen or "127.0.0.1:0"


@attrs.frozen(kw_only=True)
class ServiceConfig:
    """``[service]``: the pool as ``rose pool`` serves it.

    Attributes:
        listen: ``HOST:PORT``. Elsewhere than loopback only with tokens.
        tokens: Who may call.
        tokenizer: Folder of the model's tokenizer, for routes that take or give text; without it they take and give token ids only.
    """

    listen: str = "127.0.0.1:0"
    tokens: Sequence[TokenConfig] = ()
    tokenizer: Path | None = None


@attrs.frozen(kw_only=True)
class JobConfig:
    """The whole file.

    Attributes:
        engines: The job's own rollout engines, by name.
        executors: Device (several of one engine joined by ``+``) to the URL of its executor.
        relay: The store that engines on borrowed devices read from, as ``rose relay`` prints it; ``[transport]`` by default.
        loop, learner: The reference loop's.
    """

    job: JobTable
    resources: ResourcesConfig
    model: ModelConfig
    engines: Mapping[str, DedicatedConfig] = attrs.field(factory=dict)
    pool: PoolConfig = attrs.field(factory=PoolConfig)
    lender: LenderPlace | None = None
    executors: Mapping[str, str | ExecutorPlace] = attrs.field(factory=dict)
    transport: TransportConfig = attrs.field(factory=lambda: TransportConfig(listen="127.0.0.1:0"))
    relay: Mapping[str, Any] | None = None
    service: ServiceConfig = attrs.field(factory=ServiceConfig)
    loop: Any = attrs.field(factory=dict)
    learner: Any = attrs.field(factory=dict)


JobConfigT = TypeVar("JobConfigT", bound=JobConfig)


def executor_place(place: str | ExecutorPlace) -> ExecutorPlace:
    """Return an executor's place, which may be its URL alone."""
    return ExecutorPlace(url=place) if isinstance(place, str) else place


def job_problems(config: JobConfig) -> list[str]:
    """Return what is wrong with a job file as a whole, each with its key. Files are read, nothing is imported, made or called."""
    resources, problems = config.resources, []
    wanted = sum(engine.count * engine.num_devices for engine in config.engines.values())
    if wanted > resources.rollout:
        problems.append(
            f"engines: they take {wanted} devices, resources.rollout reserves {resources.rollout}; lower count or num_devices"
        )
    if not config.engines and not config.executors:
        problems.append("engines: there is none, and no [executors] either; a pool needs one of them")
    problems += _backend_problems(config)
    problems += _borrowing_problems(config)
    problems += _place_problems(config)
    return problems


def _backend_problems(config: JobConfig) -> list[str]:
    problems = []
    for name, engine in config.engines.items():
        try:
            if engine.backend is not None:
                registry.check_name("serving", engine.backend)
        except ConfigError as error:
            problems.append(f"engines.{name}.backend: {error}")
    return problems


def _borrowing_problems(config: JobConfig) -> list[str]:
    num_most, problems = config.resources.n_serving, []
    if config.executors and config.lender is None:
        problems.append("executors: they need [lender] with the url of a running rose lend, which leases their devices")
    if num_most and not config.executors:
        problems.append(f"resources.n_serving = {num_most} needs [executors]: device = URL of its rose serve")
    if config.executors and not num_most:
        problems.append(
            "resources.n_serving = 0 borrows nothing; give the number of devices to lease, or leave [executors] out"
        )
    for name, place in config.executors.items():
        num_devices = len(name.split("+"))
        if num_most and num_devices > num_most:
            problems.append(f"executors.{name}: needs {num_devices} devices, resources.n_serving is {num_most}")
        try:
            executor_place(place)
        except ValueError as error:
            problems.append(f"executors.{name}: {error.args[0]}")
    return problems


def _place_problems(config: JobConfig) -> list[str]:
    problems = []
    for key, place in (("service.listen", config.service.listen), ("transport.listen", config.transport.listen)):
        try:
            is_open = place is not None and not parse_place(place).is_loopback
        except ConfigError as error:
            problems.append(f"{key}: {error}")
            continue
        if is_open and key == "service.listen" and not config.service.tokens:
            problems.append(f"{key} = {place!r} can be reached from other machines: configure [[service.tokens]]")
        if is_open and key == "transport.listen" and config.transport.token_file is None:
            problems.append(f"{key} = {place!r} can be reached from other machines: give token_file")
    for key, path in _token_files(config):
        try:
            registry.read_token(path)
        except ConfigError as error:
            problems.append(f"{key}: {error}")
    return problems


def _token_files(config: JobConfig) -> list[tuple[str, Path]]:
    """Return the token files that must be there, with their keys."""
    places: list[tuple[str, Path | None]] = [
        (f"engines.{name}.token_file", engine.token_file) for name, engine in config.engines.items()
    ]
    if config.lender is not None:
        places.append(("lender.token_file", config.lender.token_file))
    places += [
        (f"executors.{name}.token_file", place.token_file)
        for name, place in config.executors.items()
        if isinstance(place, ExecutorPlace)
    ]
    return [(key, path) for key, path in places if path is not None]


def load_job(cls: type[JobConfigT], path: Path | str) -> JobConfigT:
    """Read and check a job file as far as that is possible without starting anything.

    Args:
        cls: ``JobConfig`` or what adds to it.
        path: The file.

    Raises:
        ConfigError: One line a problem.
    """
    config = load(cls, path)
    if problems := job_problems(config):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    return config
