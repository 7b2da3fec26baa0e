"""Which dimension of a checkpoint tensor an engine cuts, by the tensor's name.

The rules are those of vLLM's and SGLang's parallel layers for dense, mixture-of-experts and latent-attention decoders with
Hugging Face checkpoint names: column-parallel layers are cut along their output, row-parallel ones along their input, attention by
heads, vocabularies in padded parts; norms, routers and down-projections of latent attention are on every rank.
"""

from __future__ import annotations

import re
from enum import Enum
from functools import lru_cache

import attrs


class Cut(Enum):
    """How a dimension is shared out over tensor-parallel ranks."""

    WHOLE = "whole"
    EVEN = "even"
    HEADS = "heads"
    KV_HEADS = "KV heads"
    VOCAB = "vocabulary"
    GATE_UP_PAIRS = "interleaved gate and up"
    FIRST_RANK = "on the first rank of its group only"


@attrs.frozen(kw_only=True)
class Rule:
    """How a tensor is cut.

    Attributes:
        cut: How ``dim`` is shared out.
        dim: The dimension; has no meaning for ``WHOLE`` and ``FIRST_RANK``.
        is_expert: Whether the tensor belongs to one routed expert, which the name tells.
        is_expert_stack: Whether its first dimension is the routed experts.
    """

    cut: Cut
    dim: int = 0
    is_expert: bool = False
    is_expert_stack: bool = False


_RULES = (
    (r"embed_tokens\.weight|lm_head\.weight", Rule(cut=Cut.VOCAB)),
    (r"self_attn\.q_proj\.(weight|bias)|self_attn\.(q_b|kv_b)_proj\.weight|self_attn\.sinks", Rule(cut=Cut.HEADS)),
    (r"self_attn\.[kv]_proj\.(weight|bias)", Rule(cut=Cut.KV_HEADS)),
    (r"self_attn\.o_proj\.weight", Rule(cut=Cut.HEADS, dim=1)),
    (r"mlp\.(shared_experts?\.)?(gate|up)_proj\.(weight|bias)", Rule(cut=Cut.EVEN)),
    (r"mlp\.(shared_experts?\.)?down_proj\.weight", Rule(cut=Cut.EVEN, dim=1)),
    (r"mlp\.experts\.N\.(gate|up)_proj\.weight", Rule(cut=Cut.EVEN, is_expert=True)),
    (r"mlp\.experts\.N\.down_proj\.weight", Rule(cut=Cut.EVEN, dim=1, is_expert=True)),
    (r"mlp\.experts\.gate_up_proj", Rule(cut=Cut.GATE_UP_PAIRS, dim=2, is_expert_stack=True)),
    (r"mlp\.experts\.gate_up_proj_bias", Rule(cut=Cut.GATE_UP_PAIRS, dim=1, is_expert_stack=True)),
    (r"mlp\.experts\.down_proj", Rule(cut=Cut.EVEN, dim=1, is_expert_stack=True)),
    # It is added to the sum over the ranks of an expert, so one of them holds it and the others hold zeros.
    (r"mlp\.experts\.down_proj_bias", Rule(cut=Cut.FIRST_RANK, is_expert_stack=True)),
    (r"norm\.weight|(input|post_attention)_layernorm\.weight", Rule(cut=Cut.WHOLE)),
    (r"self_attn\.([qk]_norm|(q|kv)_a_layernorm|q_a_proj|kv_a_proj_with_mqa)\.weight", Rule(cut=Cut.WHOLE)),
    (r"self_attn\.o_proj\.bias|mlp\.down_proj\.bias", Rule(cut=Cut.WHOLE)),
    (r"mlp\.(gate|router)\.(weight|bias)|mlp\.gate\.e_score_correction_bias", Rule(cut=Cut.WHOLE)),
    (r"mlp\.shared_expert_gate\.weight", Rule(cut=Cut.WHOLE)),
)
_COMPILED = tuple((re.compile(rf"(model\.)?(layers\.N\.)?({pattern})"), rule) for pattern, rule in _RULES)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")


def find_rule(name: str) -> Rule | None:
    """Return the rule of a checkpoint name, or ``None`` where there is none."""
    return _find(_NUMBER.sub("N", name))


def expert_of(name: str) -> int:
    """Return the number of the expert in a name: the last number in it."""
    return int(_NUMBER.findall(name)[-1])


@lru_cache(maxsize=4096)
def _find(pattern: str) -> Rule | None:
    return next((rule for expression, rule in _COMPILED if expression.fullmatch(pattern)), None)
