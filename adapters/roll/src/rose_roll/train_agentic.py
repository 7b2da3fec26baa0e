"""The train worker of agentic pipelines, publishing its shards."""

from __future__ import annotations

from roll.pipeline.agentic.agentic_actor_worker import ActorWorker

from rose_roll.shards import PublishesShards


class RoseAgenticTrainWorker(PublishesShards, ActorWorker):
    """ROLL's own worker; ``model_update`` publishes this rank's shards to the pool."""
