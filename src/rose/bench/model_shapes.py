"""Which tensors a model has: named models from their published settings, others from a table in a file."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import attrs

from rose.errors import ConfigError
from rose.interfaces.trainer import TensorSpec
from rose.transfer.engine_tables.model_table import load_model_table
from rose.transfer.layout import num_bytes

_SCALE_SUFFIX = "_scale_inv"
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@attrs.frozen(kw_only=True)
class Dense:
    """Settings of a dense decoder: widths in elements, ``has_bias`` of q, k and v, ``has_qk_norm`` of each head."""

    hidden: int
    inter: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    is_tied: bool = False
    has_bias: bool = False
    has_qk_norm: bool = True
    experts: int = 0
    """Experts of each layer, each ``inter`` wide; 0 for a plain MLP."""


_QWEN3_VOCAB = 151936
NAMED = {
    "Qwen2.5-0.5B": Dense(hidden=896, inter=4864, layers=24, heads=14, kv_heads=2, head_dim=64, vocab=_QWEN3_VOCAB,
                          is_tied=True, has_bias=True, has_qk_norm=False),
    "Qwen3-0.6B": Dense(hidden=1024, inter=3072, layers=28, heads=16, kv_heads=8, head_dim=128, vocab=_QWEN3_VOCAB, is_tied=True),
    "Qwen3-1.7B": Dense(hidden=2048, inter=6144, layers=28, heads=16, kv_heads=8, head_dim=128, vocab=_QWEN3_VOCAB, is_tied=True),
    "Qwen3-4B": Dense(hidden=2560, inter=9728, layers=36, heads=32, kv_heads=8, head_dim=128, vocab=_QWEN3_VOCAB, is_tied=True),
    "Qwen3-8B": Dense(hidden=4096, inter=12288, layers=36, heads=32, kv_heads=8, head_dim=128, vocab=_QWEN3_VOCAB),
    "Qwen3-32B": Dense(hidden=5120, inter=25600, layers=64, heads=64, kv_heads=8, head_dim=128, vocab=_QWEN3_VOCAB),
    "Qwen3-30B-A3B": Dense(hidden=2048, inter=768, layers=48, heads=32, kv_heads=4, head_dim=128, vocab=_QWEN3_VOCAB, experts=128),
    "Llama-3.1-8B": Dense(hidden=4096, inter=14336, layers=32, heads=32, kv_heads=8, head_dim=128, vocab=128256,
                          has_qk_norm=False),
}  # fmt: skip
"""The models that are known by name."""


@attrs.frozen(kw_only=True)
class Shapes:
    """The tensors that are measured.

    Attributes:
        model: The model's name.
        tensors: Checkpoint tensors, tied ones once.
        num_elements_whole: Elements of the whole model.
        layers: The decoder layers among the tensors, ascending.
        config: Settings that say how engines cut the tensors: ``heads``, ``kv``, ``head_dim``, ...
    """

    model: str
    tensors: tuple[TensorSpec, ...]
    num_elements_whole: int
    layers: tuple[int, ...]
    config: Mapping[str, Any]

    @property
    def num_elements(self) -> int:
        """Return how many elements the tensors have."""
        return sum(prod(spec.shape) for spec in self.tensors)

    @property
    def num_bytes(self) -> int:
        """Return the size of the tensors on the wire."""
        return sum(map(num_bytes, self.tensors))

    @property
    def sampled_fraction(self) -> float:
        """Return which share of the model's elements they are."""
        return self.num_elements / self.num_elements_whole


def load_shapes(model: str) -> Shapes:
    """Return all tensors of a model.

    Args:
        model: A name out of ``NAMED``, or a table's file (``.json`` or ``.json.gz``).

    Raises:
        ConfigError: There is no such model or file, or the file is no table.
    """
    if model in NAMED:
        return _shapes(model, tuple(_tensors(NAMED[model])), _config(NAMED[model]))
    if not Path(model).is_file():
        message = f"--model {model!r} is no file and no known model; known: {', '.join(NAMED)}"
        raise ConfigError(message)
    table = load_model_table(Path(model))
    return _shapes(table.name, table.tensors, table.config)


