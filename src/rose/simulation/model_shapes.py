"""The tensors of models that are simulated, and who holds which part of them.

Names and shapes are those of the published checkpoints (configurations on the Hugging Face hub); a trainer cuts as FSDP2 does,
an engine as vLLM's tensor parallelism does.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from rose.backends.paced.shapes import SHAPES, DecoderShape
from rose.errors import ConfigError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer.layout import TargetLayout, split_evenly, whole_box

_VOCAB_PAD = 64
LAYER_PREFIX = "model.layers."


@attrs.frozen(kw_only=True)
class ModelShape:
    """A dense decoder whose head and embedding are not tied, every tensor bfloat16.

    Attributes:
        name: As after the colon of a profile's name.
        decoder: Its widths and counts.
        has_qkv_bias: q, k and v have biases (Qwen2.5).
        has_qk_norm: q and k have norms (Qwen3).
    """

    name: str
    decoder: DecoderShape
    has_qkv_bias: bool = False
    has_qk_norm: bool = False

    def tensors(self) -> tuple[TensorSpec, ...]:
        """Return every tensor, in the checkpoint's order."""
        embedding = (self.decoder.vocab_size, self.decoder.hidden_size)
        layers = [
            (f"{LAYER_PREFIX}{layer}.{name}", shape)
            for layer in range(self.decoder.num_layers)
            for name, shape in self._layer_shapes()
        ]
        named = [
            ("model.embed_tokens.weight", embedding),
            *layers,
            ("model.norm.weight", embedding[1:]),
            ("lm_head.weight", embedding),
        ]
        return tuple(TensorSpec(name=name, shape=shape, dtype="bfloat16") for name, shape in named)

    def _layer_shapes(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        decoder = self.decoder
        hidden, intermediate = decoder.hidden_size, decoder.intermediate_size
        key_value = decoder.num_kv_heads * decoder.head_size
        for name, rows in (("q", decoder.attention_width), ("k", key_value), ("v", key_value)):
            yield f"self_attn.{name}_proj.weight", (rows, hidden)
            if self.has_qkv_bias:
                yield f"self_attn.{name}_proj.bias", (rows,)
        yield "self_attn.o_proj.weight", (hidden, decoder.attention_width)
        if self.has_qk_norm:
            yield "self_attn.q_norm.weight", (decoder.head_size,)
            yield "self_attn.k_norm.weight", (decoder.head_size,)
        yield "mlp.gate_proj.weight", (intermediate, hidden)
        yield "mlp.up_proj.weight", (intermediate, hidden)
        yield "mlp.down_proj.weight", (hidden, intermediate)
        yield "input_layernorm.weight", (hidden,)
        yield "post_attention_layernorm.weight", (hidden,)


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(name="qwen3-8b", decoder=SHAPES["qwen3-8b"], has_qk_norm=True),
        ModelShape(name="qwen3-32b", decoder=SHAPES["qwen3-32b"], has_qk_norm=True),
        ModelShape(name="qwen2.5-7b", decoder=SHAPES["qwen2.5-7b"], has_qkv_bias=True),
        ModelShape(name="qwen2.5-32b", decoder=SHAPES["qwen2.5-32b"], has_qkv_bias=True),
    )
}


def model_shape(name: str) -> ModelShape:
    """Return a model by its own name or by that of a profile (``h100:qwen3-8b``).

    Raises:
        ConfigError: There is none of that name.
    """
    try:
        return MODEL_SHAPES[name.rpartition(":")[2]]
    except KeyError:
        message = f"no tensors are known for model {name!r}; choose one of {', '.join(sorted(MODEL_SHAPES))}"
        raise ConfigError(message) from None


def fsdp_layout(shape: ModelShape, rank: int, num_ranks: int) -> dict[str, ShardSpec]:
    """Return what one training rank holds: its rows of every tensor, cut as FSDP2 cuts (``torch.chunk``)."""
    return {spec.name: _rows(spec.shape, *split_evenly(spec.shape[0], num_ranks)[rank]) for spec in shape.tensors()}


def engine_layout(shape: ModelShape, num_ranks: int) -> TargetLayout:
    """Return what the ranks of an engine hold under vLLM's tensor parallelism.

    q, k and v are cut by heads (KV heads are repeated where ranks outnumber them), gate and up by rows, o and down by
    columns, embedding and head by rows of the padded vocabulary; norms are on every rank.

    Raises:
        ConfigError: The model cannot be cut so.
    """
    _check_divides(shape, num_ranks)
    ranks = tuple(
        {spec.name: (_engine_box(shape.decoder, spec, rank, num_ranks),) for spec in shape.tensors()}
        for rank in range(num_ranks)
    )
    return TargetLayout(layout_id=f"{shape.name}-tp{num_ranks}", tensors=shape.tensors(), ranks=ranks)


def _check_divides(shape: ModelShape, num_ranks: int) -> None:
    decoder = shape.decoder
    cut = (decoder.num_heads, decoder.intermediate_size, _padded_vocab(decoder))
    kv_heads = decoder.num_kv_heads
    if any(size % num_ranks for size in cut) or (kv_heads % num_ranks and num_ranks % kv_heads):
        message = (
            f"{shape.name} cannot run on {num_ranks} GPUs an engine: its {decoder.num_heads} heads, {kv_heads} KV heads or "
            f"{decoder.intermediate_size} rows do not divide; choose a tensor-parallel size that divides them, such as 1 or 4"
        )
        raise ConfigError(message)


def _engine_box(decoder: DecoderShape, spec: TensorSpec, rank: int, num_ranks: int) -> ShardSpec:
    part = spec.name.split(".")[-2]
    if part in ("k_proj", "v_proj"):
        num_copies = max(1, num_ranks // decoder.num_kv_heads)
        size = max(1, decoder.num_kv_heads // num_ranks) * decoder.head_size
        return _rows(spec.shape, rank // num_copies * size, size)
    if part in ("q_proj", "gate_proj", "up_proj"):
        size = spec.shape[0] // num_ranks
        return _rows(spec.shape, rank * size, size)
    if part in ("embed_tokens", "lm_head"):
        size = _padded_vocab(decoder) // num_ranks
        start = min(rank * size, decoder.vocab_size)
        return _rows(spec.shape, start, min(size, decoder.vocab_size - start))
    if part in ("o_proj", "down_proj"):
        size = spec.shape[1] // num_ranks
        return ShardSpec(offset=(0, rank * size), shape=(spec.shape[0], size))
    return whole_box(spec.shape)


def _padded_vocab(decoder: DecoderShape) -> int:
    return -(-decoder.vocab_size // _VOCAB_PAD) * _VOCAB_PAD


def _rows(shape: tuple[int, ...], start: int, size: int) -> ShardSpec:
    return ShardSpec(offset=(start, *(0 for _ in shape[1:])), shape=(size, *shape[1:]))
