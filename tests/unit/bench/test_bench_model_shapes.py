from __future__ import annotations

from math import prod
from pathlib import Path

import attrs
import pytest

from rose.bench.model_shapes import NAMED, fit, layer_of, load_shapes, only_tensors, sample
from rose.errors import ConfigError
from rose.interfaces.trainer import TensorSpec
from rose.transfer.engine_tables import load_model_table

TABLES = Path(__file__).parents[4] / "shared" / "models"


@pytest.mark.parametrize("name", NAMED)
def test_named_models_are_the_published_ones(name):
    path = next((one for one in (TABLES / f"{name}.json", TABLES / f"{name}.json.gz") if one.exists()), None)
    if path is None:
        pytest.skip(f"there is no table of {name} under {TABLES}")
    table = load_model_table(path)
    ours = {spec.name: spec for spec in load_shapes(name).tensors}
    tied = set(table.aliases)
    assert ours == {spec.name: spec for spec in table.tensors if spec.name not in tied}


def test_whole_layers_are_sampled_evenly():
    found = sample(load_shapes("Qwen3-8B"), fraction=0.1, max_bytes=1)
    assert found.layers == (6, 18, 30)
    assert {layer_of(spec.name) for spec in found.tensors} == {6, 18, 30}
    assert found.sampled_fraction == pytest.approx(3 * 192_954_624 / 8_190_735_360, rel=1e-3)


def test_a_sample_fits():
    whole = load_shapes("Qwen3-8B")
    found = sample(whole, fraction=None, max_bytes=1_000_000_000)
    assert 500_000_000 < found.num_bytes <= 1_000_000_000
    assert sample(whole, fraction=1.0, max_bytes=1) is whole
    assert sample(whole, fraction=None, max_bytes=whole.num_bytes) is whole


def test_a_layer_that_does_not_fit_is_sampled_by_tensors():
    whole = load_shapes("Qwen3-30B-A3B")
    found = sample(whole, fraction=None, max_bytes=200_000_000)
    assert found.layers == (24,)
    assert found.num_bytes == pytest.approx(200_000_000, rel=0.05)
    assert any(".experts.127." in spec.name or ".experts.126." in spec.name for spec in found.tensors)


def test_scales_go_with_their_weights():
    names = [f"model.layers.0.x{i}.weight" for i in range(8)]
    tensors = [TensorSpec(name=name, shape=(128, 128), dtype="float8_e4m3fn") for name in names]
    scales = [TensorSpec(name=f"{name}_scale_inv", shape=(1, 1), dtype="float32") for name in names]
    shapes = attrs.evolve(load_shapes("Qwen3-0.6B"), tensors=(*tensors, *scales))
    found = {spec.name for spec in fit(shapes, shapes.num_bytes // 2).tensors}
    chosen = {name for name in found if not name.endswith("_scale_inv")}
    assert len(chosen) == 4
    assert found - chosen == {f"{name}_scale_inv" for name in chosen}


def test_one_tensor_is_always_taken():
    shapes = load_shapes("Qwen3-0.6B")
    (only,) = fit(shapes, 1).tensors
    assert prod(only.shape) == 128
    assert only_tensors(shapes, [only.name]).tensors == (only,)


def test_an_unknown_model_is_refused_with_the_known_ones(tmp_path):
    with pytest.raises(ConfigError, match=r"--model 'Qwen9' is no file and no known model; known: Qwen2\.5-0\.5B"):
        load_shapes("Qwen9")
