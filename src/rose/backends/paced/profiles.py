"""Modelled step times of a model on one or more GPUs: a roofline with named assumptions.

A step reads every weight once and multiplies it with every token, reads the KV cache of its decoding sequences and
attends from its prompt tokens to everything before them. On n GPUs (tensor parallel) each does one n-th of all that, and
their partial sums are added up twice a layer:

    linear     = (memory^p + compute^p)^(1/p),  memory = weights / bandwidth,  compute = 2 params tokens / (eff peak)
    attention  = context tokens x KV bytes / bandwidth  +  4 layers width positions / (attention eff x peak)
    collective = 2 layers (latency + 2 (n-1)/n x tokens x hidden x 2 bytes / link),  0 on one GPU
    step       = launch overhead + linear / n + attention / n + collective

Assumptions: an H100 SXM by NVIDIA's data sheet (989 TFLOP/s dense bfloat16; 3.35 TB/s of HBM of which 2.3 TB/s are
reached by real kernels; 80 GB); 55 % of the peak in large matrix products, 40 % in attention; memory and compute overlap
softly (p = 1.6); 0.3 ms to launch a step. An H800 is an H100 but for its NVLink: 400 instead of 900 GB/s, both directions
together. Of one direction 75 % are reached in all-reduces: the slope of Vidur's measurements on four GPUs of a DGX H100
(45 to 67 MB, microsoft/vidur ``h100_dgx/all_reduce.csv``) is 339 of 450 GB/s; DeepEP states about 160 of 200 GB/s for an
H800. An all-reduce of few bytes takes 9 us (vLLM's own kernel on four H100, measured in sgl-project/sglang pull request
2904; Vidur's NCCL takes 20-40 us). Gathering the logits is left out. Model shapes come from the models' published
configurations (``shapes``); counts are rounded to three digits. Against Vidur's operators on H100 the linear part is, for
1-64, 65-256 and 257-4096 tokens in the mean, +1, -4 and +10 % (at most +23 %) for Llama-2-7B on one GPU, -4, 0 and +4 % (at
most +-17 %) for CodeLlama-34B on four; it is 30 % too low for a 7B model cut in four, whose operators are too small for a
roofline. Expect +-20 % against a real machine; what is compared on paced devices shares the same formula.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property

import attrs

from rose.backends.paced.linear_table import LinearTable
from rose.backends.paced.shapes import SHAPES
from rose.errors import ConfigError
from rose.interfaces.device import StepWork

StepTime = Callable[[int, int, float, float], float]

_BYTES = 2  # of a bfloat16
_NUM_TABLED_TOKENS = 4096  # most steps have fewer; larger ones are computed


@attrs.frozen(kw_only=True)
class GpuSpec:
    """What a roofline needs to know of a GPU.

    Attributes:
        peak_flops, bandwidth_bytes_per_s: Of one GPU.
        linear_efficiency, attention_efficiency: Shares of ``peak_flops`` that are reached.
        overlap_power: How sharply the larger of memory and compute time wins.
        launch_s: Overhead of a step.
        memory_bytes: Of one GPU.
        link_bytes_per_s: What a GPU sends to the others of its engine in a large collective, in one direction.
        collective_s: What a collective of few bytes takes.
    """

    peak_flops: float
    bandwidth_bytes_per_s: float
    linear_efficiency: float
    attention_efficiency: float
    overlap_power: float
    launch_s: float
    memory_bytes: float
    link_bytes_per_s: float
    collective_s: float


@attrs.frozen(kw_only=True)
class Profile:
    """One model on one or more GPUs.

    Attributes:
        name: ``gpu:model`` or ``gpuxN:model``, as written in configuration and next to every figure.
        num_params: Parameters that multiply every token (embeddings are looked up, not multiplied).
        weight_bytes: What one step reads of the weights, on all GPUs together.
        kv_bytes_per_token: Keys and values of one token over all layers, bfloat16.
        num_layers, attention_width: Attention shape (width = query heads x head size).
        hidden_size: Width of what a collective adds up, for each token.
        num_gpus: Over which every matrix and every KV cache is cut.
        host_gap_s: Time from a step's end until the engine can have the next one ready.
        linear_table: Measured seconds that replace the roofline's linear part, on all ``num_gpus``.
    """

    name: str
    gpu: GpuSpec
    num_params: float
    weight_bytes: float
    kv_bytes_per_token: int
    num_layers: int
    attention_width: int
    hidden_size: int
    num_gpus: int = 1
    host_gap_s: float = 1.5e-3
    linear_table: LinearTable | None = None

    def step_s(self, work: StepWork) -> float:
        """Return the modelled seconds of one step."""
        gpu = self.gpu
        num_tokens = work.num_decodes + work.num_prefill_tokens
        kv_read_s = work.context_tokens * self.kv_bytes_per_token / gpu.bandwidth_bytes_per_s / self.num_gpus
        attention_flops = 4 * self.num_layers * self.attention_width * work.prefill_positions
        attention_s = attention_flops / (gpu.attention_efficiency * gpu.peak_flops) / self.num_gpus
        return gpu.launch_s + self.linear_s(num_tokens) + kv_read_s + attention_s + self.collective_s(num_tokens)

    def linear_s(self, num_tokens: int) -> float:
        """Return the seconds of a step's matrix products, measured where there is a table, else of the roofline."""
        if self.linear_table is not None:
            return self.linear_table.at(num_tokens)
        gpu = self.gpu
        memory_s = self.weight_bytes / gpu.bandwidth_bytes_per_s / self.num_gpus
        compute_s = 2 * self.num_params * num_tokens / (gpu.linear_efficiency * gpu.peak_flops) / self.num_gpus
        linear_s: float = (memory_s**gpu.overlap_power + compute_s**gpu.overlap_power) ** (1 / gpu.overlap_power)
        return linear_s

    def collective_s(self, num_tokens: int) -> float:
        """Return the seconds of a step's two all-reduces a layer; 0 on one GPU."""
        if self.num_gpus == 1:
            return 0.0
        sent_bytes = 2 * (self.num_gpus - 1) / self.num_gpus * num_tokens * self.hidden_size * _BYTES
        return 2 * self.num_layers * (self.gpu.collective_s + sent_bytes / self.gpu.link_bytes_per_s)

    def with_linear_table(self, table: LinearTable) -> Profile:
        """Return this profile with a measured linear part; everything else stays the roofline's."""
        return attrs.evolve(self, linear_table=table)

    def fast_step(self) -> StepTime:
        """Return ``step_s(num_prefill_tokens, num_decodes, context_tokens, prefill_positions)``, for millions of calls.

        It gives what the method ``step_s`` gives, up to rounding.
        """
        fixed_s, kv_s, position_s = self._folded
        num_tabled, compute_fixed_s = len(fixed_s), self._fixed_s

        def step_s(num_prefill_tokens: int, num_decodes: int, context_tokens: float, prefill_positions: float) -> float:
            num_tokens = num_prefill_tokens + num_decodes
            fixed = fixed_s[num_tokens] if num_tokens < num_tabled else compute_fixed_s(num_tokens)
            return fixed + kv_s * context_tokens + position_s * prefill_positions

        return step_s

    def decode_run(self, num_decodes: int, context_tokens: float, num_steps: int) -> float:
        """Return the seconds of ``num_steps`` steps in which the same sequences decode, without gaps between the steps.

        Args:
            num_decodes: Sequences; each step adds as many tokens to the context.
            context_tokens: Of all sequences together, in the first step.
            num_steps: Steps.
        """
        fixed_s, kv_s, _ = self._folded
        fixed = fixed_s[num_decodes] if num_decodes < len(fixed_s) else self._fixed_s(num_decodes)
        return num_steps * (fixed + kv_s * (context_tokens + num_decodes * (num_steps - 1) / 2))

    def _fixed_s(self, num_tokens: int) -> float:
        """Return what depends on the number of tokens alone."""
        return self.gpu.launch_s + self.linear_s(num_tokens) + self.collective_s(num_tokens)

    @cached_property
    def _folded(self) -> tuple[list[float], float, float]:
        """Seconds by number of tokens, of a token of context, of a position attended to."""
        gpu = self.gpu
        kv_s = self.kv_bytes_per_token / gpu.bandwidth_bytes_per_s / self.num_gpus
        position_flops = 4 * self.num_layers * self.attention_width
        position_s = position_flops / (gpu.attention_efficiency * gpu.peak_flops) / self.num_gpus
        return [self._fixed_s(num_tokens) for num_tokens in range(_NUM_TABLED_TOKENS)], kv_s, position_s


