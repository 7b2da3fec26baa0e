"""Which checkpoint tensors a Megatron-Core parameter holds, family by family. Pure: no torch, no process group.

A parameter's name here has no wrapper prefix and its layer's number counts from the model's first layer, whatever the
pipeline stage; see ``find_source``. Layer norms go under either of their two names: their own module's (local layers) or
that of the linear layer that they are fused into (Transformer Engine).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto

import attrs

from rose.errors import LayoutMismatchError


class Cut(Enum):
    """How tensor parallelism cuts a parameter over its ranks.

    ``WHOLE`` not at all; ``VOCAB`` rows, padded at the end; ``COLUMNS`` the second dimension; ``QKV`` rows of one fused
    tensor that holds, KV group by KV group, the group's query heads, its key head and its value head; ``GATE_UP`` rows of
    gate and of up alike, so that each rank holds its gate rows and then its up rows.
    """

    WHOLE = auto()
    VOCAB = auto()
    COLUMNS = auto()
    QKV = auto()
    GATE_UP = auto()


@attrs.frozen(kw_only=True)
class Family:
    """What tells one family of decoders from another."""

    has_qkv_bias: bool = False
    has_qk_norm: bool = False
    is_moe: bool = False


FAMILIES: Mapping[str, Family] = {
    "llama": Family(),
    "qwen2": Family(has_qkv_bias=True),
    "qwen3": Family(has_qk_norm=True),
    "qwen3_moe": Family(has_qk_norm=True, is_moe=True),
}


@attrs.frozen(kw_only=True)
class ModelShape:
    """The sizes of a model; ``vocab_size`` is the tokenizer's own, without padding.

    Attributes:
        vocab_size: Rows of the checkpoint's embedding.
        hidden_size: Width.
        ffn_size: Inner width of a dense MLP.
        num_layers: Decoder layers over all pipeline stages.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        is_tied: Whether the output layer shares the embedding.
        num_experts: Experts of a MoE layer; 0 without any.
        expert_ffn_size: Inner width of one expert.
        moe_layers: Numbers of the layers with experts.
    """

    vocab_size: int
    hidden_size: int
    ffn_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_tied: bool
    num_experts: int = 0
    expert_ffn_size: int = 0
    moe_layers: frozenset[int] = frozenset()


@attrs.frozen(kw_only=True)
class Source:
    """What one parameter holds: checkpoint names in the order of the parameter's rows, and how it is cut."""

    names: tuple[str, ...]
    cut: Cut
    is_expert: bool = False


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_TOP = {
    "embedding.word_embeddings.weight": Source(names=("model.embed_tokens.weight",), cut=Cut.VOCAB),
    "output_layer.weight": Source(names=("lm_head.weight",), cut=Cut.VOCAB),
    "decoder.final_layernorm.weight": Source(names=("model.norm.weight",), cut=Cut.WHOLE),
}
_IN_LAYER: Mapping[str, tuple[tuple[str, ...], Cut]] = {
    "input_layernorm.weight": (("input_layernorm.weight",), Cut.WHOLE),
    "self_attention.linear_qkv.layer_norm_weight": (("input_layernorm.weight",), Cut.WHOLE),
    "self_attention.linear_qkv.weight": (tuple(f"{name}.weight" for name in _QKV), Cut.QKV),
    "self_attention.linear_qkv.bias": (tuple(f"{name}.bias" for name in _QKV), Cut.QKV),
    "self_attention.q_layernorm.weight": (("self_attn.q_norm.weight",), Cut.WHOLE),
    "self_attention.k_layernorm.weight": (("self_attn.k_norm.weight",), Cut.WHOLE),
    "self_attention.linear_proj.weight": (("self_attn.o_proj.weight",), Cut.COLUMNS),
    "pre_mlp_layernorm.weight": (("post_attention_layernorm.weight",), Cut.WHOLE),
    "mlp.linear_fc1.layer_norm_weight": (("post_attention_layernorm.weight",), Cut.WHOLE),
    "mlp.linear_fc1.weight": (("mlp.gate_proj.weight", "mlp.up_proj.weight"), Cut.GATE_UP),
    "mlp.linear_fc2.weight": (("mlp.down_proj.weight",), Cut.COLUMNS),
    "mlp.router.weight": (("mlp.gate.weight",), Cut.WHOLE),
}
_IN_EXPERT: Mapping[str, tuple[tuple[str, ...], Cut]] = {
    "linear_fc1": (("gate_proj.weight", "up_proj.weight"), Cut.GATE_UP),
    "linear_fc2": (("down_proj.weight",), Cut.COLUMNS),
}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(?P<one>\d+)\.(?P<a>linear_fc[12])\.weight|(?P<b>linear_fc[12])\.weight(?P<many>\d+))"
)


