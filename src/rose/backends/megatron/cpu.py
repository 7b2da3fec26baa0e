"""Small Megatron-Core models without a GPU, for tests and the reference job.

Megatron-Core asks CUDA for its random state and for the device of some buffers. Here dropout is off and weights are
initialised on the CPU, so that neither matters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel import random as megatron_random
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils


class _NoTracker:
    """Stands for the tracker of CUDA's random states: there are none."""

    def is_initialized(self) -> bool:
        return True

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def add(self, name: str, seed: int) -> None:
        """Forget it."""

    @contextmanager
    def fork(self, name: str = "") -> Iterator[None]:  # noqa: ARG002 - the tracker's signature
        yield


def cpu_megatron() -> None:
    """Make this process's Megatron-Core run on the CPU, with gloo. Call it once, before a model is made."""
    megatron_random._CUDA_RNG_STATE_TRACKER = _NoTracker()  # noqa: SLF001 - it offers no other way
    megatron_random._CUDA_RNG_STATE_TRACKER_INITIALIZED = True  # noqa: SLF001
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda device=None: None  # noqa: ARG005 - CUDA's signature
    if not hasattr(moe_utils, "te_general_gemm"):  # the router asks for it, whether Transformer Engine is there or not
        moe_utils.te_general_gemm = None


def make_gpt(checkpoint: Mapping[str, Any], *, dtype: torch.dtype = torch.float32, vocab_multiple: int = 16) -> Any:
    """Return a ``GPTModel`` of Megatron's own layers, cut as ``parallel_state`` says, on the CPU.

    Args:
        checkpoint: The Hugging Face configuration (``config.json``) of a Qwen3 or Qwen3-MoE.
        dtype: Of the parameters and of what layers compute in.
        vocab_multiple: The vocabulary is padded to a multiple of this and the number of tensor-parallel ranks.
    """
    num_experts = checkpoint.get("num_experts", checkpoint.get("num_local_experts"))
    step = vocab_multiple * parallel_state.get_tensor_model_parallel_world_size()
    return GPTModel(
        config=_transformer_config(checkpoint, num_experts, dtype),
        transformer_layer_spec=get_gpt_layer_local_spec(
            num_experts=num_experts, qk_layernorm=True, normalization="RMSNorm"
        ),
        vocab_size=-(-checkpoint["vocab_size"] // step) * step,
        max_sequence_length=checkpoint["max_position_embeddings"],
        position_embedding_type="rope",
        rotary_base=checkpoint["rope_parameters"]["rope_theta"],
        share_embeddings_and_output_weights=checkpoint["tie_word_embeddings"],
    )


def _transformer_config(checkpoint: Mapping[str, Any], num_experts: int | None, dtype: torch.dtype) -> Any:
    """Return the configuration without dropout and without fused kernels, which need a GPU."""
    return TransformerConfig(
        num_layers=checkpoint["num_hidden_layers"],
        hidden_size=checkpoint["hidden_size"],
        ffn_hidden_size=checkpoint["intermediate_size"],
        num_attention_heads=checkpoint["num_attention_heads"],
        num_query_groups=checkpoint["num_key_value_heads"],
        kv_channels=checkpoint["head_dim"],
        layernorm_epsilon=checkpoint["rms_norm_eps"],
        normalization="RMSNorm",
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        expert_model_parallel_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_parallel_size=parallel_state.get_expert_tensor_parallel_world_size(),
        num_moe_experts=num_experts,
        moe_ffn_hidden_size=checkpoint.get("moe_intermediate_size"),
        moe_router_topk=checkpoint.get("num_experts_per_tok", 2),
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="allgather",  # noqa: S106 - no password
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        attention_softmax_in_fp32=True,
        bf16=dtype is torch.bfloat16,
        params_dtype=dtype,
    )


def causal_mask(ids: torch.Tensor) -> torch.Tensor:
    """Return Megatron's attention mask for ``ids`` of ``[rows, tokens]``: true where a token must not look."""
    length = ids.shape[1]
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
