"""The train worker of RLVR pipelines with a policy-gradient variant, publishing its shards."""

from __future__ import annotations

from roll.pipeline.rlvr.actor_pg_worker import ActorPGWorker

from rose_roll.shards import PublishesShards


class RoseRlvrPgTrainWorker(PublishesShards, ActorPGWorker):
    """ROLL's own worker; ``model_update`` publishes this rank's shards to the pool."""
