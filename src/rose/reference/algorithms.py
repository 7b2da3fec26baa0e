"""What tells the algorithms of the reference loop apart, as values. Pure; no torch.

``grpo``: groups as they come, on policy; every trajectory weighs the same. ``dapo``: groups of equal rewards are dropped and others sampled,
the upper clip is higher, every token weighs the same (DAPO, arXiv 2503.14476). ``async``: GRPO whose next rollout runs while
the learner trains; the oldest token of a trajectory bounds how stale it may be.
"""

from __future__ import annotations

from typing import Literal

import attrs

from rose.reference.learner_config import GrpoConfig

Loss = Literal["sequence", "token"]


@attrs.frozen(kw_only=True)
class Algorithm:
    """One algorithm.

    Attributes:
        loss: Whether trajectories (``sequence``) or tokens (``token``) weigh the same.
        clip_high: Ratios above ``1 + clip_high`` earn nothing more for a good token.
        has_dynamic_sampling: Whether groups without a signal are replaced.
        is_async: Whether the next rollout runs while the learner trains.
    """

    loss: Loss
    clip_high: float
    has_dynamic_sampling: bool = False
    is_async: bool = False

    def configure(self, config: GrpoConfig) -> GrpoConfig:
        """Return a learner's configuration with this algorithm's loss; the rest as it is."""
        return attrs.evolve(config, loss=self.loss, clip_high=self.clip_high)


ALGORITHMS = {
    "grpo": Algorithm(loss="sequence", clip_high=0.2),
    "dapo": Algorithm(loss="token", clip_high=0.28, has_dynamic_sampling=True),
    "async": Algorithm(loss="sequence", clip_high=0.2, is_async=True),
}