def find_family(name: str) -> Family:
    """Return the family of that name.

    Raises:
        LayoutMismatchError: There is no such family.
    """
    if name not in FAMILIES:
        message = f"no family {name!r}; there are {', '.join(FAMILIES)}: a new one is an entry of FAMILIES"
        raise LayoutMismatchError(message)
    return FAMILIES[name]


def find_source(parameter: str, first_expert: int) -> Source | None:
    """Return what a parameter holds, or ``None`` when its name is unknown.

    Args:
        parameter: Its name, with the layer's number in the whole model.
        first_expert: Number, in the whole model, of this rank's first expert; parameters count their rank's own from 0.
    """
    if parameter in _TOP:
        return _TOP[parameter]
    in_layer = _LAYER.fullmatch(parameter)
    if in_layer is None:
        return None
    prefix, rest = f"model.layers.{in_layer[1]}.", in_layer[2]
    if rest in _IN_LAYER:
        names, cut = _IN_LAYER[rest]
        return Source(names=tuple(prefix + name for name in names), cut=cut)
    expert = _EXPERT.fullmatch(rest)
    if expert is None:
        return None
    number = first_expert + int(expert["one"] or expert["many"])
    names, cut = _IN_EXPERT[expert["a"] or expert["b"]]
    return Source(names=tuple(f"{prefix}mlp.experts.{number}.{name}" for name in names), cut=cut, is_expert=True)


def checkpoint_shapes(family: Family, model: ModelShape) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the checkpoint, layer by layer."""
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (model.vocab_size, model.hidden_size)}
    for layer in range(model.num_layers):
        inside = _attention_shapes(family, model) | _mlp_shapes(
            model, is_moe=family.is_moe and layer in model.moe_layers
        )
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in inside.items()}
    shapes["model.norm.weight"] = (model.hidden_size,)
    if not model.is_tied:
        shapes["lm_head.weight"] = (model.vocab_size, model.hidden_size)
    return shapes


def _attention_shapes(family: Family, model: ModelShape) -> dict[str, tuple[int, ...]]:
    hidden, dim = model.hidden_size, model.head_dim
    rows = dict(zip(_QKV, (model.num_heads * dim, model.num_kv_heads * dim, model.num_kv_heads * dim), strict=True))
    shapes: dict[str, tuple[int, ...]] = {"input_layernorm.weight": (hidden,)}
    shapes |= {f"{name}.weight": (num_rows, hidden) for name, num_rows in rows.items()}
    if family.has_qkv_bias:
        shapes |= {f"{name}.bias": (num_rows,) for name, num_rows in rows.items()}
    shapes["self_attn.o_proj.weight"] = (hidden, model.num_heads * dim)
    if family.has_qk_norm:
        shapes |= {f"self_attn.{name}_norm.weight": (dim,) for name in "qk"}
    return shapes | {"post_attention_layernorm.weight": (hidden,)}


def _mlp_shapes(model: ModelShape, *, is_moe: bool) -> dict[str, tuple[int, ...]]:
    if not is_moe:
        return _gated_shapes("mlp", model.hidden_size, model.ffn_size)
    shapes: dict[str, tuple[int, ...]] = {"mlp.gate.weight": (model.num_experts, model.hidden_size)}
    for expert in range(model.num_experts):
        shapes |= _gated_shapes(f"mlp.experts.{expert}", model.hidden_size, model.expert_ffn_size)
    return shapes


def _gated_shapes(prefix: str, hidden: int, inner: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{prefix}.gate_proj.weight": (inner, hidden),
        f"{prefix}.up_proj.weight": (inner, hidden),
        f"{prefix}.down_proj.weight": (hidden, inner),
    }