H100 = GpuSpec(
    peak_flops=989e12,
    bandwidth_bytes_per_s=2.3e12,
    linear_efficiency=0.55,
    attention_efficiency=0.40,
    overlap_power=1.6,
    launch_s=0.3e-3,
    memory_bytes=80e9,
    link_bytes_per_s=0.75 * 450e9,
    collective_s=9e-6,
)
H800 = attrs.evolve(H100, link_bytes_per_s=0.75 * 200e9)

_GPUS = {"h100": H100, "h800": H800}


def make_profile(gpu: str, model: str, *, num_gpus: int = 1) -> Profile:
    """Return the profile of a known model on known GPUs; counts are rounded to three digits, as figures are quoted.

    Raises:
        ConfigError: The GPU or the model is not known.
    """
    if gpu not in _GPUS or model not in SHAPES:
        message = f"no profile of {model!r} on {gpu!r}; GPUs are {', '.join(_GPUS)}, models {', '.join(SHAPES)}"
        raise ConfigError(message)
    shape = SHAPES[model]
    return Profile(
        name=f"{gpu}:{model}" if num_gpus == 1 else f"{gpu}x{num_gpus}:{model}",
        gpu=_GPUS[gpu],
        num_params=_rounded(shape.num_params),
        weight_bytes=_rounded(shape.weight_bytes),
        kv_bytes_per_token=shape.kv_bytes_per_token,
        num_layers=shape.num_layers,
        attention_width=shape.attention_width,
        hidden_size=shape.hidden_size,
        num_gpus=num_gpus,
    )


