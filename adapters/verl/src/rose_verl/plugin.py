"""What veRL loads in every process of a job: it makes ``rose`` known to veRL's registries.

veRL resolves the entry point and calls nothing, and it notes failures at DEBUG only. So importing this module does the work, and
problems are told at ERROR on stderr, once a process. With a problem ``rose`` is known all the same, as something that refuses to start
and says why: a job that asks for it ends with that line, and a job that does not ask for it runs.

=========================================  =========================================================================
module of veRL                             what is registered
=========================================  =========================================================================
``workers.rollout.replica``                the replica ``rose``: fronts of the pool in place of engines
``workers.rollout.base``                   the trainers' side of it: weights in sync and colocated modes
``checkpoint_engine.base``                 the checkpoint engine ``rose``: weights in separate and fully asynchronous modes
``workers.engine.fsdp.transformer_impl``   FSDP engines whose weights can be read shard by shard
=========================================  =========================================================================
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from rose_verl.after_import import after_import
from rose_verl.say import logger

NAME = "rose"
OLDEST, BEYOND = (0, 9, 1), (0, 10, 0)
_OVERRIDE = "ROSE_VERL_ANY_VERSION"
problems: list[str] = []


def register() -> None:
    """Do nothing: the module's import has done it. veRL's entry point needs a name."""


def version_problem(version: str, environ: Any = os.environ) -> str:
    """Return why a release of veRL is not worked with; empty when it is."""
    digits = [part for part in version.replace("-", ".").split(".")[:3] if part.isdigit()]
    if OLDEST <= tuple(map(int, digits)) < BEYOND or environ.get(_OVERRIDE) == "1":
        return ""
    return (
        f"rose-verl works with veRL {_dotted(OLDEST)} up to, not including, {_dotted(BEYOND)}, and this is {version}: "
        f"install verl=={_dotted(OLDEST)}, or set {_OVERRIDE}=1 to try"
    )


def refuse_if_broken() -> None:
    """Raise what is wrong with this installation, if anything is.

    Raises:
        ConfigError: There are problems; names all of them.
    """
    if problems:
        from rose.errors import ConfigError  # noqa: PLC0415 - every process of a job imports this module

        raise ConfigError("; ".join(problems))


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _note(problem: str) -> None:
    if problem not in problems:
        problems.append(problem)
        logger().error("%s", problem)


def _installed_version() -> str:
    import verl  # noqa: PLC0415 - it is being imported when it loads its plug-ins, and may be absent in a test

    version = getattr(verl, "__version__", None)
    if version is None:
        version = (Path(verl.__file__).parent / "version" / "version").read_text(encoding="utf-8")
    return str(version).strip()


def _replica() -> Any:
    refuse_if_broken()
    from rose_verl.replica import RoseReplica  # noqa: PLC0415

    return RoseReplica


def _add_replica(module: ModuleType) -> None:
    module.RolloutReplicaRegistry.register(NAME, _replica)


def _add_rollout(module: ModuleType) -> None:
    module._ROLLOUT_REGISTRY[(NAME, "async")] = "rose_verl.rollout.RoseRollout"  # noqa: SLF001 - there is no function for it


def _add_checkpoint_engine(module: ModuleType) -> None:
    from rose_verl.checkpoint import make_engine_class  # noqa: PLC0415

    module.CheckpointEngineRegistry.register(NAME)(make_engine_class(module.CheckpointEngine))


def _add_fsdp_engine(module: ModuleType) -> None:
    from rose_verl.engines import register_fsdp  # noqa: PLC0415

    register_fsdp(module)


_ACTIONS: dict[str, Callable[[ModuleType], None]] = {
    "verl.workers.rollout.replica": _add_replica,
    "verl.workers.rollout.base": _add_rollout,
    "verl.checkpoint_engine.base": _add_checkpoint_engine,
    "verl.workers.engine.fsdp.transformer_impl": _add_fsdp_engine,
}


def _fail(what: str, error: Exception) -> None:
    _note(f"rose-verl could not register with {what}: {type(error).__name__}: {error}")


def _begin() -> None:
    missing = [name for name in ("rose", "aiohttp") if find_spec(name) is None]
    if missing:
        _note(f"rose-verl needs {' and '.join(missing)}: pip install 'rose-rl[http]'")
    try:
        problem = version_problem(_installed_version())
    except Exception as error:  # noqa: BLE001 - veRL would hide it
        problem = f"rose-verl cannot tell which veRL this is: {type(error).__name__}: {error}"
    if problem:
        _note(problem)
        _ACTIONS.pop("verl.workers.engine.fsdp.transformer_impl", None)
    after_import(_ACTIONS, _fail)


_begin()
