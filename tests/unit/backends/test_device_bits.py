"""A rank whose base stays on the device publishes the blobs of one that keeps it on the host; here the device is the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose.errors import ConfigError, CorruptUpdateError, TrainerError
from rose.interfaces.trainer import ShardSpec, TensorSpec
from rose.transfer import kernels
from rose.transfer.delta import Codec
from rose.transfer.encoder import RankEncoder
from rose.transfer.kernels import Rows
from rose.transfer.layout import TargetLayout, bits_dtype, whole_box
from rose.transfer.parts import Share
from rose.transfer.plan import plan_source
from rose.transfer.resident import Part, ResidentBase, SupportsResidentBase
from rose.transfer.source_views import HeldBits, HeldTensor, View, held_tensors

torch = pytest.importorskip("torch")

from rose.backends.device_codec import DeviceBase, DeviceBits, DeviceComparer, DeviceHeldBits
from rose.backends.device_codec import pinned as copies
from rose.backends.device_codec.torch_way import TorchWay
from rose.backends.fsdp.shard_bits import CastBits, held_bits, shard_bits

CPU = torch.device("cpu")
SHAPES = {"w": (64, 48), "t": (40, 30), "e": (6, 8, 5), "v": (1000,), "s": (), "none": (0, 4)}
Shards = Callable[[Mapping[str, Any], Any], Mapping[str, Any]]


def make_weights(dtype: Any, *, seed: int = 0) -> dict[str, Any]:
    """Live tensors of every shape and of unlike strides: transposed, every second row, a scalar, an empty one."""
    generator = torch.Generator().manual_seed(seed)

    def filled(*shape: int) -> Any:
        if dtype == torch.int8:
            return torch.randint(-128, 128, shape, dtype=dtype, generator=generator)
        return torch.randn(shape, generator=generator).to(dtype)

    return {
        "w": filled(64, 48),
        "t": filled(30, 40).T,
        "e": filled(12, 8, 5)[::2],
        "v": filled(1000),
        "s": filled(1).reshape(()),
        "none": filled(0, 4),
    }


def step(weights: Mapping[str, Any], *, seed: int, fraction: float) -> None:
    """Move some elements by one pattern, and set a few to what compares equal, or to nothing, as numbers."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in weights.values():
        if not tensor.numel():
            continue
        signed = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])
        signed += (torch.rand(signed.shape, generator=generator) < fraction).to(signed.dtype)
        if tensor.is_floating_point() and tensor.dim() == 1 and tensor.element_size() > 1:
            tensor[5] = -tensor[5] if tensor[5] == 0 else 0.0
            signed[7] = signed[7] | (0x7FC0 if signed.element_size() == 2 else 0x7FC00000)  # a NaN of some payload


class Rank:
    """An encoder over live tensors."""

    def __init__(self, dtype: Any, shards: Shards, **options: Any) -> None:
        self.dtype, self.shards = dtype, shards
        name = str(dtype).removeprefix("torch.")
        specs = {n: TensorSpec(name=n, shape=shape, dtype=name) for n, shape in SHAPES.items()}
        layout = {n: whole_box(spec.shape) for n, spec in specs.items()}
        targets = TargetLayout.tensor_parallel(
            "tp2", list(specs.values()), num_ranks=2, split_dims={"w": 1, "t": 0, "v": 0, "e": 1}
        )
        cells = plan_source(0, layout, (targets,), {}, tensors=specs, max_cell_elements=500)
        self.encoder = RankEncoder(specs, layout, cells, num_threads=2, **options)
        self.blobs: dict[str, bytes] = {}

    def encode(self, weights: Mapping[str, Any], prefix: str, *, is_full: bool = False) -> Share:
        shards = self.shards(weights, self.dtype)
        return self.encoder.encode(
            shards, lambda key, data: self.blobs.update({key: bytes(data)}), prefix, is_full=is_full, on_key=id
        )

    def commit(self, weights: Mapping[str, Any]) -> None:
        self.encoder.commit(self.shards(weights, self.dtype))


def on_host(weights: Mapping[str, Any], dtype: Any) -> Mapping[str, Any]:
    return {name: shard_bits(tensor, dtype) for name, tensor in weights.items()}


def on_device(weights: Mapping[str, Any], dtype: Any, **options: Any) -> Mapping[str, Any]:
    comparer = DeviceComparer(CPU, make_way=lambda keys: TorchWay(keys, max_elements=3000, max_changes=200))
    return {name: DeviceBits(tensor, dtype, comparer=comparer, **options) for name, tensor in weights.items()}


def pinned(weights: Mapping[str, Any], dtype: Any) -> Mapping[str, Any]:
    return on_device(weights, dtype, base_in="pinned")