def _rounded(number: float) -> float:
    return float(f"{number:.3g}")


PROFILES = {
    profile.name: profile
    for gpu in _GPUS
    for profile in (
        make_profile(gpu, "qwen2.5-7b"),
        make_profile(gpu, "qwen3-8b"),
        make_profile(gpu, "qwen2.5-32b", num_gpus=4),
        make_profile(gpu, "qwen3-32b", num_gpus=4),
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


def kv_pool_bytes(memory_fraction: float, *resident: Profile) -> int:
    """Return the KV memory of one engine's GPUs, all together, that hold the weights of ``resident``.

    Weights are counted as what a step reads; input embeddings (1 to 1.6 GB a model), activations and graphs lie in the
    share of the memory that ``memory_fraction`` leaves.

    Args:
        memory_fraction: Share of the GPUs' memory that weights and KV may take.
        resident: At least one profile; all on the same GPUs.

    Raises:
        ConfigError: The profiles are of different GPUs, or the weights leave no room.
    """
    first = resident[0]
    for other in resident[1:]:
        if (other.gpu, other.num_gpus) != (first.gpu, first.num_gpus):
            message = f"{first.name} and {other.name} cannot share an engine's GPUs; choose profiles of the same GPUs"
            raise ConfigError(message)
    usable_bytes = first.num_gpus * first.gpu.memory_bytes * memory_fraction
    weight_bytes = sum(profile.weight_bytes for profile in resident)
    if weight_bytes >= usable_bytes:
        names = " and ".join(profile.name for profile in resident)
        message = (
            f"the weights of {names} take {weight_bytes / 1e9:.1f} GB, but kv_memory_fraction = {memory_fraction:g} allows "
            f"{usable_bytes / 1e9:.1f} GB on {first.num_gpus} x {first.gpu.memory_bytes / 1e9:.0f} GB; raise it or choose "
            "smaller models"
        )
        raise ConfigError(message)
    return int(usable_bytes - weight_bytes)
