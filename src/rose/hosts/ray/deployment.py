"""A pool and its parts, placed over the nodes of a Ray cluster.

Life cycle:

1. [DRIVER] reads the nodes, plans (``rose.policies.node_placement``), makes one actor a part on the node of the plan.
2. [RAY] a node is lost: parts that are not pinned are started on another one, as soon as one has room; pinned ones are gone.
3. [POOL] engines whose host is gone are lost, and taken in again where they come back; a pool that was started anew finds them by name.
4. [DRIVER] ``close``, or its end where the deployment is not detached: all actors end.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import ray
from ray.actor import ActorHandle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rose.errors import ConfigError, RoseError, TransportError
from rose.hosts.ray import actors
from rose.hosts.ray.actors import ActorPeer, EngineActor, PoolActor, ProcessActor, actor_name
from rose.hosts.ray.client import ClientConfig, RayPool
from rose.hosts.ray.specs import (
    DeploymentSpec,
    EngineSpec,
    PoolSpec,
    ProcessSpec,
    engine_part,
    pool_part,
    process_part,
)
from rose.policies.node_placement import Node, Part, PartRole, plan_placement
from rose.types import EngineId

_logger = logging.getLogger(__name__)
_CLOSE_S = 5.0
_NO_CPU = {"CPU": 0.0}


class Deployment:
    """Running parts of one pool. ``deploy`` makes it; use it in ``async with``, or ``close`` it.

    Attributes:
        spec: What was asked for.
        nodes: Part name -> the node that the plan chose; where a part runs after the loss of a node is in ``RayPool.status``.
    """

    def __init__(self, spec: DeploymentSpec) -> None:
        self.spec = spec
        self.nodes: dict[str, str] = {}
        self._parts = spec.parts()
        self._handles: dict[str, ActorHandle] = {}

    def client(self, config: ClientConfig | None = None) -> RayPool:
        """Return a new client of the pool."""
        peer = ActorPeer(self._handles[pool_part()], TransportError)
        return RayPool(peer, name=self.spec.pool.name, config=config)

    async def add_engine(self, spec: EngineSpec) -> None:
        """Start one more engine in an actor; the pool takes it in once it serves.

        Raises:
            ConfigError: No node has room for it, or its name is taken.
        """
        part = Part(
            name=engine_part(spec.engine_id), role=PartRole.ENGINE, resources=spec.resources, labels=spec.labels
        )
        if part.name in self._handles:
            message = f"engine {spec.engine_id!r} is deployed already; remove it first, or give this one another name"
            raise ConfigError(message)
        wanted = [*(each for each in self._parts if each.name in self._handles), part]
        placement = plan_placement(await asyncio.to_thread(read_nodes), wanted, placed=self.nodes)
        await asyncio.to_thread(self._make_engine, spec, _node_of(placement.nodes, placement.unplaced, part.name))
        self._parts = wanted

    async def remove_engine(self, engine_id: EngineId, reason: str) -> bool:
        """Take an engine out of the pool and end its actor. See ``RolloutPool.remove_engine``."""
        async with self.client() as pool:
            is_free = await pool.remove_engine(engine_id, reason)
        self._handles.pop(engine_part(engine_id), None)  # not before: Ray ends an actor with its last handle
        return is_free

    async def process(self, name: str) -> Mapping[str, Any]:
        """Return what an executor or relay said when it was ready, once it is.

        Raises:
            TransportError: It is gone or does not start.
        """
        said: Mapping[str, Any] = await ActorPeer(self._handles[process_part(name)], TransportError).call("ready")
        return said

    async def close(self) -> None:
        """End the pool, then its engines, then what they need. Idempotent."""
        handles, self._handles = self._handles, {}
        pool, engines = pool_part(), engine_part("")
        for wave in (
            [part for part in handles if part == pool],
            [part for part in handles if part.startswith(engines)],
            [part for part in handles if part != pool and not part.startswith(engines)],
        ):
            await asyncio.gather(*(_ended(part, handles[part]) for part in wave))

    async def __aenter__(self) -> Self:
        """Return the deployment."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close it."""
        await self.close()

    def _make(self, nodes: Mapping[str, str]) -> None:
        for process in self.spec.processes:
            part = process_part(process.name)
            self._start(ProcessActor, part, nodes[part], process, process, is_pinned=process.stays)
        for engine in self.spec.engines:
            self._make_engine(engine, nodes[engine_part(engine.engine_id)])
        self._start(PoolActor, pool_part(), nodes[pool_part()], self.spec.pool, self.spec.pool)

    def _make_engine(self, spec: EngineSpec, node_id: str) -> None:
        part, pool = engine_part(spec.engine_id), self.spec.pool.name
        self._start(EngineActor, part, node_id, spec, spec, pool, is_pinned=spec.is_pinned)

    def _start(
        self,
        actor: type,
        part: str,
        node_id: str,
        needs: EngineSpec | PoolSpec | ProcessSpec,
        *arguments: Any,
        is_pinned: bool = False,
    ) -> None:
        wanted = _NO_CPU | dict(needs.resources)
        options = {
            "name": actor_name(self.spec.pool.name, part),
            "namespace": actors.NAMESPACE,
            "lifetime": "detached" if self.spec.is_detached else None,
            "max_restarts": -1,
            "max_concurrency": actors.MAX_CALLS,
            "num_cpus": wanted.pop("CPU"),
            "num_gpus": wanted.pop("GPU", 0.0),
            "resources": wanted,
            "label_selector": dict(needs.labels) or None,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=not is_pinned),
        }
        try:
            self._handles[part] = ray.remote(actor).options(**options).remote(*arguments)
        except ValueError as error:
            message = f"cannot start {options['name']}: {error}; another deployment of this cluster may have the name"
            raise ConfigError(message) from error
        self.nodes[part] = node_id


