"""Modelled step times of a model on a GPU: a roofline with named assumptions.

A step reads every weight once and multiplies it with every token, reads the KV cache of its decoding sequences and
attends from its prompt tokens to everything before them:

    linear    = (memory^n + compute^n)^(1/n),  memory = weights / bandwidth,  compute = 2 params tokens / (eff peak)
    attention = context tokens x KV bytes / bandwidth  +  4 layers width positions / (attention eff x peak)
    step      = launch overhead + linear + attention

Assumptions: an H100 SXM by NVIDIA's data sheet (989 TFLOP/s dense bfloat16; 3.35 TB/s of HBM of which 2.3 TB/s are
reached by real kernels); 55 % of the peak in large matrix products, 40 % in attention; memory and compute overlap
softly (n = 1.6); 0.3 ms to launch a step. Model shapes come from the models' published configurations. Expect +-20 %
against a real machine; what is compared on paced devices shares the same formula.
"""

from __future__ import annotations

import attrs

from rose.errors import ConfigError
from rose.interfaces.device import StepWork


@attrs.frozen(kw_only=True)
class GpuSpec:
    """What a roofline needs to know of a GPU."""

    peak_flops: float
    bandwidth_bytes_per_s: float
    linear_efficiency: float
    attention_efficiency: float
    overlap_power: float
    launch_s: float


@attrs.frozen(kw_only=True)
class Profile:
    """One model on one GPU.

    Attributes:
        name: ``gpu:model``, as written in configuration and next to every figure.
        num_params: Parameters that multiply every token (embeddings are looked up, not multiplied).
        weight_bytes: What one step reads of the weights.
        kv_bytes_per_token: Keys and values of one token over all layers, bfloat16.
        num_layers, attention_width: Attention shape (width = query heads x head size).
        host_gap_s: Time from a step's end until the engine can have the next one ready.
    """

    name: str
    gpu: GpuSpec
    num_params: float
    weight_bytes: float
    kv_bytes_per_token: int
    num_layers: int
    attention_width: int
    host_gap_s: float = 1.5e-3

    def step_s(self, work: StepWork) -> float:
        """Return the modelled seconds of one step."""
        gpu = self.gpu
        num_tokens = work.num_decodes + work.num_prefill_tokens
        memory_s = self.weight_bytes / gpu.bandwidth_bytes_per_s
        compute_s = 2 * self.num_params * num_tokens / (gpu.linear_efficiency * gpu.peak_flops)
        linear_s: float = (memory_s**gpu.overlap_power + compute_s**gpu.overlap_power) ** (1 / gpu.overlap_power)
        kv_read_s = work.context_tokens * self.kv_bytes_per_token / gpu.bandwidth_bytes_per_s
        attention_flops = 4 * self.num_layers * self.attention_width * work.prefill_positions
        return gpu.launch_s + linear_s + kv_read_s + attention_flops / (gpu.attention_efficiency * gpu.peak_flops)


H100 = GpuSpec(
    peak_flops=989e12,
    bandwidth_bytes_per_s=2.3e12,
    linear_efficiency=0.55,
    attention_efficiency=0.40,
    overlap_power=1.6,
    launch_s=0.3e-3,
)

PROFILES = {
    profile.name: profile
    for profile in (
        # 28 layers, 28 query and 4 KV heads of 128
        Profile(
            name="h100:qwen2.5-7b",
            gpu=H100,
            num_params=6.53e9,
            weight_bytes=14.1e9,
            kv_bytes_per_token=2 * 2 * 28 * 4 * 128,
            num_layers=28,
            attention_width=28 * 128,
        ),
        # 36 layers, 32 query and 8 KV heads of 128
        Profile(
            name="h100:qwen3-8b",
            gpu=H100,
            num_params=6.95e9,
            weight_bytes=15.1e9,
            kv_bytes_per_token=2 * 2 * 36 * 8 * 128,
            num_layers=36,
            attention_width=32 * 128,
        ),
    )
}


def profile_named(name: str) -> Profile:
    """Return a profile by name.

    Raises:
        ConfigError: There is none of that name.
    """
    try:
        return PROFILES[name]
    except KeyError:
        message = f"unknown device profile {name!r}; known are {', '.join(sorted(PROFILES))}"
        raise ConfigError(message) from None
