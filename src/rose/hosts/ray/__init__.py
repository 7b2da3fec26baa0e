"""A rollout pool as a Ray actor, and its parts placed over the nodes of a Ray cluster.

What does the work (``EngineHost``, ``PoolHost``, ``ProcessHost`` in actors; ``RayEngine``, ``RayPool`` beside their callers) talks
through a ``Peer`` and knows nothing of Ray. ``deploy`` and ``connect`` put it into actors; they need the extra ``ray``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from rose.errors import BackendUnavailableError
from rose.hosts.ray.client import ClientConfig, RayPool
from rose.hosts.ray.specs import DeploymentSpec, EngineSpec, LenderSpec, PoolSpec, ProcessSpec

if TYPE_CHECKING:
    from rose.hosts.ray.actors import connect
    from rose.hosts.ray.deployment import Deployment, deploy

_LAZY = {
    "Deployment": "rose.hosts.ray.deployment",
    "connect": "rose.hosts.ray.actors",
    "deploy": "rose.hosts.ray.deployment",
}

__all__ = [
    "ClientConfig",
    "Deployment",
    "DeploymentSpec",
    "EngineSpec",
    "LenderSpec",
    "PoolSpec",
    "ProcessSpec",
    "RayPool",
    "connect",
    "deploy",
]


def __getattr__(name: str) -> Any:
    """Import what needs Ray when it is first used.

    Raises:
        BackendUnavailableError: Ray is not installed.
    """
    if name not in _LAZY:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    try:
        return getattr(import_module(_LAZY[name]), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        message = f"rose.hosts.ray.{name} needs a library that is not installed ({error}); pip install 'rose-rl[ray]'"
        raise BackendUnavailableError(message) from error
