"""The train worker of RLVR pipelines, publishing its shards."""

from __future__ import annotations

from roll.pipeline.rlvr.actor_worker import ActorWorker

from rose_roll.shards import PublishesShards


class RoseRlvrTrainWorker(PublishesShards, ActorWorker):
    """ROLL's own worker; ``model_update`` publishes this rank's shards to the pool."""
