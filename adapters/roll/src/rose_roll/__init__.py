"""ROLL's rollouts on a ROSE pool. Every public name is a class that a ROLL configuration names; each is imported when it is first used.

    actor_infer.worker_cls: rose_roll.RoseInferWorker
    actor_train.worker_cls: rose_roll.RoseAgenticTrainWorker     (or one of the other train workers)
    custom_envs.X.env_manager_cls: rose_roll.RoseTrajEnvManager  (also registers the llm proxy "rose")
    user_defined_rollout_loop_cls: rose_roll.RoseRolloutLoop

Importing this module loads neither ROLL nor torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_LAZY = {
    "RoseAgenticPgTrainWorker": "train_agentic_pg",
    "RoseAgenticTrainWorker": "train_agentic",
    "RoseEnvManager": "env_manager",
    "RoseInferWorker": "infer_worker",
    "RoseOptions": "options",
    "RoseProxy": "llm_proxy",
    "RoseRlvrPgTrainWorker": "train_rlvr_pg",
    "RoseRlvrTrainWorker": "train_rlvr",
    "RoseRolloutLoop": "rollout_loop",
    "RoseTrajEnvManager": "env_manager",
}

__version__ = "0.1.0"
__all__ = [
    "RoseAgenticPgTrainWorker",
    "RoseAgenticTrainWorker",
    "RoseEnvManager",
    "RoseInferWorker",
    "RoseOptions",
    "RoseProxy",
    "RoseRlvrPgTrainWorker",
    "RoseRlvrTrainWorker",
    "RoseRolloutLoop",
    "RoseTrajEnvManager",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        message = f"module {__name__!r} has no attribute {name!r}; there are {', '.join(__all__)}"
        raise AttributeError(message)
    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*globals(), *__all__]
