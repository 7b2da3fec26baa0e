"""Training engines whose weights can be read without a gather.

veRL hands a checkpoint engine a generator that gathers one full tensor after another, and never the engine that it comes from. The engines
here give the same generator with themselves attached. They are registered for this machine's vendor, which veRL's ``EngineRegistry`` asks for before
the entry for any vendor, so nothing of veRL's is replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType
from typing import Any

_BACKENDS = ("fsdp", "fsdp2")
_DEVICES = ("cuda", "npu")


class CarriedWeights:
    """veRL's generator of full tensors. Nothing is gathered before it is iterated.

    Attributes:
        engine: Whose weights they are.
    """

    def __init__(self, weights: Any, engine: Any) -> None:
        self._weights, self.engine = weights, engine

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Gather, one tensor after another; a collective of all ranks."""
        return iter(self._weights)


def carrying(engine_class: type) -> type:
    """Return a training engine whose generators carry it."""

    class Carrying(engine_class):  # type: ignore[misc] # a class of veRL's
        def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            weights, adapter = super().get_per_tensor_param(*args, **kwargs)
            return CarriedWeights(weights, self), adapter

    Carrying.__name__ = Carrying.__qualname__ = f"Rose{engine_class.__name__}"
    Carrying.__doc__ = f"{engine_class.__name__} of veRL, whose weights can be read shard by shard."
    return Carrying


def register_fsdp(module: ModuleType) -> None:
    """Register the FSDP engine of language models that carries itself, for the vendor of this machine.

    Args:
        module: ``verl.workers.engine.fsdp.transformer_impl``.
    """
    from verl.utils.device import get_vendor  # noqa: PLC0415 - there when the module is
    from verl.workers.engine.base import EngineRegistry  # noqa: PLC0415

    carried = carrying(module.FSDPEngineWithLMHead)
    register = EngineRegistry.register(
        model_type="language_model", backend=list(_BACKENDS), device=list(_DEVICES), vendor=get_vendor()
    )
    register(carried)


def sharded_state(weights: Any) -> tuple[dict[str, Any], Any] | None:
    """Return the state dict behind a generator, sharded as it lies, and the model; ``None`` where there is only the generator.

    That is so with FSDP1, whose state dict is a gather, and with adapters that are merged while the generator runs.
    """
    engine = getattr(weights, "engine", None)
    if engine is None:
        return None
    from verl.utils.fsdp_utils import fsdp_version  # noqa: PLC0415 - there when the engine is
    from verl.utils.model import convert_weight_keys  # noqa: PLC0415

    model = engine.module
    if fsdp_version(model) != 2 or hasattr(model, "peft_config") or getattr(engine, "_qat_enabled", False):  # noqa: PLR2004
        return None
    return convert_weight_keys(model.state_dict(), model), model
