"""The checkpoint engine ``rose``, for separate and fully asynchronous modes.

Life cycle of one update in veRL's manager, and what is left of it:

1. abort all turns: as ``on_abort`` says, by default nothing.
2. release caches, prepare and build a process group: nothing; there is no group that an engine could break.
3. [EVERY TRAINER RANK] ``send_weights``: publish, and let the pool bring its engines there while they serve.
4. finalize, restore caches: nothing. Resume turns.

An engine that fails is fenced by the pool; rank 0 says so and training goes on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from rose_verl.plugin import refuse_if_broken


class Publishing:
    """Publishes each trainer rank's own shards.

    Args:
        bucket_size: Of no meaning here: weights are read where they lie.
        is_master: Whether this is the trainers' rank 0.
        options: There are none; the pool is named where the rollout is.

    Raises:
        ConfigError: There are options, or the installation is broken.
    """

    def __init__(self, bucket_size: int = 0, is_master: bool = False, **options: Any) -> None:  # noqa: FBT001, FBT002 - veRL's signature
        refuse_if_broken()
        refuse_options(options)
        self.bucket_size, self.is_master = bucket_size, is_master

    def prepare(self) -> dict[str, Any]:
        """Prepare nothing."""
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Return no arguments for either side: they meet through the pool only."""
        del actor_wg_world_size, rollout_world_size, metadata
        return {}, {}

    def init_process_group(self, **_: Any) -> None:
        """Make no group."""

    def finalize(self) -> None:
        """Leave everything as it is for the next update."""

    async def send_weights(self, weights: Any, global_steps: int | None = None) -> dict[str, float]:
        """Publish this rank's weights; every trainer rank is called.

        Returns:
            Figures for veRL's log, on rank 0.

        Raises:
            RoseError: They could not be published. Engines that do not take them are no error.
        """
        from rose_verl.weights import push_weights  # noqa: PLC0415 - needs torch.distributed

        return await push_weights(weights, global_steps)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncIterator[tuple[str, Any]]:
        """Give nothing: engines fetch for themselves."""
        del global_steps
        nothing: tuple[tuple[str, Any], ...] = ()
        for pair in nothing:
            yield pair


def make_engine_class(base: type) -> type:
    """Return the checkpoint engine, as a subclass of veRL's: known only when veRL's module has been imported."""
    return type("RoseCheckpointEngine", (Publishing, base), {"__doc__": Publishing.__doc__, "__module__": __name__})


def refuse_options(options: dict[str, Any]) -> None:
    """Refuse options that this engine does not have.

    Raises:
        ConfigError: There are some; says where they go.
    """
    if options:
        from rose.errors import ConfigError  # noqa: PLC0415
        from rose_verl.settings import OPTION  # noqa: PLC0415

        message = (
            f"checkpoint_engine.engine_kwargs.rose has {', '.join(sorted(options))}; options of a pool go to {OPTION}"
        )
        raise ConfigError(message)
