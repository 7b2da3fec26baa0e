from __future__ import annotations

import numpy as np
import pytest

from rose.bench import weights
from rose.errors import ConfigError
from rose.interfaces.trainer import TensorSpec


def tensor(name="model.layers.0.mlp.up_proj.weight", shape=(256, 1024), dtype="bfloat16"):
    return TensorSpec(name=name, shape=shape, dtype=dtype)


@pytest.mark.parametrize("fraction", [0.002, 0.01, 0.1])
def test_the_learning_rate_that_is_found_gives_the_asked_share(fraction):
    tensors = [tensor(shape=(1024, 1024)), tensor("model.norm.weight", (1024,))]
    drawn = weights.draw(tensors, lr=weights.find_lr(tensors, fraction, seed=3), seed=4)
    assert drawn.changed_fraction == pytest.approx(fraction, rel=0.15)


def test_changes_are_as_in_the_field():
    """About 2 % change at 1e-6 and 12 % at 1e-5, most by one unit in the last place (docs/transfer-bench.md)."""
    tensors = [tensor(shape=(256, 4096))]
    shares = {lr: weights.draw(tensors, lr=lr, seed=0) for lr in (1e-6, 1e-5)}
    assert 0.01 < shares[1e-6].changed_fraction < 0.04
    assert 0.08 < shares[1e-5].changed_fraction < 0.2
    assert 0.83 < shares[1e-6].one_ulp_share < 0.92
    assert shares[1e-5].one_ulp_share < shares[1e-6].one_ulp_share


def test_norms_hardly_change():
    drawn = weights.draw([tensor("model.norm.weight", (4096,))], lr=1e-6, seed=0)
    assert drawn.changed_fraction < 0.001
    assert np.all(drawn.old["model.norm.weight"] >> 7 >= 0x7E)  # bf16 exponents of values near 1


def test_a_tensor_has_the_same_bits_in_every_sample():
    both = weights.draw([tensor(), tensor("other.weight")], lr=1e-6, seed=7)
    alone = weights.draw([tensor("other.weight")], lr=1e-6, seed=7)
    assert np.array_equal(both.new["other.weight"], alone.new["other.weight"])
    assert not np.array_equal(both.new["other.weight"], both.new[tensor().name])
    assert not np.array_equal(weights.draw([tensor()], lr=1e-6, seed=8).old[tensor().name], both.old[tensor().name])


def test_the_counts_are_those_of_the_bits():
    drawn = weights.draw([tensor(), tensor("scale", (), "float32")], lr=1e-5, seed=0)
    moved = [drawn.new[name].astype(np.int64) - drawn.old[name] for name in drawn.new]
    assert drawn.num_changed == sum(int(np.count_nonzero(each)) for each in moved)
    assert drawn.num_one_ulp == sum(int(np.count_nonzero(np.abs(each) == 1)) for each in moved)
    assert drawn.num_elements == 256 * 1024 + 1


def test_bfloat16_is_rounded_to_nearest_ties_to_even():
    values = np.array([1.0, 1.0 + 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 + 2**-20, -0.0], dtype=np.float32)
    assert [hex(bits) for bits in weights._round(values, "bfloat16")] == [
        "0x3f80",
        "0x3f80",
        "0x3f82",
        "0x3f81",
        "0x8000",
    ]


def test_fp8_is_rounded_to_the_nearest_of_all_its_values():
    def value(code):
        exponent, mantissa = code >> 3, code & 7
        return mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)

    master = np.random.default_rng(0).standard_normal(2000, dtype=np.float32)
    codes = weights._round(master, "float8_e4m3fn")
    table = np.array([value(code) for code in range(0x7F)])
    scaled = np.minimum(np.abs(master) * (448 / 4 / master.std()), 448)
    nearest = np.abs(scaled[:, None] - table).min(axis=1)
    assert np.allclose(np.abs(scaled - table[codes & 0x7F]), nearest, atol=1e-5)
    assert np.array_equal(codes >> 7, np.signbit(master))


def test_other_dtypes_are_refused():
    with pytest.raises(ConfigError, match=r"'int4' cannot be drawn; allowed: float32"):
        weights._round(np.zeros(1, dtype=np.float32), "int4")


def test_a_share_that_no_step_gives_is_refused():
    with pytest.raises(ConfigError, match=r"no learning rate from 1e-09 to 0\.01"):
        weights.find_lr([tensor()], 0.9999, seed=0)
