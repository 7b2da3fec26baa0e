"""One rank of a Megatron-Core model as a source of weights, in checkpoint names.

Invariants: nothing here is a collective, each rank reads its own parameters only; of the ranks that hold the same box one
publishes it; rows that pad the vocabulary are never published.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import torch
from megatron.core import parallel_state
from torch import nn

from rose.backends.fsdp.bits import torch_dtype
from rose.backends.fsdp.shard_bits import BaseIn, held_bits, shard_bits
from rose.backends.megatron.families import ModelShape, checkpoint_shapes, find_family, find_source
from rose.backends.megatron.placement import Placed, Ranks, place
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec, Trainer
from rose.transfer.source_views import HeldTensor, held_tensors

_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


@attrs.frozen(kw_only=True, eq=False)
class _Parameter:
    """A live parameter, where it lies, and whether this rank is the one to publish it."""

    tensor: torch.Tensor
    placed: Placed
    is_owner: bool


class MegatronTrainer(Trainer):
    """The weights of a Megatron-Core ``GPTModel``, wrapped (DDP, Float16Module) or not.

    Tensor, expert, expert-tensor, pipeline, context and data parallelism are read from ``parallel_state``, sizes from the
    model's configuration. Every rank of the process group publishes, also one that owns nothing (a data-parallel replica).
    With an optimizer that gathers parameters late (``overlap_param_gather``), publish after the gather.

    Args:
        model: The model, or its chunks under virtual pipeline parallelism.
        family: Name of the checkpoint's family, one of ``families.FAMILIES``.
        vocab_size: Rows of the checkpoint's embedding; the model's own may be padded.
        wire_dtype: What every parameter travels as.
        base_in: Where the last published bits of parameters on a GPU are kept and compared; see ``FsdpTrainer``.

    Raises:
        LayoutMismatchError: Parameters that the family does not know (all are named), or of another shape than expected.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        *,
        family: str,
        vocab_size: int,
        wire_dtype: str = "bfloat16",
        base_in: BaseIn = "device",
    ) -> None:
        self._base_in = base_in
        self.rank = torch.distributed.get_rank()
        self.world_size = torch.distributed.get_world_size()
        self._wire = torch_dtype(wire_dtype)
        chunks = [_unwrap(chunk) for chunk in ([model] if isinstance(model, nn.Module) else model)]
        self._model_shape = _model_shape(chunks[0], vocab_size)
        shapes = checkpoint_shapes(find_family(family), self._model_shape)
        self._specs = {name: TensorSpec(name=name, shape=shape, dtype=wire_dtype) for name, shape in shapes.items()}
        self._parameters: dict[str, _Parameter] = {}
        unknown = [name for chunk in chunks for name in self._add_chunk(chunk, shapes)]
        if unknown:
            message = (
                f"parameters that family {family!r} has no checkpoint name for: {', '.join(unknown)}; "
                "check the family, or add rules to rose.backends.megatron.families"
            )
            raise LayoutMismatchError(message)
        views = [view for one in self._parameters.values() for view in one.placed.views]
        held = held_tensors(views, {name: one.placed.box for name, one in self._parameters.items()})
        self._held = {name: held[name] for name in shapes if name in held}

    def tensors(self) -> Mapping[str, TensorSpec]:
        """Return every tensor of the checkpoint, layer by layer."""
        return dict(self._specs)

    def aliases(self) -> Mapping[str, str]:
        """Return the output layer's name when it shares the embedding."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self._model_shape.is_tied else {}

    def layout(self) -> Mapping[str, ShardSpec]:
        """Return the boxes that this rank publishes."""
        return {name: held.box for name, held in self._held.items() if self._is_owner(held)}

    def shards(self) -> Mapping[str, ShardBits]:
        """Return this rank's boxes; a slice is put together and cast when it is asked for."""
        bits = {
            name: shard_bits(one.tensor.detach(), self._wire, base_in=self._base_in)
            for name, one in self._parameters.items()
        }
        return {name: held_bits(held, bits) for name, held in self._held.items() if self._is_owner(held)}

    def load_weights(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Fill this rank's parameters, replicas too, from whole checkpoint tensors; rows of padding stay as they are.

        Raises:
            LayoutMismatchError: A tensor is missing or has another shape; names all.
        """
        wrong = [n for n in self._held if n not in weights or tuple(weights[n].shape) != self._specs[n].shape]
        if wrong:
            message = f"tensors that are missing or of another shape: {', '.join(wrong)}; nothing was loaded"
            raise LayoutMismatchError(message)
        with torch.no_grad():
            for name, held in self._held.items():
                for piece in held.pieces:
                    target = self._parameters[piece.parameter].tensor[_index(piece.box)]
                    target.copy_(weights[name][_index(piece.part)])

    def _is_owner(self, held: HeldTensor) -> bool:
        return self._parameters[held.pieces[0].parameter].is_owner

    def _add_chunk(self, chunk: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Place the parameters of a chunk; returns the names of those that are unknown."""
        dense, expert = _ranks()
        num_local = self._model_shape.num_experts // parallel_state.get_expert_model_parallel_world_size()
        first_expert = num_local * parallel_state.get_expert_model_parallel_rank()
        unknown = []
        for name, tensor in _named_weights(chunk):
            if name == "output_layer.weight" and self._model_shape.is_tied:
                continue  # the last pipeline stage's copy of the embedding
            source = find_source(name, first_expert)
            if source is None or not set(source.names) <= shapes.keys():
                unknown.append(name)
                continue
            ranks, shape = expert if source.is_expert else dense, tuple(tensor.shape)
            placed = place(name, shape, source, shapes=shapes, ranks=ranks, model=self._model_shape)
            self._parameters[name] = _Parameter(tensor=tensor, placed=placed, is_owner=ranks.is_owner(source.cut))
        return unknown


def _ranks() -> tuple[Ranks, Ranks]:
    """Return this rank's place for dense layers and for experts."""
    dense = Ranks(
        tensor=parallel_state.get_tensor_model_parallel_rank(),
        num_tensor=parallel_state.get_tensor_model_parallel_world_size(),
        replica=parallel_state.get_data_parallel_rank(with_context_parallel=True),
    )
    expert = Ranks(
        tensor=parallel_state.get_expert_tensor_parallel_rank(),
        num_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        replica=parallel_state.get_expert_data_parallel_rank(),
    )
    return dense, expert


def _unwrap(model: Any) -> Any:
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    return model


def _named_weights(chunk: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield what a checkpoint must hold, with layer numbers of the whole model: a stage counts its own from 0."""
    numbers = [layer.layer_number - 1 for layer in chunk.decoder.layers]
    trained_biases = (pair for pair in chunk.named_buffers() if pair[0].endswith(".expert_bias"))
    for name, tensor in (*chunk.named_parameters(), *trained_biases):
        yield _LAYER.sub(lambda match: f"decoder.layers.{numbers[int(match[1])]}.", name, count=1), tensor


def _model_shape(model: Any, vocab_size: int) -> ModelShape:
    config = model.config
    num_experts = config.num_moe_experts or 0
    frequency = config.moe_layer_freq
    pattern = [i % frequency == 0 for i in range(config.num_layers)] if isinstance(frequency, int) else frequency
    return ModelShape(
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        ffn_size=config.ffn_hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_query_groups,
        head_dim=config.kv_channels,
        is_tied=model.share_embeddings_and_output_weights,
        num_experts=num_experts,
        expert_ffn_size=config.moe_ffn_hidden_size or 0,
        moe_layers=frozenset(i for i, is_moe in enumerate(pattern) if is_moe and num_experts),
    )


def _index(box: ShardSpec) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(box.offset, box.shape, strict=True))
