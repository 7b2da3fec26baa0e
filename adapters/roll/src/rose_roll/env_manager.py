"""Environment managers that say to the proxy who asks, and put versions into what ROLL trains on.

Naming one in ``custom_envs.X.env_manager_cls`` also registers the llm proxy "rose". ``RoseEnvManager`` can be put before any other
manager of trajectories: ``class Mine(RoseEnvManager, MyTrajEnvManager): ...``.
"""

from __future__ import annotations

import os
from typing import Any

from roll.pipeline.agentic.env_manager.traj_env_manager import TrajEnvManager

from rose.errors import ConfigError
from rose_roll.fields import object_array
from rose_roll.llm_proxy import RoseProxy, TrajectoryName
from rose_roll.options import ENVIRONMENT
from rose_roll.versions import ends_of


class RoseEnvManager:
    """Mix-in for ROLL's managers that make one sequence of a trajectory.

    Rows of its rollouts have two more entries in ``non_tensor_batch``: ``rose_versions``, the oldest and the newest version
    (``run:n``) of the row's tokens, and ``rose_spans``, which positions of ``input_ids`` which version made, and ROLL's step then.
    """

    def __init__(self, *args: Any, pipeline_config: Any, **kwargs: Any) -> None:
        for name in ENVIRONMENT:  # ROLL sets system_envs in its GPU workers only
            if name in (getattr(pipeline_config, "system_envs", None) or {}):
                os.environ[name] = str(pipeline_config.system_envs[name])
        super().__init__(*args, pipeline_config=pipeline_config, **kwargs)  # type: ignore[call-arg]

    def update_step(self, global_step: int, trace_meta: Any = None) -> None:
        """Begin a step: turns want the weights that the pool has from now on."""
        super().update_step(global_step, trace_meta)  # type: ignore[misc]
        proxy = self._rose_proxy()
        if proxy is not None:
            proxy.begin_step(global_step)

    def make_decision(self, rollout_cache: Any) -> Any:
        """Run one turn under the trajectory's name."""
        proxy = self._rose_proxy()
        if proxy is not None:
            proxy.trajectory = self._name()
        output = super().make_decision(rollout_cache)  # type: ignore[misc]
        rose = output.meta_info.pop("rose", None)
        if rose is not None:
            rollout_cache.history[-1]["rose"] = rose
        return output

    def formulate_rollouts(self, rollout_cache: Any) -> Any:
        """Make ROLL's rollout, and add which weights made it."""
        spans, metrics = trajectory_spans(rollout_cache.history)
        rollout = super().formulate_rollouts(rollout_cache)  # type: ignore[misc]
        if rollout.batch.batch_size[0] != 1:
            message = f"{type(self).__name__} makes {rollout.batch.batch_size[0]} rows of a trajectory; RoseEnvManager goes with managers that make one"
            raise ConfigError(message)
        rollout.non_tensor_batch["rose_versions"] = object_array([ends_of(spans)])
        rollout.non_tensor_batch["rose_spans"] = object_array([spans])
        rollout.meta_info.setdefault("metrics", {}).update(metrics)
        return rollout

    def _rose_proxy(self) -> RoseProxy | None:
        proxy = getattr(self, "llm_proxy", None)
        return proxy if isinstance(proxy, RoseProxy) else None

    def _name(self) -> TrajectoryName:
        manager: Any = self
        cache = manager.rollout_cache
        group = f"{manager.mode}/{cache.tag}_{cache.group_id}_{manager.episode_id}_{manager.group_seed}"
        return TrajectoryName(trajectory_id=f"{group}_{cache.env_id}", group_id=group)


class RoseTrajEnvManager(RoseEnvManager, TrajEnvManager):
    """ROLL's manager of trajectories, on a ROSE pool."""


def trajectory_spans(history: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Return the spans of all turns of a trajectory, in positions of its tokens, and its figures for ROLL's metrics."""
    spans: list[dict[str, Any]] = []
    position, num_hops, num_resumed = 0, 0, 0
    for turn in history:
        if "response_ids" not in turn:
            continue
        position += len(turn["prompt_ids"])
        rose = turn.get("rose", {})
        spans += [
            {**span, "start": span["start"] + position, "end": span["end"] + position} for span in rose.get("spans", ())
        ]
        num_hops += rose.get("num_hops", 0)
        num_resumed += rose.get("num_resumed_tokens", 0)
        position += len(turn["response_ids"])
    versions = {span["version"] for span in spans}
    return spans, {
        "rose/num_versions": float(len(versions)),
        "rose/num_hops": float(num_hops),
        "rose/num_resumed_tokens": float(num_resumed),
    }
