"""Configuration of the policy and its learner; plain data that travels to the learner's processes as JSON. No torch here."""

from __future__ import annotations

from typing import Any, Literal

import attrs
from attrs import validators as v

_POSITIVE: Any = v.gt(0)
_AT_LEAST_ONE: Any = v.ge(1)


@attrs.frozen(kw_only=True)
class PolicyConfig:
    """Shape of the Qwen3-architecture policy. The vocabulary comes from the environment's words."""

    num_layers: int = attrs.field(default=2, validator=_AT_LEAST_ONE)
    hidden_size: int = attrs.field(default=128, validator=_AT_LEAST_ONE)
    intermediate_size: int = attrs.field(default=256, validator=_AT_LEAST_ONE)
    num_heads: int = attrs.field(default=4, validator=_AT_LEAST_ONE)
    num_kv_heads: int = attrs.field(default=2, validator=_AT_LEAST_ONE)
    head_dim: int = attrs.field(default=32, validator=_AT_LEAST_ONE)
    max_positions: int = attrs.field(default=512, validator=_AT_LEAST_ONE)
    initializer_range: float = attrs.field(default=0.08, validator=_POSITIVE)


@attrs.frozen(kw_only=True)
class WarmStartConfig:
    """Supervised steps on demonstrations: linear warm-up, then linear decay to a tenth of the learning rate."""

    num_steps: int = attrs.field(default=150, validator=v.ge(0))
    num_episodes: int = attrs.field(default=32, validator=_AT_LEAST_ONE)
    lr: float = attrs.field(default=2e-3, validator=_POSITIVE)
    num_warm_up_steps: int = attrs.field(default=20, validator=_AT_LEAST_ONE)


@attrs.frozen(kw_only=True)
class GrpoConfig:
    """Clipped surrogate against the engines' own log-probs; no KL term, no entropy bonus.

    Attributes:
        lr: Default learning rate of AdamW (betas 0.9 and 0.95, no weight decay).
        num_minibatches: Optimizer steps a training step.
        clip_low, clip_high: The ratio counts within ``[1 - clip_low, 1 + clip_high]``.
        max_gradient_norm: Global norm to which the gradient is clipped.
        micro_rows: Trajectories of one forward pass on one rank.
        loss: What weighs the same in a minibatch: every ``token``, or every trajectory (``sequence``).
    """

    lr: float = attrs.field(default=5e-4, validator=_POSITIVE)
    num_minibatches: int = attrs.field(default=2, validator=_AT_LEAST_ONE)
    clip_low: float = attrs.field(default=0.2, validator=[_POSITIVE, v.lt(1)])
    clip_high: float = attrs.field(default=0.28, validator=_POSITIVE)
    max_gradient_norm: float = attrs.field(default=1.0, validator=_POSITIVE)
    micro_rows: int = attrs.field(default=32, validator=_AT_LEAST_ONE)
    loss: Literal["token", "sequence"] = attrs.field(default="token", validator=v.in_(("token", "sequence")))


@attrs.frozen(kw_only=True)
class LearnerConfig:
    """The whole learner.

    Attributes:
        environment: ``module:Class``; gives the vocabulary and, where it can, demonstrations.
        seed: Of the initial weights, the demonstrations and the order of samples.
        trainer: ``fsdp`` (every rank sees its own data) or ``megatron`` (tensor parallelism over all ranks).
        num_ranks: Ranks, one process each.
        compute_dtype: What layers compute in; masters and gradients are float32 either way.
        timeout_s: Longest wait for any answer of the ranks.
    """

    environment: str = "rose.reference.lake:FrozenLake"
    seed: int = attrs.field(default=0, validator=v.ge(0))
    trainer: Literal["fsdp", "megatron"] = attrs.field(default="fsdp", validator=v.in_(("fsdp", "megatron")))
    num_ranks: int = attrs.field(default=2, validator=_AT_LEAST_ONE)
    compute_dtype: Literal["bfloat16", "float32"] = attrs.field(
        default="bfloat16", validator=v.in_(("bfloat16", "float32"))
    )
    policy: PolicyConfig = attrs.field(factory=PolicyConfig)
    warm_start: WarmStartConfig = attrs.field(factory=WarmStartConfig)
    grpo: GrpoConfig = attrs.field(factory=GrpoConfig)
    timeout_s: float = attrs.field(default=600.0, validator=_POSITIVE)

    @property
    def num_data_ranks(self) -> int:
        """Return into how many shares a batch is cut; rank ``r`` gets share ``r`` modulo this."""
        return self.num_ranks if self.trainer == "fsdp" else 1