def sample(shapes: Shapes, *, fraction: float | None, max_bytes: int) -> Shapes:
    """Return evenly spaced whole decoder layers of a model, or all of its tensors.

    Args:
        shapes: The whole model.
        fraction: Share of the layers, above 0; 1 takes all tensors. ``None`` takes as many as fit.
        max_bytes: What must fit when no fraction is given; of a layer that is larger, evenly spaced tensors are taken.
    """
    if fraction == 1.0 or (fraction is None and shapes.num_bytes <= max_bytes) or not shapes.layers:
        return shapes
    layers = shapes.layers
    layer_bytes = only_layers(shapes, layers).num_bytes / len(layers)
    wanted = fraction * len(layers) if fraction is not None else max_bytes / max(layer_bytes, 1)
    count = max(1, min(len(layers), int(wanted)))
    chosen = {layers[(2 * index + 1) * len(layers) // (2 * count)] for index in range(count)}
    found = only_layers(shapes, chosen)
    return found if fraction is not None else fit(found, max_bytes)


def fit(shapes: Shapes, max_bytes: int) -> Shapes:
    """Return evenly spaced tensors of about ``max_bytes`` in all, at least one; all of them where they are no more.

    The scales of a quantized tensor go with it.
    """
    share = max_bytes / max(shapes.num_bytes, 1)
    if share >= 1:
        return shapes
    chosen, owed = set(), 0.0
    weights = [spec for spec in shapes.tensors if not spec.name.endswith(_SCALE_SUFFIX)]
    for spec in weights:
        owed += share * num_bytes(spec)
        if owed >= num_bytes(spec) / 2:
            chosen.add(spec.name)
            owed -= num_bytes(spec)
    chosen = chosen or {min(weights, key=num_bytes).name}
    return only_tensors(shapes, chosen | {name + _SCALE_SUFFIX for name in chosen})


def only_layers(shapes: Shapes, layers: Collection[int]) -> Shapes:
    """Return the tensors of some decoder layers."""
    tensors = tuple(spec for spec in shapes.tensors if layer_of(spec.name) in layers)
    return attrs.evolve(shapes, tensors=tensors, layers=tuple(sorted(layers)))


def only_tensors(shapes: Shapes, names: Collection[str]) -> Shapes:
    """Return the tensors of some names."""
    wanted = frozenset(names)
    return attrs.evolve(shapes, tensors=tuple(spec for spec in shapes.tensors if spec.name in wanted))


def layer_of(name: str) -> int | None:
    """Return the decoder layer that a tensor belongs to, ``None`` for embeddings and the like."""
    found = _LAYER.search(name)
    return int(found.group(1)) if found else None


def _shapes(model: str, tensors: Sequence[TensorSpec], config: Mapping[str, Any]) -> Shapes:
    layers = {layer for spec in tensors if (layer := layer_of(spec.name)) is not None}
    return Shapes(
        model=model,
        tensors=tuple(tensors),
        num_elements_whole=sum(prod(spec.shape) for spec in tensors),
        layers=tuple(sorted(layers)),
        config=config,
    )


def _config(model: Dense) -> dict[str, Any]:
    return {
        "hidden": model.hidden,
        "inter": model.inter,
        "layers": model.layers,
        "heads": model.heads,
        "kv": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab": model.vocab,
        "tied": model.is_tied,
        **({"experts": model.experts, "moe_inter": model.inter} if model.experts else {}),
    }


def _tensors(model: Dense) -> Iterator[TensorSpec]:
    yield _bf16("model.embed_tokens.weight", model.vocab, model.hidden)
    for layer in range(model.layers):
        yield from _layer(model, f"model.layers.{layer}")
    yield _bf16("model.norm.weight", model.hidden)
    if not model.is_tied:
        yield _bf16("lm_head.weight", model.vocab, model.hidden)


def _layer(model: Dense, prefix: str) -> Iterator[TensorSpec]:
    attention = f"{prefix}.self_attn"
    widths = {
        "q": model.heads * model.head_dim,
        "k": model.kv_heads * model.head_dim,
        "v": model.kv_heads * model.head_dim,
    }
    for letter, width in widths.items():
        yield _bf16(f"{attention}.{letter}_proj.weight", width, model.hidden)
        if model.has_bias:
            yield _bf16(f"{attention}.{letter}_proj.bias", width)
    yield _bf16(f"{attention}.o_proj.weight", model.hidden, widths["q"])
    if model.has_qk_norm:
        yield _bf16(f"{attention}.q_norm.weight", model.head_dim)
        yield _bf16(f"{attention}.k_norm.weight", model.head_dim)
    if model.experts:
        yield _bf16(f"{prefix}.mlp.gate.weight", model.experts, model.hidden)
    for mlp in [f"{prefix}.mlp.experts.{expert}" for expert in range(model.experts)] or [f"{prefix}.mlp"]:
        yield _bf16(f"{mlp}.gate_proj.weight", model.inter, model.hidden)
        yield _bf16(f"{mlp}.up_proj.weight", model.inter, model.hidden)
        yield _bf16(f"{mlp}.down_proj.weight", model.hidden, model.inter)
    yield _bf16(f"{prefix}.input_layernorm.weight", model.hidden)
    yield _bf16(f"{prefix}.post_attention_layernorm.weight", model.hidden)


def _bf16(name: str, *shape: int) -> TensorSpec:
    return TensorSpec(name=name, shape=shape, dtype="bfloat16")
