"""The train worker of agentic pipelines with a policy-gradient variant, publishing its shards."""

from __future__ import annotations

from roll.pipeline.agentic.agentic_actor_pg_worker import ActorWorker

from rose_roll.shards import PublishesShards


class RoseAgenticPgTrainWorker(PublishesShards, ActorWorker):
    """ROLL's own worker; ``model_update`` publishes this rank's shards to the pool."""