def mixed(weights: Mapping[str, Any], dtype: Any) -> Mapping[str, Any]:
    """Some shards on the device, some of another comparer, some on the host."""
    first, second, host = on_device(weights, dtype), on_device(weights, dtype), on_host(weights, dtype)
    return {**host, "w": first["w"], "s": first["s"], "v": second["v"], "none": first["none"]}


def published(rank: Rank, weights: Mapping[str, Any]) -> list[Any]:
    """Publish a row of versions of unlike density, an anchor among them; return everything that is written."""
    written = []
    for n, fraction in enumerate([0.0, 0.01, 0.3, 1.0, 0.0, 0.02]):
        step(weights, seed=n, fraction=fraction)
        share = rank.encode(weights, f"p{n}")
        written.append([array.tolist() for array in share.columns.arrays().values()])
        if n == 3:
            written.append(rank.encode(weights, "anchor", is_full=True).columns.sums.tolist())
        rank.commit(weights)
    rank.encoder.audit()
    return [*written, rank.blobs]


@pytest.mark.parametrize("shards", [on_device, pinned, mixed])
@pytest.mark.parametrize("is_overwrite", [False, True])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float8_e4m3fn", "int8"])
def test_blobs_are_those_of_the_host(shards: Shards, dtype: str, is_overwrite: bool) -> None:  # noqa: FBT001
    wire = getattr(torch, dtype)
    written = [published(Rank(wire, how, is_overwrite=is_overwrite), make_weights(wire)) for how in (on_host, shards)]
    assert written[0] == written[1]
    assert len(written[0][-1]) > 6


def test_masters_are_cast_on_the_device() -> None:
    """Float32 masters that travel as bfloat16."""
    written = [published(Rank(torch.bfloat16, how), make_weights(torch.float32)) for how in (on_host, on_device)]
    assert written[0] == written[1]


def test_a_shard_may_come_from_the_host_or_the_device_from_version_to_version() -> None:
    weights, also = make_weights(torch.bfloat16), make_weights(torch.bfloat16)
    expected, rank = Rank(torch.bfloat16, on_host), Rank(torch.bfloat16, on_device)
    for n, how in enumerate([on_device, on_host, on_device, on_host]):
        rank.shards = how
        for one, tensors in ((expected, weights), (rank, also)):
            step(tensors, seed=n, fraction=0.05)
            one.encode(tensors, f"p{n}")
            one.commit(tensors)
    assert rank.blobs == expected.blobs
    rank.encoder.audit()


def test_the_base_is_where_the_weights_are_and_the_encoder_keeps_none() -> None:
    weights, rank = make_weights(torch.bfloat16), Rank(torch.bfloat16, on_device)
    rank.encode(weights, "p")
    rank.commit(weights)
    bases = rank.encoder._last
    assert bases is not None
    assert {name for name, base in bases.items() if isinstance(base, ResidentBase)} == set(SHAPES) - {"none"}
    step(weights, seed=1, fraction=0.05)
    rank.encode(weights, "q")
    assert not rank.encoder._held


def test_an_attempt_that_failed_leaves_the_base() -> None:
    weights, rank = make_weights(torch.bfloat16), Rank(torch.bfloat16, on_device)
    rank.encode(weights, "p")
    rank.commit(weights)
    step(weights, seed=1, fraction=0.05)
    first = rank.encode(weights, "q").columns.num_changed.tolist()
    assert rank.encode(weights, "r").columns.num_changed.tolist() == first
    assert sum(first) > 0


def test_an_audit_finds_a_damaged_base_and_forgets_it() -> None:
    weights, rank = make_weights(torch.bfloat16), Rank(torch.bfloat16, on_device)
    rank.encode(weights, "p")
    rank.commit(weights)
    assert rank.encoder._last is not None
    base: Any = rank.encoder._last["t"]
    base._held[3, 3] += 1
    with pytest.raises(CorruptUpdateError, match="the kept bits of t are damaged"):
        rank.encoder.audit()
    assert not rank.encoder.has_base
    assert set(rank.encode(weights, "q").columns.codec.tolist()) == {Codec.DENSE}


def test_a_slice_is_the_same_as_of_a_cast_shard() -> None:
    tensor = make_weights(torch.float32)["e"]
    mine, plain = on_device({"e": tensor}, torch.bfloat16)["e"], CastBits(tensor, torch.bfloat16)
    index = (slice(1, 4), slice(0, 8), slice(2, 5))
    np.testing.assert_array_equal(mine[index], plain[index])
    np.testing.assert_array_equal(np.asarray(mine), np.asarray(plain))
    assert (mine.shape, mine.dtype) == (plain.shape, plain.dtype) == ((6, 8, 5), bits_dtype("bfloat16"))
    assert isinstance(mine, SupportsResidentBase)
    assert not isinstance(plain, SupportsResidentBase)