async def deploy(spec: DeploymentSpec, *, is_waiting: bool = True) -> Deployment:
    """Place and start a pool and its parts; ``ray.init`` was called before.

    Args:
        spec: What to run.
        is_waiting: Return once the pool serves; otherwise as soon as everything is asked for.

    Raises:
        ConfigError: There is no cluster, a part has room on no node (the message says what each lacks), or a name is taken.
        RoseError: The pool does not start.
    """
    if not ray.is_initialized():
        message = "this program is in no Ray cluster; call ray.init(address=...) first"
        raise ConfigError(message)
    placement = plan_placement(await asyncio.to_thread(read_nodes), spec.parts())
    for part in spec.parts():
        _node_of(placement.nodes, placement.unplaced, part.name)
    deployment = Deployment(spec)
    try:
        await asyncio.to_thread(deployment._make, placement.nodes)
        if is_waiting:
            async with deployment.client():
                pass
    except BaseException:
        await deployment.close()
        raise
    return deployment


async def _ended(part: str, actor: ActorHandle) -> None:
    """Ask an actor to end its work, then end it; there is nothing to end once Ray is shut down, and a call would start it anew."""
    if not ray.is_initialized():
        return
    try:
        async with asyncio.timeout(_CLOSE_S):
            await ActorPeer(actor, TransportError).call("close")
    except (RoseError, TimeoutError) as error:
        _logger.info("%s did not end by itself: %s", part, error)
    await asyncio.to_thread(ray.kill, actor)


def read_nodes() -> Sequence[Node]:
    """Return the nodes of the cluster that are alive, with all that they have."""
    return [
        Node(
            node_id=node["NodeID"],
            resources={name: float(amount) for name, amount in node["Resources"].items()},
            labels=dict(node.get("Labels") or {}),
        )
        for node in ray.nodes()
        if node["Alive"]
    ]


def _node_of(nodes: Mapping[str, str], unplaced: Mapping[str, str], part: str) -> str:
    if part in unplaced:
        message = f"no node of the Ray cluster can run {part}: {unplaced[part]}"
        raise ConfigError(message)
    return nodes[part]
