"""From trainer arrays to engine arrays, bit for bit, for every dtype, shape and stride, through the real publisher and subscriber."""

from __future__ import annotations

import numpy as np
import pytest
from transfer_rig import ArrayTrainer

from rose.backends.memory import MemoryTransport
from rose.errors import BackendUnavailableError
from rose.transfer import kernels
from rose.transfer.delta import Codec
from rose.transfer.layout import bits_dtype
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import plan_update, read_manifest
from rose.transfer.subscriber import ArraySink, Subscriber


class Line:
    """One trainer, one engine."""

    def __init__(
        self, arrays: dict[str, np.ndarray], dtype: str | dict[str, str] = "bfloat16", **options: object
    ) -> None:
        self.store = MemoryTransport()
        self.arrays = arrays
        trainer = ArrayTrainer(arrays, dtype=dtype)
        self.publisher = Publisher(trainer, self.store, run="run", **options)
        self.sink = ArraySink(trainer.tensors())
        self.engine = Subscriber(self.sink)

    def sync(self) -> PublishReport:
        """Publish, follow, and compare every bit."""
        report = self.publisher.publish_sync()
        update = plan_update(self.store, self.engine.version)
        assert update is not None
        self.engine.stage(update, self.store)
        assert self.engine.activate(verify=True).is_verified
        for name, bits in self.arrays.items():
            np.testing.assert_array_equal(self.sink.array(name), bits, err_msg=name, strict=True)
        return report

    def codecs(self, n: int) -> set[int]:
        return set(read_manifest(self.store, f"run/{n}/{n}/manifest").columns.codec.tolist())


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "float8_e4m3fn",
    "float8_e5m2",
    "bfloat16",
    "float16",
    "int16",
    "float32",
    "int32",
    "float64",
    "int64",
]


@pytest.fixture(params=["native", "numpy"], autouse=True)
def loops(request: pytest.FixtureRequest) -> object:
    try:
        kernels.load(request.param)
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    kernels.force(request.param)
    yield
    kernels.force(None)


@pytest.mark.parametrize("is_overwrite", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_travels(dtype: str, *, is_overwrite: bool) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, np.iinfo(bits_dtype(dtype)).max, (40, 50), dtype=bits_dtype(dtype), endpoint=True)
    line = Line({"w": bits}, dtype, is_overwrite=is_overwrite)
    line.sync()
    flat = bits.reshape(-1)
    for fraction in (0.0, 0.01, 0.2, 1.0):
        at = rng.random(flat.size) < fraction
        flat[at] ^= rng.integers(1, np.iinfo(bits.dtype).max, int(at.sum()), dtype=bits.dtype, endpoint=True)
        report = line.sync()
        assert report.num_changed == int(at.sum())
    assert line.codecs(1) == {Codec.NONE}
    assert line.codecs(2) == {Codec.OVERWRITE if is_overwrite else Codec.SPARSE}
    assert line.codecs(4) == {Codec.DENSE}


def test_a_quantized_layer_with_scales_and_buffers_travels_in_one_blob() -> None:
    """Bytes of one, two, four and eight lie after one another at any alignment."""
    rng = np.random.default_rng(1)
    dtypes = {
        "w": "float8_e4m3fn",
        "scale": "float32",
        "bias": "bfloat16",
        "experts": "int64",
        "flag": "bool",
        "s": "float32",
    }
    shapes = {"w": (33, 7), "scale": (5,), "bias": (7,), "experts": (3,), "flag": (3,), "s": ()}
    arrays = {n: rng.integers(0, 2, shapes[n], dtype=bits_dtype(d)) for n, d in dtypes.items()}
    arrays = {n: np.asarray(a) for n, a in arrays.items()}
    line = Line(arrays, dtypes)
    line.sync()
    assert len(read_manifest(line.store, "run/0/0/manifest").blobs) == 1
    for name in arrays:
        arrays[name].reshape(-1)[-1:] ^= 1
        assert line.sync().num_changed == 1


def test_w07_patterns_not_values_end_to_end() -> None:
    words = "7FC0 7FC0 7FC0 7F80 0000 8000 3F80 3F80", "7FC0 7FC1 FFC0 7F80 8000 0000 3F80 3F81"
    old, new = (np.array([int(w, 16) for w in text.split()], dtype=np.uint16) for text in words)
    line = Line({"w": old.copy()})
    line.sync()
    line.arrays["w"][...] = new
    assert line.sync().num_changed == 5
    assert line.sync().num_changed == 0, "a NaN that stays is no change"


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_w09_a_million_small_steps_leave_no_difference(*, is_overwrite: bool) -> None:
    rng = np.random.default_rng(0)
    masters = (rng.standard_normal(1 << 20) * 0.02).astype(np.float32)
    line = Line({"w": (masters.view(np.uint32) >> 16).astype(np.uint16)}, is_overwrite=is_overwrite)
    line.sync()
    for scale in (3e-6, 3e-4):
        masters += rng.standard_normal(1 << 20).astype(np.float32) * np.float32(scale)
        line.arrays["w"][...] = masters.view(np.uint32) >> 16
        assert line.sync().num_changed > 1000


