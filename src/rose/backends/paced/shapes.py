"""Shapes of models, and what follows from them: parameters, bytes of weights, bytes of keys and values.

Figures of the known models are those of their published configurations. Biases and norms (under 0.01 % of the parameters)
are left out.
"""

from __future__ import annotations

import attrs

from rose import checks

_BYTES = 2  # of a bfloat16


@attrs.frozen(kw_only=True)
class DecoderShape:
    """A dense decoder with grouped attention and bfloat16 weights; input and output embedding are not tied.

    Attributes:
        num_layers: Decoder layers.
        hidden_size: Width of the residual stream.
        num_heads, num_kv_heads, head_size: Attention.
        intermediate_size: Width of the feed-forward part.
        vocab_size: Rows of the output embedding.
        num_mlp_matrices: 3 where the feed-forward part is gated, else 2.
    """

    num_layers: int = attrs.field(validator=checks.integer(1))
    hidden_size: int = attrs.field(validator=checks.integer(1))
    num_heads: int = attrs.field(validator=checks.integer(1))
    num_kv_heads: int = attrs.field(validator=checks.integer(1))
    head_size: int = attrs.field(validator=checks.integer(1))
    intermediate_size: int = attrs.field(validator=checks.integer(1))
    vocab_size: int = attrs.field(validator=checks.integer(1))
    num_mlp_matrices: int = attrs.field(default=3, validator=checks.integer(2))

    @property
    def attention_width(self) -> int:
        """Query heads times head size."""
        return self.num_heads * self.head_size

    @property
    def layer_params(self) -> int:
        """Parameters of one layer's matrices: query, key, value and output projection, feed-forward part."""
        attention = 2 * self.attention_width + 2 * self.num_kv_heads * self.head_size
        return self.hidden_size * (attention + self.num_mlp_matrices * self.intermediate_size)

    @property
    def num_params(self) -> int:
        """Parameters that multiply every token: all layers, no embeddings."""
        return self.num_layers * self.layer_params

    @property
    def weight_bytes(self) -> int:
        """What one step reads of the weights: all layers and the output embedding."""
        return _BYTES * (self.num_params + self.vocab_size * self.hidden_size)

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token over all layers."""
        return 2 * _BYTES * self.num_layers * self.num_kv_heads * self.head_size


SHAPES = {
    "qwen2.5-7b": DecoderShape(
        num_layers=28,
        hidden_size=3584,
        num_heads=28,
        num_kv_heads=4,
        head_size=128,
        intermediate_size=18_944,
        vocab_size=152_064,
    ),
    "qwen3-8b": DecoderShape(
        num_layers=36,
        hidden_size=4096,
        num_heads=32,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=12_288,
        vocab_size=151_936,
    ),
    "qwen2.5-32b": DecoderShape(
        num_layers=64,
        hidden_size=5120,
        num_heads=40,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=27_648,
        vocab_size=152_064,
    ),
    "qwen3-32b": DecoderShape(
        num_layers=64,
        hidden_size=5120,
        num_heads=64,
        num_kv_heads=8,
        head_size=128,
        intermediate_size=25_600,
        vocab_size=151_936,
    ),
}
