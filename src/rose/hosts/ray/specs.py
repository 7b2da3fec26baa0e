"""What is to run on a Ray cluster, as values that actors are made from, and made again from after the loss of a node."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

import attrs

from rose import checks, registry
from rose.errors import ConfigError
from rose.interfaces import ServingEngine
from rose.policies.node_placement import Part, PartRole
from rose.pool.config import PoolConfig
from rose.types import EngineKind

_NAME = r"[\w.:-]+"
_POOL_PART = "pool"


@runtime_checkable
class SupportsStart(Protocol):
    """An engine that is made first and started then, such as ``vllm``."""

    async def start(self) -> None:
        """Return when it serves."""


@attrs.frozen(kw_only=True)
class EngineSpec:
    """One engine, made by name where it runs.

    Attributes:
        engine_id: Its name in the pool; backends take it as ``engine_id`` unless ``options`` say otherwise.
        backend: Registry name, for instance ``vllm`` or ``remote``.
        options: Of the backend's class. Plain data and values that pickle, such as ``VllmOptions``.
        kind: Whose device it runs on.
        resources: What it takes of its node where it has an actor of its own, for instance ``{"GPU": 1}``.
        labels: Labels that its node must have.
        is_pinned: It never runs on another node; lost with it. One that is not is started elsewhere.
        relay: Name of the process from whose store it fetches weights, of a ``ProcessSpec``; the publisher's own when left out.
    """

    engine_id: str = attrs.field(validator=checks.text(_NAME))
    backend: str = attrs.field(validator=checks.text(r".+"))
    options: Mapping[str, Any] = attrs.field(factory=dict)
    kind: EngineKind = EngineKind.DEDICATED
    resources: Mapping[str, float] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)
    is_pinned: bool = attrs.field(default=False, validator=checks.boolean())
    relay: str | None = None

    async def start(self) -> ServingEngine:
        """Make the engine and start it where that is to be done. Errors as of ``make``, or the engine's own."""
        engine = self.make()
        if isinstance(engine, SupportsStart):
            await engine.start()
        return engine

    def make(self) -> ServingEngine:
        """Make the engine; it is not started.

        Raises:
            ConfigError, BackendUnavailableError: As of ``rose.serving_engine``.
        """
        own = {} if "options" in self.options else {"engine_id": self.engine_id}
        engine = registry.serving_engine(self.backend, **(own | dict(self.options)))
        if engine.engine_id != self.engine_id:
            message = f"engine {self.engine_id!r}: backend {self.backend!r} calls it {engine.engine_id!r}; give both the same name"
            raise ConfigError(message)
        return engine


@attrs.frozen(kw_only=True)
class ProcessSpec:
    """A ``rose`` command that runs on one node: ``rose serve`` for a shared device, ``rose relay`` for a cluster.

    Attributes:
        name: Unique in the deployment.
        role: ``executor`` or ``relay``, for the order of placement.
        arguments: After ``rose``; ``{host}`` stands for the address of the node it runs on.
        environment: Further variables, such as tokens.
        resources: What it takes of its node.
        labels: What its node must have: those of its device for an executor.
        is_pinned: As of ``EngineSpec``; executors are always.
    """

    name: str = attrs.field(validator=checks.text(_NAME))
    role: PartRole = attrs.field(validator=checks.instance(PartRole))
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = attrs.field(factory=dict, repr=False)
    resources: Mapping[str, float] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)
    is_pinned: bool = attrs.field(default=False, validator=checks.boolean())

    def __attrs_post_init__(self) -> None:
        if self.role not in (PartRole.EXECUTOR, PartRole.RELAY):
            message = f"process {self.name!r}: role must be executor or relay, got {self.role.value}"
            raise ValueError(message)

    @property
    def stays(self) -> bool:
        """Whether it never runs on another node than the first."""
        return self.is_pinned or self.role is PartRole.EXECUTOR


