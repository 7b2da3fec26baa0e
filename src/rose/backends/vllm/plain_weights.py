"""Weights that stay as the checkpoint has them on CPUs, in engines with ``WeightTransferConfig(backend="rose")`` alone.

vLLM packs the weights of linears and experts for its CPU kernels when it has loaded them: a linear's parameter is left
empty, an expert's keeps its shape but not its order (vLLM 0.32, ``layers/utils.py`` and ``fused_moe/experts/cpu_moe.py``).
Neither can be updated in place, so here both stay, and torch computes with them; that is slower.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional

_ACTIVATIONS: Mapping[str, Callable[[Any], Any]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
"""Of the gate, by vLLM's name. Experts with another one are left to vLLM, packed."""


def install() -> None:
    """Take vLLM's packing out of the way of ROSE's engines. Call once a process, on CPUs only."""
    _keep_linears()
    _keep_experts()


def is_rose_engine() -> bool:
    """Return whether the engine whose model is being loaded takes its updates from ROSE."""
    from vllm.config import get_current_vllm_config_or_none  # noqa: PLC0415 - heavy

    config = get_current_vllm_config_or_none()
    transfer = None if config is None else config.weight_transfer_config
    return transfer is not None and transfer.backend == "rose"


def _keep_linears() -> None:
    from vllm.model_executor.layers import utils  # noqa: PLC0415 - heavy

    prepack = utils.dispatch_cpu_unquantized_gemm

    def dispatch(layer: Any, remove_weight: bool) -> None:  # noqa: FBT001 - vLLM's signature
        if is_rose_engine():
            layer.cpu_linear = functional.linear
        else:
            prepack(layer, remove_weight)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def _keep_experts() -> None:
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts  # noqa: PLC0415 - heavy

    prepack, compute = CPUUnquantizedExperts.process_weights_after_loading, CPUUnquantizedExperts.apply

    def process_weights_after_loading(experts: Any, layer: Any) -> None:
        experts.rose_is_plain = experts.moe_config.activation.value in _ACTIVATIONS and is_rose_engine()
        if not experts.rose_is_plain:
            prepack(experts, layer)

    def apply(experts: Any, output: Any, hidden_states: Any, w1: Any, w2: Any, **call: Any) -> None:
        if getattr(experts, "rose_is_plain", False):
            output.copy_(_mixture(hidden_states, (w1, w2), (experts.w1_bias, experts.w2_bias), call))
        else:
            compute(experts, output=output, hidden_states=hidden_states, w1=w1, w2=w2, **call)

    CPUUnquantizedExperts.process_weights_after_loading = process_weights_after_loading
    CPUUnquantizedExperts.apply = apply


def _mixture(x: Any, weights: tuple[Any, Any], biases: tuple[Any, Any], call: Mapping[str, Any]) -> Any:
    """Return the weighted sum over each token's experts, float32 of ``x``'s shape.

    Args:
        x: The tokens, ``[tokens, hidden]``.
        weights: Gate over up ``[experts, 2 * intermediate, hidden]`` and down ``[experts, hidden, intermediate]``, of the
            experts and the part of each that this rank holds.
        biases: Theirs, ``[experts, rows]`` or ``None``.
        call: The further arguments of vLLM's ``FusedMoEExpertsModular.apply``, by name.
    """
    chosen, shares, local_of = call["topk_ids"], call["topk_weights"], call["expert_map"]
    activation = _ACTIVATIONS[call["activation"].value]
    total = torch.zeros(x.shape, dtype=torch.float32)
    for number in chosen.unique().tolist():
        expert = number if local_of is None else int(local_of[number])
        if expert < 0:
            continue  # another rank's
        rows, places = torch.where(chosen == number)
        up_bias, down_bias = (None if bias is None else bias[expert].to(x.dtype) for bias in biases)
        gate, up = functional.linear(x[rows], weights[0][expert], up_bias).float().chunk(2, dim=-1)
        hidden = (activation(gate) * up).to(x.dtype)
        result = functional.linear(hidden, weights[1][expert], down_bias).float()
        if not call["apply_router_weight_on_input"]:
            result *= shares[rows, places].float().unsqueeze(-1)
        total.index_add_(0, rows, result)
    return total