def test_a_tensor_of_this_machine_stays_with_the_cpu_kernels() -> None:
    tensor = make_weights(torch.float32)["w"]
    assert isinstance(shard_bits(tensor, torch.float32), np.ndarray)
    assert type(shard_bits(tensor, torch.bfloat16)) is CastBits


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="'device' or 'pinned', not 'disk'"):
        DeviceBits(torch.zeros(2), torch.bfloat16, base_in="disk")
    host: Any = np.zeros(4, dtype=np.uint16)
    comparer = DeviceComparer(CPU)
    with pytest.raises(TrainerError, match="ndarray and ndarray do not lie on one device"):
        list(comparer.compare([Part(shard=host, base=host, index=(slice(0, 4),), rows=None)], is_overwrite=False))  # type: ignore[arg-type]


def test_no_room_on_the_device_pins_the_base(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def full(*args: Any, **options: Any) -> Any:
        raise torch.OutOfMemoryError

    shard = on_device(make_weights(torch.bfloat16), torch.bfloat16)["w"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", full)
        patch.setattr(
            "rose.backends.device_codec.bits.empty_pinned", lambda shape, dtype, _: torch.zeros(shape, dtype=dtype)
        )
        base = shard.new_base()
    assert "no room on cpu for 6144 bytes" in caplog.text
    index = (slice(0, 64), slice(0, 48))
    base.take(shard, index)
    np.testing.assert_array_equal(base[index], shard[index])


def held_case() -> tuple[HeldTensor, dict[str, Any]]:
    """A tensor that lies in pieces of two fused parameters, one of which has a dimension more, as (q, k, v) by group."""
    views = [
        View(name="q", shape=(8, 6), part=box((0, 0), (3, 6)), parameter="a", box=box((1, 0), (3, 6))),
        View(name="q", shape=(8, 6), part=box((3, 0), (5, 6)), parameter="b", box=box((1, 0, 2), (1, 5, 6))),
    ]
    boxes = {"a": box((0, 0), (9, 6)), "b": box((0, 0, 0), (2, 5, 8))}
    generator = torch.Generator().manual_seed(5)
    parameters = {name: torch.randn(one.shape, generator=generator) for name, one in boxes.items()}
    return held_tensors(views, boxes)["q"], parameters


def box(offset: tuple[int, ...], shape: tuple[int, ...]) -> ShardSpec:
    return ShardSpec(offset=offset, shape=shape)


def test_a_tensor_in_pieces_is_put_together_on_the_device() -> None:
    held, parameters = held_case()
    sources = on_device(parameters, torch.bfloat16)
    mine, plain = held_bits(held, sources), held_bits(held, on_host(parameters, torch.bfloat16))
    assert (type(mine), type(plain)) == (DeviceHeldBits, HeldBits)
    assert isinstance(mine, SupportsResidentBase)
    assert mine.comparer is not None
    for index in [(slice(0, 8), slice(0, 6)), (slice(1, 3), slice(2, 6)), (slice(2, 7), slice(0, 5))]:
        np.testing.assert_array_equal(mine[index], plain[index])
    assert type(held_bits(held, {"a": sources["a"], "b": on_host(parameters, torch.bfloat16)["b"]})) is HeldBits


def test_what_changes_in_one_piece_is_found() -> None:
    held, parameters = held_case()
    whole = (slice(0, 8), slice(0, 6))
    mine = held_bits(held, on_device(parameters, torch.float32))
    assert isinstance(mine, SupportsResidentBase)
    base = mine.new_base()
    base.take(mine, whole)
    parameters["b"][1, 4, 7] += 1
    (found,) = mine.comparer.compare(
        [Part(shard=mine, base=base, index=whole, rows=Rows(num_rows=8, row_len=6, start=0, stride=6))],
        is_overwrite=False,
    )
    assert found.num_changed == 1
    assert found.streams is not None
    positions, _ = kernels.load().decode(found.streams, num_elements=48, dtype=np.dtype("<u4"), is_overwrite=False)
    assert positions.tolist() == [47]


def test_a_commit_ends_when_everything_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """From then on the trainer may change its weights."""
    calls: list[str] = []
    take = DeviceBase.take

    def noting(self: Any, *args: Any) -> None:
        calls.append("take")
        take(self, *args)

    monkeypatch.setattr(DeviceBase, "take", noting)
    monkeypatch.setattr(DeviceBase, "settle", lambda self: calls.append("settle"))
    weights, rank = make_weights(torch.bfloat16), Rank(torch.bfloat16, on_device)
    rank.encode(weights, "p")
    assert not calls
    rank.commit(weights)
    assert calls.count("take") > 5
    assert calls[-5:] == ["settle"] * 5
    assert "settle" not in calls[:-5]


def test_a_shard_waits_for_its_trainer_and_work_is_on_its_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that publishes has another current GPU, and another stream, than the one that trains."""
    log: list[Any] = []

    class Current:
        def __init__(self, device: Any) -> None:
            self.device = device

        def __enter__(self) -> None:
            log.append(("enter", self.device))

        def __exit__(self, *error: object) -> None:
            log.append(("exit", self.device))

    monkeypatch.setattr("rose.backends.device_codec.pinned.is_async", lambda device: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: log.append(("wait", device)))
    monkeypatch.setattr(torch.cuda, "device", Current)
    DeviceBits(torch.zeros(3), torch.bfloat16)
    assert log == [("wait", CPU)]
    comparer = DeviceComparer(CPU, make_way=lambda keys: Noting(log))
    log.clear()
    part: Any = Part(shard=FakeSide(), base=FakeSide(), index=(), rows=Rows(num_rows=1, row_len=1, start=0, stride=1))  # type: ignore[arg-type]
    assert list(comparer.compare([part], is_overwrite=False)) == []
    assert log == [("enter", CPU), "compare", ("exit", CPU)]


class FakeSide:
    def live(self, index: Any) -> Any:
        return torch.zeros(1)

    def resident(self, index: Any) -> Any:
        return torch.zeros(1)


class Noting:
    max_elements = 100

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def compare(self, pairs: Any, *, is_overwrite: bool) -> list[Any]:
        self.log.append("compare")
        return []


@pytest.mark.parametrize(("most", "expected"), [(7, []), (8, [(2, 2)])])
def test_only_small_copies_are_pinned(most: int, expected: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch keeps what was pinned once, rounded up: an embedding's gigabyte as two, for each thread that reads one."""
    pinned_shapes: list[Any] = []

    def empty_pinned(shape: tuple[int, ...], dtype: Any, device: Any) -> Any:
        pinned_shapes.append(shape)
        return torch.empty(shape, dtype=dtype)

    monkeypatch.setattr(copies, "is_async", lambda device: True)
    monkeypatch.setattr(copies, "empty_pinned", empty_pinned)
    monkeypatch.setattr(copies, "MAX_PINNED_BYTES", most)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: SimpleNamespace(synchronize=lambda: pinned_shapes.append("waited"))
    )
    source = torch.arange(8, dtype=torch.int16).view(2, 4)[:, ::2]
    found = copies.to_host(source)
    assert found.is_contiguous()
    assert found.tolist() == [[0, 2], [4, 6]]
    assert pinned_shapes == [*expected, "waited"][: 2 * len(expected)]


def test_a_default_device_of_the_trainer_s_is_not_that_of_host_memory() -> None:
    """Frameworks set ``torch.set_default_device("cuda")``, where nothing can be pinned."""
    weights, versions = make_weights(torch.bfloat16), []
    masters = make_weights(torch.float32)
    for how in (on_device, pinned, on_host):
        with torch.device("meta"):
            rank = Rank(torch.bfloat16, how)
            rank.encode(weights, "p")
            rank.commit(weights)
            rank.encode(weights, "q")
            assert all(np.asarray(one).dtype == np.uint16 for one in on_host(masters, torch.bfloat16).values())
        versions.append(rank.blobs)
    assert versions[0] == versions[1] == versions[2]


def test_a_device_that_is_nearly_full_compares_less_at_a_time() -> None:
    """A trainer's memory is not this library's; half a gigabyte that is not there shall not end its job."""
    sizes: list[int] = []

    class Tight(TorchWay):
        room = 3

        def compare(self, pairs: Any, *, is_overwrite: bool) -> Any:
            sizes.append(len(pairs))
            if len(pairs) > self.room:
                raise torch.OutOfMemoryError
            return super().compare(pairs, is_overwrite=is_overwrite)

    way = Tight(DeviceComparer(CPU).keys, max_elements=1 << 20)
    comparer = DeviceComparer(CPU, make_way=lambda keys: way)

    def tight(weights: Mapping[str, Any], dtype: Any) -> Mapping[str, Any]:
        return {name: DeviceBits(tensor, dtype, comparer=comparer) for name, tensor in weights.items()}

    written = [published(Rank(torch.bfloat16, how), make_weights(torch.bfloat16)) for how in (on_host, tight)]
    assert written[0] == written[1]
    assert sizes[0] > 3
    assert way.max_elements < 1 << 20
    way.room = 0
    with pytest.raises(torch.OutOfMemoryError):
        published(Rank(torch.bfloat16, tight), make_weights(torch.bfloat16))
