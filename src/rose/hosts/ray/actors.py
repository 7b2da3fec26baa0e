"""The hosts as Ray actors, and how they find and call each other.

All actors of ROSE are named, in the namespace ``rose``: ``POOL/pool``, ``POOL/engine/ID``, ``POOL/process/NAME``. The names are the pool's
membership: a pool that was started anew on another node finds its engines by them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, RayActorError, RayError, RayTaskError
from ray.util import list_named_actors

from rose.errors import ConfigError, EngineLostError, RoseError, TransportError
from rose.hosts.ray.client import ClientConfig, RayPool
from rose.hosts.ray.engine_host import EngineHost
from rose.hosts.ray.peers import Peer
from rose.hosts.ray.pool_host import PoolHost
from rose.hosts.ray.process_host import ProcessHost
from rose.hosts.ray.specs import EngineSpec, PoolSpec, ProcessSpec, engine_part, pool_part, process_part
from rose.types import (
    EngineId,
    TransportAddress,
)

NAMESPACE = "rose"
MAX_CALLS = 10_000
"""Calls that one actor serves at a time, the waiting ones included: at most two a client and a few an engine."""


class ActorPeer(Peer):
    """A host in a Ray actor.

    Args:
        actor: Its handle.
        unreachable: What is raised when the actor is gone, or cannot be reached now.
    """

    def __init__(self, actor: ActorHandle, unreachable: type[RoseError]) -> None:
        self._actor = actor
        self._unreachable = unreachable
        self._is_gone = False

    @property
    def is_gone(self) -> bool:
        """Whether Ray has said that the actor is dead and will not be started again."""
        return self._is_gone

    async def call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the actor. What it raises comes back in its own type, without Ray's wrapping."""
        if not ray.is_initialized():  # a call would start a cluster of its own
            self._is_gone = True
            message = "Ray was shut down in this program"
            raise self._unreachable(message)
        try:
            return await getattr(self._actor, method).remote(*arguments)
        except RayTaskError as error:
            cause = error.cause
            if isinstance(cause, RoseError | TypeError | ValueError):
                raise cause from None
            message = f"{method} failed in its actor: {cause!r}"
            raise self._unreachable(message) from error
        except RayError as error:
            self._is_gone = self._is_gone or isinstance(error, ActorDiedError)
            what = "is gone or cannot be reached" if isinstance(error, RayActorError) else "cannot be called"
            message = f"the actor {what} ({type(error).__name__}: {_first_line(error)})"
            raise self._unreachable(message) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no reason given"])[0]


def actor_name(pool: str, part: str) -> str:
    """Return the name of the actor of a part."""
    return f"{pool}/{part}"


def find_actor(pool: str, part: str) -> ActorHandle | None:
    """Return the actor of a part, ``None`` when there is none."""
    try:
        return ray.get_actor(actor_name(pool, part), namespace=NAMESPACE)
    except ValueError:
        return None


def connect(name: str, *, config: ClientConfig | None = None) -> RayPool:
    """Return a client of a pool that runs in this cluster; ``ray.init`` was called before.

    Raises:
        ConfigError: There is no pool of that name, or no cluster.
    """
    if not ray.is_initialized():
        message = "this program is in no Ray cluster; call ray.init(address=...) first"
        raise ConfigError(message)
    actor = find_actor(name, pool_part())
    if actor is None:
        named = list_named_actors(all_namespaces=True)
        suffix = f"/{pool_part()}"
        pools = sorted(
            each["name"].removesuffix(suffix)
            for each in named
            if each["namespace"] == NAMESPACE and each["name"].endswith(suffix)
        )
        message = f"no pool {name!r} runs in this Ray cluster; those that do: {', '.join(pools) or 'none'}"
        raise ConfigError(message)
    return RayPool(ActorPeer(actor, TransportError), name=name, config=config)


def node_id() -> str:
    """Return the id of the node that this actor runs on."""
    return str(ray.get_runtime_context().get_node_id())


class PoolActor(PoolHost):
    """A ``PoolHost`` in an actor; see there. Deployed by ``rose.hosts.ray.deploy``."""

    def __init__(self, spec: PoolSpec) -> None:
        super().__init__(spec, find=self._find_actors, node_id=node_id())
        self._name = spec.name

    async def _find_actors(self) -> Mapping[EngineId, Peer]:
        return await asyncio.to_thread(self._list)

    def _list(self) -> dict[EngineId, Peer]:
        prefix = actor_name(self._name, engine_part(""))
        names = [each["name"] for each in list_named_actors(all_namespaces=True) if each["namespace"] == NAMESPACE]
        ids = [EngineId(name.removeprefix(prefix)) for name in names if name.startswith(prefix)]
        found = {engine_id: find_actor(self._name, engine_part(engine_id)) for engine_id in ids}
        return {engine_id: ActorPeer(actor, EngineLostError) for engine_id, actor in found.items() if actor is not None}


class EngineActor(EngineHost):
    """An ``EngineHost`` in an actor; see there."""

    def __init__(self, spec: EngineSpec, pool: str) -> None:
        super().__init__(spec, node_id=node_id(), relay=None if spec.relay is None else self._relay_address)
        self._pool_name = pool

    async def _relay_address(self) -> TransportAddress:
        relay = str(self._spec.relay)
        actor = await asyncio.to_thread(find_actor, self._pool_name, process_part(relay))
        if actor is None:
            message = f"relay {relay!r} is gone"
            raise TransportError(message)
        address: TransportAddress = await ActorPeer(actor, TransportError).call("address")
        return address

    async def close(self) -> None:
        """End the engine and the actor, which is not started again. Its caller hears that the actor is gone."""
        await super().close()
        ray.actor.exit_actor()


class ProcessActor(ProcessHost):
    """A ``ProcessHost`` in an actor; see there."""

    def __init__(self, spec: ProcessSpec) -> None:
        super().__init__(spec, host=ray.util.get_node_ip_address(), node_id=node_id())
