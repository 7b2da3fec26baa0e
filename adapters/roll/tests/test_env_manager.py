from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rose.errors import ConfigError
from rose_roll.env_manager import RoseEnvManager, trajectory_spans


def turn(prompt: int, response: int, *spans: tuple[int, int, str], resumed: int = 0) -> dict[str, Any]:
    noted = [{"start": start, "end": end, "version": version, "step": None} for start, end, version in spans]
    return {
        "prompt_ids": [9] * prompt,
        "response_ids": [8] * response,
        "rose": {"spans": noted, "num_hops": 1, "num_resumed_tokens": resumed},
    }


def test_spans_are_in_positions_of_the_trajectory() -> None:
    spans, metrics = trajectory_spans(
        [turn(3, 2, (0, 2, "r:0")), turn(4, 5, (0, 1, "r:0"), (1, 5, "r:1"), resumed=1), {"observation": "last"}]
    )
    assert [(one["start"], one["end"], one["version"]) for one in spans] == [
        (3, 5, "r:0"),
        (9, 10, "r:0"),
        (10, 14, "r:1"),
    ]
    assert metrics == {"rose/num_versions": 2.0, "rose/num_hops": 2.0, "rose/num_resumed_tokens": 1.0}


class Base:
    """A manager of trajectories that plays one turn."""

    num_rows = 1

    def __init__(self, pipeline_config: Any) -> None:
        self.mode, self.episode_id, self.group_seed = "train", 2, 7
        self.rollout_cache = SimpleNamespace(tag="FL", group_id=1, env_id=4, history=[{}])

    def make_decision(self, cache: Any) -> Any:
        cache.history[-1].update(prompt_ids=[1, 2], response_ids=[3])
        spans = [{"start": 0, "end": 1, "version": "r:5", "step": 3}]
        return SimpleNamespace(meta_info={"rose": {"spans": spans, "num_hops": 1, "num_resumed_tokens": 0}})

    def formulate_rollouts(self, cache: Any) -> Any:
        del cache
        batch = SimpleNamespace(batch_size=[self.num_rows])
        return SimpleNamespace(batch=batch, non_tensor_batch={}, meta_info={"metrics": {"env": 1.0}})


class Manager(RoseEnvManager, Base):
    pass


def test_versions_are_in_what_is_trained_on() -> None:
    manager = Manager(pipeline_config=SimpleNamespace())
    output = manager.make_decision(manager.rollout_cache)
    assert "rose" not in output.meta_info
    rollout = manager.formulate_rollouts(manager.rollout_cache)
    assert rollout.non_tensor_batch["rose_versions"][0] == ("r:5", "r:5")
    assert rollout.non_tensor_batch["rose_spans"][0] == [{"start": 2, "end": 3, "version": "r:5", "step": 3}]
    assert rollout.meta_info["metrics"]["env"] == 1.0
    assert rollout.meta_info["metrics"]["rose/num_hops"] == 1.0


def test_a_trajectorys_name_says_who_it_is() -> None:
    name = Manager(pipeline_config=SimpleNamespace())._name()
    assert name.trajectory_id == "train/FL_1_2_7_4"
    assert name.group_id == "train/FL_1_2_7"


def test_managers_of_single_steps_are_refused() -> None:
    manager = Manager(pipeline_config=SimpleNamespace())
    manager.num_rows = 3
    with pytest.raises(ConfigError, match="makes 3 rows of a trajectory"):
        manager.formulate_rollouts(manager.rollout_cache)


def test_the_pools_place_comes_with_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_POOL", "http://of-another-job:1")
    import os

    Manager(pipeline_config=SimpleNamespace(system_envs={"ROSE_POOL": "http://a:1", "OTHER": "x"}))
    assert os.environ.pop("ROSE_POOL") == "http://a:1"
    assert "OTHER" not in os.environ