@attrs.frozen(kw_only=True)
class LenderSpec:
    """Engines that the pool borrows from a running lender, by their leases.

    Attributes:
        url: Of the lender's service (``rose lend``).
        job: In whose name devices are borrowed.
        engines: Device -> the engine on it, a client in the pool's own process: ``remote`` with the URL of the device's executor.
        token: The job's bearer token.
        model: What the engines run.
    """

    url: str = attrs.field(validator=checks.text(r"https?://.+"))
    job: str = attrs.field(validator=checks.text(_NAME))
    engines: Mapping[str, EngineSpec]
    token: str | None = attrs.field(default=None, repr=False)
    model: str | None = None


@attrs.frozen(kw_only=True)
class PoolSpec:
    """The pool.

    Attributes:
        name: Under which clients find it.
        config: Its settings.
        engines: Engines in the pool's own process: clients of engines elsewhere, mostly (``remote``).
        lender: Where it borrows engines.
        resources: What it takes of its node.
        labels: What its node must have.
        gather_s: How long a pool that was started anew waits for engines that are being started before it serves with the others.
        rejoin_s: How often it looks for engines that are new, came back or are gone.
        client_timeout_s: Turns of a client that was not heard of for this long are cancelled.
    """

    name: str = attrs.field(validator=checks.text(_NAME))
    config: PoolConfig = attrs.field(factory=PoolConfig, validator=checks.instance(PoolConfig))
    engines: tuple[EngineSpec, ...] = attrs.field(default=(), converter=tuple)
    lender: LenderSpec | None = None
    resources: Mapping[str, float] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)
    gather_s: float = attrs.field(default=10.0, validator=checks.number(at_least=0))
    rejoin_s: float = attrs.field(default=1.0, validator=checks.number(above=0))
    client_timeout_s: float = attrs.field(default=30.0, validator=checks.number(above=0))


@attrs.frozen(kw_only=True)
class DeploymentSpec:
    """A pool, its engines and what they need, over the nodes of a cluster.

    Attributes:
        pool: The pool.
        engines: Engines in actors of their own.
        processes: Executors and relays.
        is_detached: All of it outlives the program that deployed it, until ``Deployment.close``.
    """

    pool: PoolSpec
    engines: tuple[EngineSpec, ...] = attrs.field(default=(), converter=tuple)
    processes: tuple[ProcessSpec, ...] = attrs.field(default=(), converter=tuple)
    is_detached: bool = attrs.field(default=False, validator=checks.boolean())

    def __attrs_post_init__(self) -> None:
        lent = () if self.pool.lender is None else tuple(self.pool.lender.engines.values())
        ids = [engine.engine_id for engine in (*self.pool.engines, *lent, *self.engines)]
        names = [process.name for process in self.processes]
        for what, given in (("engines", ids), ("processes", names)):
            _refuse_twice(what, given)
        relays = {process.name for process in self.processes if process.role is PartRole.RELAY}
        for engine in self.engines:
            if engine.relay is not None and engine.relay not in relays:
                message = f"engine {engine.engine_id!r}: relay {engine.relay!r} is none of the relays, which are {sorted(relays)}"
                raise ValueError(message)

    def parts(self) -> list[Part]:
        """Return what is to be placed, by the names that actors have: ``engine/ID``, ``process/NAME`` and ``pool``."""
        pool = Part(name=_POOL_PART, role=PartRole.POOL, resources=self.pool.resources, labels=self.pool.labels)
        engines = [
            Part(name=engine_part(each.engine_id), role=PartRole.ENGINE, resources=each.resources, labels=each.labels)
            for each in self.engines
        ]
        processes = [
            Part(name=process_part(each.name), role=each.role, resources=each.resources, labels=each.labels)
            for each in self.processes
        ]
        return [pool, *engines, *processes]


def pool_part() -> str:
    """Return the name of the pool among the parts of a deployment."""
    return _POOL_PART


def engine_part(engine_id: str) -> str:
    """Return the name of an engine among the parts of a deployment."""
    return f"engine/{engine_id}"


def process_part(name: str) -> str:
    """Return the name of a process among the parts of a deployment."""
    return f"process/{name}"


def _refuse_twice(what: str, given: Iterable[str]) -> None:
    seen: set[str] = set()
    for name in given:
        if name in seen:
            message = f"two of the {what} are called {name!r}; names must be unique"
            raise ValueError(message)
        seen.add(name)
