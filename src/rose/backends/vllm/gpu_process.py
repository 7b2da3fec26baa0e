"""What an engine on a CUDA device needs of its process. Imports no vLLM: the configuration is taken as it is used.

* The worker is in the scheduler's process, whose stream is where steps are measured.
* The process is this engine's alone: vLLM's allocator is one a process, so two engines in it would sleep together.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from rose.backends.cuda.kv_limit import check_adapter
from rose.backends.step_settings import RoseSettings
from rose.errors import BackendUnavailableError, ConfigError

_LOCK = threading.Lock()
_owner: weakref.ReferenceType[Any] | None = None


def check(settings: RoseSettings, vllm_config: Any) -> None:
    """Look whether a scheduler with these settings can govern the engine. Nothing is asked of one without a CUDA device.

    Raises:
        ConfigError: The worker is in another process.
        BackendUnavailableError: kvcached is asked for and has no adapter for this vLLM.
    """
    if settings.device is None or settings.device.kind != "cuda":
        return
    parallel = vllm_config.parallel_config
    if parallel.world_size > 1 or parallel.distributed_executor_backend not in {None, "uni"}:
        message = (
            f"rose.device of kind cuda needs one worker in the scheduler's process, and this engine has {parallel.world_size} with the "
            f"executor {parallel.distributed_executor_backend!r}; set distributed_executor_backend='uni'"
        )
        raise ConfigError(message)
    if settings.device.memory == "kvcached":
        check_adapter(_vllm_version())


def claim(engine: Any) -> None:
    """Have this process be an engine's alone, for as long as it lives.

    Raises:
        BackendUnavailableError: Another engine lives in it.
    """
    global _owner  # noqa: PLW0603 - a process has one owner
    with _LOCK:
        other = None if _owner is None else _owner()
        if other is not None and other is not engine:
            message = (
                "two engines on GPUs are in one process, where vLLM's allocator would put both to sleep; "
                "start each in a process of its own (VllmEngine instead of InProcessVllmEngine)"
            )
            raise BackendUnavailableError(message)
        _owner = weakref.ref(engine)


def _vllm_version() -> str:
    from vllm import __version__  # noqa: PLC0415 - heavy

    return str(__version__)
