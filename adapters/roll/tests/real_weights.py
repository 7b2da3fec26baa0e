"""ROLL's own train cluster on CPUs: FSDP2 over gloo in Ray actors, whose ``model_update`` publishes shards."""

from __future__ import annotations

import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash
from real_pipeline import settings


class Learner:
    """A train cluster of ROLL's, driven as its pipeline drives it.

    Args:
        url: The pool.
        model: Where weights begin.
        num_ranks: Ranks that share the model.
        num_fronts: Fronts that join ROLL's own broadcast from ROLL's own train workers; 0: train workers of ours.
        front: Their class.
    """

    def __init__(
        self, url: str, model: Path, *, num_ranks: int, num_fronts: int = 0, front: str = "rose_roll.RoseInferWorker"
    ) -> None:
        import ray
        from dacite import from_dict
        from roll.distributed.executor.cluster import Cluster
        from roll.distributed.executor.model_update_group import ModelUpdateGroup
        from roll.distributed.scheduler.resource_manager import ResourceManager
        from roll.pipeline.agentic.agentic_config import AgenticConfig

        self._ray, self._step = ray, 0
        folder = tempfile.mkdtemp(prefix="rose-roll-")
        given = settings(url, str(model), folder, steps=4, async_ratio=0, num_ranks=num_ranks)
        if num_fronts:
            given["actor_train"]["worker_cls"] = "roll.pipeline.agentic.agentic_actor_worker.ActorWorker"
            given["actor_infer"]["worker_cls"] = front
            given["actor_infer"]["device_mapping"] = f"list(range({num_ranks},{num_ranks + num_fronts}))"
        config = from_dict(data_class=AgenticConfig, data=given)
        config.set_max_steps(max_steps=4)
        self._resources = ResourceManager(num_nodes=1, num_gpus_per_node=8)
        name = Path(folder).name
        self._cluster = self._start(Cluster, f"train_{name}", config.actor_train, config)
        self._fronts = None
        target: Any = SimpleNamespace(cluster_name="actor_infer", worker_config=config.actor_infer, workers=[])
        if num_fronts:
            target = self._fronts = self._start(Cluster, f"infer_{name}", config.actor_infer, config)
        self._group = ModelUpdateGroup(src_cluster=self._cluster, tgt_cluster=target, pipeline_config=config)

    @property
    def fronts(self) -> list[Any]:
        """Return the workers that join ROLL's own broadcast."""
        return list(self._fronts.workers) if self._fronts is not None else []

    def update(self) -> dict[str, float]:
        """Do what the pipeline does between two steps; returns its metrics, means over the ranks."""
        self._step += 1
        self._cluster.offload_states(blocking=True)
        metrics = self._group.model_update(self._step)
        if self._fronts is not None:
            self._fronts.load_states(blocking=True)
        return {name: _mean(value) for name, value in metrics.items()}

    def change(self) -> None:
        """Move every parameter a little, another way on each rank."""
        self._on_all(_change)

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the whole model, gathered by torch."""
        arrays = self._on_all(_gather)[0]
        return {name: torch.from_numpy(array.copy()) for name, array in arrays.items()}

    def digest(self) -> dict[str, str]:
        """Return a digest of each whole tensor, in the words of a site's ``sums``, made without any of ROSE's code."""
        return {name: xxhash.xxh3_128_hexdigest(tensor.numpy().tobytes()) for name, tensor in self.weights().items()}

    def close(self) -> None:
        """End the workers."""
        for worker in [*self._cluster.workers, *self.fronts]:
            self._ray.kill(worker)
        self._resources.destroy_placement_group()

    def _start(self, make: Any, name: str, worker_config: Any, config: Any) -> Any:
        cluster = make(
            name=name,
            worker_cls=worker_config.worker_cls,
            resource_manager=self._resources,
            worker_config=worker_config,
        )
        self._ray.get(cluster.initialize(pipeline_config=config, blocking=False), timeout=240)
        return cluster

    def _on_all(self, function: Any) -> list[Any]:
        calls = [worker.__ray_call__.remote(function) for worker in self._cluster.workers]
        return list(self._ray.get(calls, timeout=120))


def _change(worker: Any) -> None:
    torch.manual_seed(worker.rank + 10)
    with torch.no_grad():
        for parameter in worker.strategy.unwrap_model().parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.add_(torch.randn_like(local) * 0.01)


def _gather(worker: Any) -> dict[str, Any]:
    whole = {}
    for name, parameter in worker.strategy.unwrap_model().named_parameters():
        tensor = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
        whole[name] = tensor.detach().cpu().numpy()
    return whole


def _mean(value: Any) -> float:
    values = value if isinstance(value, list) else [value]
    return float(sum(values) / len(values))
