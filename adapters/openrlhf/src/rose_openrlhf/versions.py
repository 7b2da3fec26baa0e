"""Which releases of OpenRLHF this adapter was tested with, and whether the installed one has what is replaced."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import metadata
from typing import Any

from rose.errors import ConfigError

TESTED = ("0.11.2",)

_PARAMETERS = (
    "num_engines", "tensor_parallel_size", "pretrain", "seed", "full_determinism", "enable_prefix_caching", "enforce_eager",
    "max_model_len", "shared_pg", "gpu_memory_utilization", "vllm_enable_sleep", "logprobs_mode", "agent_func_path",
    "remote_rm_url", "max_images_per_prompt",
)  # fmt: skip


def check_version(find: Callable[[str], str] = metadata.version) -> str:
    """Return the version of the installed OpenRLHF.

    Raises:
        ConfigError: None is installed, or one that this adapter was not tested with.
    """
    try:
        found = find("openrlhf")
    except metadata.PackageNotFoundError:
        message = f"OpenRLHF is not installed in this environment: pip install openrlhf=={TESTED[-1]}"
        raise ConfigError(message) from None
    if found not in TESTED:
        message = (
            f"OpenRLHF {found} is installed; this adapter replaces a function inside it and was tested with "
            f"{', '.join(TESTED)} only: pip install openrlhf=={TESTED[-1]}, or take a newer rose-openrlhf"
        )
        raise ConfigError(message)
    return found


def check_signature(create_vllm_engines: Callable[..., Any]) -> None:
    """Check that the function which is replaced takes what the tested releases give it.

    Raises:
        ConfigError: It takes something else.
    """
    found = tuple(inspect.signature(create_vllm_engines).parameters)
    if found != _PARAMETERS:
        changed = sorted(set(found) ^ set(_PARAMETERS)) or "their order"
        message = f"openrlhf.trainer.ray.create_vllm_engines is not the released one (differs in {changed}); use openrlhf=={TESTED[-1]}"
        raise ConfigError(message)
