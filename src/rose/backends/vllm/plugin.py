"""ROSE's vLLM plugin (entry point ``vllm.general_plugins``), loaded in every vLLM process of the environment.

Most of those processes have nothing to do with ROSE, so registering only adds: methods to ``EngineCore``, a name to
vLLM's weight-transfer registry, a guard against a start-up crash beside numba; on CPUs leave to use AMX tiles, seeded sampling of
chunked prompts, and plain weights (linears and experts) and KV memory in large pages, both of which take effect for engines
with ``WeightTransferConfig(backend="rose")`` alone.
"""

from __future__ import annotations

import builtins
import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

from rose.backends.vllm.lifeline import LIFELINE, tie_to_parent


def register() -> None:
    """Register everything, once a process. Silent; safe to call again."""
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory  # noqa: PLC0415 - heavy
    from vllm.platforms import current_platform  # noqa: PLC0415 - heavy
    from vllm.v1.engine.core import EngineCore  # noqa: PLC0415 - heavy

    from rose.backends.vllm import cpu_generators, kv_memory, plain_weights  # noqa: PLC0415 - only in vLLM processes
    from rose.backends.vllm.utilities import UTILITIES  # noqa: PLC0415 - only in vLLM processes

    if "rose" in WeightTransferEngineFactory._registry:  # noqa: SLF001 - there is no public look-up
        return
    WeightTransferEngineFactory.register_engine(
        "rose", "rose.backends.vllm.weight_transfer", "RoseWeightTransferEngine"
    )
    for utility in UTILITIES:
        setattr(EngineCore, utility.__name__, utility)
    if os.environ.get(LIFELINE):
        tie_to_parent()
    if os.environ.get("VLLM_LOGGING_LEVEL") in ("ERROR", "CRITICAL"):
        logging.getLogger("torch._library.triton").setLevel(logging.ERROR)  # warns at every start without Triton
    _guard_module_walk()
    if current_platform.is_cpu():
        _allow_tiles()
        plain_weights.install()
        cpu_generators.install()
        kv_memory.install()


def _allow_tiles() -> None:
    """Ask the system for AMX tiles, where there are some.

    vLLM's CPU attention uses them unasked, which ends the process (SIGILL) unless oneDNN has asked before; a small packed model never
    gets there.
    """
    import torch  # noqa: PLC0415 - heavy

    torch.cpu._init_amx()  # noqa: SLF001 - there is no public one


def _guard_module_walk() -> None:
    """Let vLLM's walk over all loaded modules survive what it meets there.

    llvmlite (under numba) has an object whose ``__dict__`` is no mapping, which ends the start of an engine; torch has
    deprecated attributes, which warn.
    """
    from vllm.triton_utils import dispatcher  # noqa: PLC0415 - heavy

    walk = dispatcher._rebind_kernels  # noqa: SLF001 - the walk itself

    def guarded_vars(value: Any) -> Mapping[str, Any]:
        found: Any = builtins.vars(value)
        return found if isinstance(found, Mapping) else {}

    def quiet_walk(overrides: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            walk(overrides)

    dispatcher.vars = guarded_vars
    dispatcher._rebind_kernels = quiet_walk  # noqa: SLF001 - the walk itself
