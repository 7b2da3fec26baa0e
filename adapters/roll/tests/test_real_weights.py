"""ROLL's own FSDP2 cluster over gloo: what lies in the pool's store afterwards is what its ranks hold, whichever way it went."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rose.transfer.export import export_version

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    import ray
    from real_tools import make_policy, start_ray

    path = make_policy(tmp_path_factory.mktemp("policy"))
    start_ray()
    yield path
    ray.shutdown()


@pytest.mark.parametrize(
    ("num_ranks", "num_fronts"),
    [(2, 0), (1, 2)],
    ids=["shards of two ranks", "one rank's broadcast to two fronts"],
)
def test_what_is_published_is_what_the_ranks_hold(
    make_site: Any, model: Path, tmp_path: Path, num_ranks: int, num_fronts: int
) -> None:
    from real_weights import Learner
    from safetensors.torch import load_file

    site = make_site()
    learner = Learner(site.url, model, num_ranks=num_ranks, num_fronts=num_fronts)
    seen = []
    for step in range(3):
        metrics = learner.update()
        if not num_fronts:
            assert metrics["rose/version"] == step
        version = site.call(lambda: site.pool.version)
        assert version.n == step, "the pool's engines are there when ROLL goes on"
        folder = tmp_path / str(step)
        export_version(site.store, folder, version=version)
        stored: dict[str, torch.Tensor] = {}
        for file in folder.glob("*.safetensors"):
            stored |= load_file(file)
        held = learner.weights()
        assert stored.keys() == held.keys()
        for name, tensor in held.items():
            assert torch.equal(stored[name].view(torch.int32), tensor.view(torch.int32)), name
        seen.append(stored["model.norm.weight"])
        learner.change()
    assert not torch.equal(seen[0], seen[1])
    learner.close()
