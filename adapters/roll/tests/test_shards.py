"""Train workers over doubles of ROLL's; the real ones are in test_real_weights.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import worker_config

from rose.errors import ConfigError
from rose.frameworks import PushReport
from rose.types import EngineId, WeightVersion
from rose_roll import RoseAgenticTrainWorker
from rose_roll.shards import is_front, push_metrics

pytestmark = pytest.mark.doubles


def make_worker(model: torch.nn.Module, **config: Any) -> RoseAgenticTrainWorker:
    strategy_args = SimpleNamespace(strategy_name="fsdp2_train", strategy_config={})
    worker = RoseAgenticTrainWorker(worker_config(**{"strategy_args": strategy_args, "worker_cls": None} | config))
    worker.strategy = SimpleNamespace(unwrap_model=lambda: model)
    return worker


@pytest.fixture
def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))


@pytest.fixture
def fronts(make_site: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    site = make_site()
    monkeypatch.setenv("ROSE_POOL", site.url)
    monkeypatch.setattr("rose_roll.shards.launch_name", lambda worker, purpose: "toy-1")
    return SimpleNamespace(worker_config=worker_config(), site=site)


def test_a_model_update_is_a_version_of_the_pool(fronts: Any, model: torch.nn.Module) -> None:
    worker = make_worker(model)
    worker.setup_model_update(infer_cluster=fronts, model_update_name="a_2_b")
    for step in range(3):
        metrics = worker.start_model_update(model_update_name="a_2_b").meta_info["metrics"]
        assert metrics["rose/version"] == step
        assert metrics["rose/num_engines_failed"] == 0
        assert str(fronts.site.call(lambda: fronts.site.pool.version)) == f"toy-1:{step}"
        with torch.no_grad():
            model[0].weight += 1


def test_parameters_that_were_replaced_are_found(fronts: Any, model: torch.nn.Module) -> None:
    """Offloading puts new parameters into the model; what is published must be those."""
    from rose_roll.shards import FsdpShards

    shards = FsdpShards(model, "float32")
    model[0].weight = torch.nn.Parameter(torch.full((3, 4), 7.0))
    bits = shards.shards()["0.weight"][0:3, 0:4]
    assert (bits.view("float32") == 7.0).all()


def test_rolls_own_engines_are_updated_as_well(fronts: Any, model: torch.nn.Module, monkeypatch: Any) -> None:
    from roll.distributed.scheduler.protocol import DataProto
    from roll.pipeline.agentic.agentic_actor_worker import ActorWorker

    seen: list[str] = []
    monkeypatch.setattr(
        ActorWorker,
        "setup_model_update",
        lambda self, infer_cluster, model_update_name: seen.append(model_update_name),
        raising=False,
    )
    monkeypatch.setattr(
        ActorWorker,
        "start_model_update",
        lambda self, model_update_name: DataProto(meta_info={"metrics": {"own": 1.0}}),
        raising=False,
    )
    worker = make_worker(model)
    own = SimpleNamespace(worker_config=worker_config(worker_cls="roll.pipeline.base_worker.InferWorker"))
    worker.setup_model_update(infer_cluster=own, model_update_name="a_2_b")
    assert seen == ["a_2_b"]
    metrics = worker.start_model_update(model_update_name="a_2_b").meta_info["metrics"]
    assert metrics["own"] == 1.0
    assert metrics["rose/version"] == 0


def test_metrics_survive_rolls_mean_over_the_ranks() -> None:
    """ROLL asks every rank for the first rank's names."""
    version, error = WeightVersion("r", 3), RuntimeError("full")
    sync = SimpleNamespace(errors={EngineId("e1"): error, EngineId("e2"): error})
    zero = PushReport(publish=SimpleNamespace(version=version), sync=sync)  # type: ignore[arg-type]
    others = [PushReport(publish=SimpleNamespace(version=version)) for _ in range(3)]  # type: ignore[arg-type]
    ranks = [push_metrics(report, seconds=1.0, num_ranks=4) for report in (zero, *others)]
    means = {name: sum(one[name] for one in ranks) / 4 for name in ranks[0]}
    assert means["rose/num_engines_failed"] == 2
    assert means["rose/version"] == 3


def test_a_front_is_told_from_an_engine_of_rolls() -> None:
    assert is_front(worker_config())
    assert is_front(worker_config(worker_cls="rose_roll.infer_worker.RoseFront"))
    assert not is_front(worker_config(worker_cls="roll.pipeline.base_worker.InferWorker"))


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_args": SimpleNamespace(lora_target="all", dtype=None)}, "lora_target"),
        ({"strategy_args": SimpleNamespace(strategy_name="hf_infer")}, "strategy_name: hf_infer"),
    ],
)
def test_what_cannot_be_published_is_refused(
    fronts: Any, model: torch.nn.Module, config: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        make_worker(model, **config).setup_model_update(infer_cluster=fronts, model_update_name="a_2_b")


def test_stacked_experts_are_refused_by_their_name(fronts: Any) -> None:
    stacked = torch.nn.Module()
    stacked.mlp = torch.nn.Module()
    stacked.mlp.experts = torch.nn.Module()
    stacked.mlp.experts.gate_up_proj = torch.nn.Parameter(torch.zeros(2, 3, 4))
    with pytest.raises(ConfigError, match="gate_up_proj holds the tensors of all experts"):
        make_worker(stacked).setup_model_update(infer_cluster=fronts, model_update_name="a_2_b")