def test_w10_shapes_at_the_edge() -> None:
    arrays = {
        "scalar": np.array(0x3FC0, dtype=np.uint16),
        "empty": np.zeros((0, 4), dtype=np.uint16),
        "empty_inside": np.zeros((3, 0, 2), dtype=np.uint16),
        "one": np.ones((1, 1, 1), dtype=np.uint16),
    }
    line = Line(arrays)
    assert line.sync().num_changed == 2
    assert line.sink.array("scalar").tobytes() == bytes.fromhex("c03f")
    assert line.sink.array("scalar").shape == ()
    arrays["scalar"][...] = 0xBFC0
    assert line.sync().num_changed == 1


def test_a_model_of_nothing_is_a_version_too() -> None:
    line = Line({"empty": np.zeros((0, 4), dtype=np.uint16)})
    assert line.sync().num_changed == 0
    assert line.sync().version.n == 1


def test_an_empty_tensor_may_have_more_dimensions_than_any_other() -> None:
    line = Line({"v": np.ones(3, dtype=np.uint16), "empty": np.zeros((2, 0, 4), dtype=np.uint16)})
    assert line.sync().num_changed == 3


def test_w11_strides_and_offsets_are_followed() -> None:
    """Transposed, sliced, every other element, backwards: what is read is what indexing gives."""
    grid, line_of_ten = np.arange(12, dtype=np.uint16).reshape(3, 4), np.arange(10, dtype=np.uint16)
    cube = np.arange(60, dtype=np.uint16).reshape(3, 4, 5)
    arrays = {
        "t": grid.T,
        "v": line_of_ten[3:7],
        "odd": np.arange(20, dtype=np.uint16)[1::2],
        "back": np.arange(20, dtype=np.uint16)[::-1],
        "swapped": cube.transpose(2, 0, 1),
        "inner": np.arange(24, dtype=np.uint16).reshape(4, 6)[:, 1:4],
        "wide": np.broadcast_to(np.uint16(5), (3, 4)),
    }
    line = Line(arrays)
    report = line.sync()
    assert line.sink.array("t").reshape(-1).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert line.sink.array("v").tolist() == [3, 4, 5, 6]
    assert report.bytes_dense == 2 * sum(bits.size for bits in arrays.values())
    grid[1, 2], line_of_ten[4], cube[2, 3, 4] = 100, 101, 102
    line_of_ten[0] = 99  # outside the slice
    assert line.sync().num_changed == 3


class StridedSink(ArraySink):
    """An engine that keeps a matrix transposed, so that its views have no contiguous rows."""

    def __init__(self, tensors: dict) -> None:
        super().__init__(tensors)
        self._arrays = {
            name: [(box, np.zeros(bits.shape[::-1], dtype=bits.dtype).T) for box, bits in held]
            for name, held in self._arrays.items()
        }


def test_an_engine_may_keep_its_own_strides() -> None:
    rng = np.random.default_rng(2)
    line = Line({"w": rng.integers(0, 99, (30, 50), dtype=np.uint16), "v": rng.integers(0, 99, 10, dtype=np.uint16)})
    line.sink = StridedSink(line.publisher._tensors)
    line.engine = Subscriber(line.sink)
    line.sync()
    assert not line.sink.array("w").flags.c_contiguous
    for n in range(3):
        line.arrays["w"][n, ::7] += 1
        line.arrays["v"][3] += 1
        line.sync()


@pytest.mark.parametrize("is_overwrite", [False, True])
def test_a_chain_mixes_forms(*, is_overwrite: bool) -> None:
    """Dense, sparse, dense again, then sparse over it, in one update from nothing and in one from version 1."""
    rng = np.random.default_rng(3)
    bits = rng.integers(0, 1 << 16, (64, 64), dtype=np.uint16)
    line = Line({"w": bits}, is_overwrite=is_overwrite)
    late, later = Subscriber(ArraySink(line.publisher._tensors)), Subscriber(ArraySink(line.publisher._tensors))
    line.sync()
    for n, fraction in enumerate((0.02, 1.0, 0.03, 0.03)):
        at = rng.random(bits.shape) < fraction
        bits[at] += rng.integers(1, 1 << 15, int(at.sum()), dtype=np.uint16)
        line.sync()
        if n == 0:
            later.stage(plan_update(line.store, None), line.store)
            later.activate(verify=True)
    for engine, known in ((late, None), (later, later.version)):
        update = plan_update(line.store, known)
        engine.stage(update, line.store)
        assert engine.activate(verify=True).is_verified
        np.testing.assert_array_equal(engine._sink.array("w"), bits)


def test_a_chain_that_changes_back_and_forth_ends_right() -> None:
    """The same element changes in every version of a chain, and back in the last."""
    bits = np.zeros(1000, dtype=np.uint16)
    line = Line({"w": bits})
    line.sync()
    behind = Subscriber(line.sink, version=line.engine.version)
    for values in ([5, 6], [7, 0], [0, 9]):
        bits[[10, 20]] = values
        line.publisher.publish_sync()
    behind.stage(plan_update(line.store, behind.version), line.store)
    assert behind.activate(verify=True).version.n == 3
    np.testing.assert_array_equal(line.sink.array("w"), bits)


def test_overwrites_need_no_right_base() -> None:
    """With patterns in place of differences, an engine whose changed element was wrong is right after the update."""
    bits = np.zeros(1000, dtype=np.uint16)
    line = Line({"w": bits}, is_overwrite=True)
    line.sync()
    bits[10] = 5
    line.publisher.publish_sync()
    update = plan_update(line.store, line.engine.version)
    line.engine.stage(update, line.store)
    line.sink.array("w")[10] = 77
    assert line.engine.activate(verify=True).is_verified
    np.testing.assert_array_equal(line.sink.array("w"), bits)
