"""Bits of torch tensors, and the trainer on unsharded models (several ranks: tests/integration)."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import nn

from rose.backends.fsdp import FsdpTrainer, bits_of
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardSpec
from rose.transfer import delta
from rose.transfer.layout import read_whole, rows_of, whole_box
from rose.transfer.source_views import View, stacked_experts_in


def test_strides_and_offsets_are_followed() -> None:
    """Case W11: a transpose and a slice arrive in their own order, and the slice sends 8 bytes."""
    transposed = torch.arange(12).view(3, 4).t()
    assert bits_of(transposed).reshape(-1).tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    part = torch.arange(10, dtype=torch.bfloat16)[3:7]
    encoded = delta.encode(bits_of(part)[None], None, rows_of(whole_box((4,)), (4,)))
    assert encoded.num_bytes == 8
    assert encoded.bits is not None
    back = torch.frombuffer(bytearray(encoded.bits.tobytes()), dtype=torch.bfloat16)
    assert back.tolist() == [3, 4, 5, 6]


def test_scalars_and_empty_tensors_keep_their_shape() -> None:
    """Case W10 (b) and (c)."""
    scalar = bits_of(torch.tensor(1.5, dtype=torch.bfloat16))
    assert (scalar.shape, scalar.tobytes()) == ((), bytes.fromhex("c03f"))
    assert bits_of(torch.empty(0, 4, dtype=torch.bfloat16)).shape == (0, 4)


@pytest.mark.parametrize(
    ("dtype", "code"),
    [
        (torch.bool, "u1"),
        (torch.uint8, "u1"),
        (torch.float8_e4m3fn, "u1"),
        (torch.bfloat16, "u2"),
        (torch.float16, "u2"),
        (torch.float32, "u4"),
        (torch.int64, "u8"),
        (torch.float64, "u8"),
    ],
)
def test_every_dtype_is_seen_as_its_bits(dtype: torch.dtype, code: str) -> None:
    tensor = torch.arange(6).to(dtype).view(2, 3)
    bits = bits_of(tensor)
    assert bits.dtype == np.dtype(f"<{code}")
    assert bits.tobytes() == bytes(tensor.view(torch.uint8).flatten().tolist())


def test_bits_are_a_view_where_they_can_be() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    bits = bits_of(tensor)
    tensor[2] = 1
    assert bits.tolist() == [0, 0, 0x3F80, 0]


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="complex64"):
        bits_of(torch.zeros(2, dtype=torch.complex64))


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.slanted = nn.Parameter(torch.arange(12, dtype=torch.float32).view(3, 4).t())
        self.brief = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.count = nn.Parameter(torch.tensor([7]), requires_grad=False)
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("cache", torch.ones(2), persistent=False)


def test_a_plain_model_is_one_rank() -> None:
    trainer = FsdpTrainer(Small())
    specs = trainer.tensors()
    assert {name: (spec.shape, spec.dtype) for name, spec in specs.items()} == {
        "embed.weight": ((5, 3), "bfloat16"),
        "slanted": ((4, 3), "bfloat16"),
        "brief": ((2,), "bfloat16"),
        "temperature": ((), "bfloat16"),
        "count": ((1,), "int64"),
    }
    assert trainer.aliases() == {"head.weight": "embed.weight"}
    assert trainer.layout() == {name: whole_box(spec.shape) for name, spec in specs.items()}
    assert (trainer.rank, trainer.world_size) == (0, 1)


def test_masters_are_cast_and_strides_followed() -> None:
    """Case W11 through the trainer: float32 masters leave as bfloat16, transposed parameters row-major."""
    model = Small()
    trainer = FsdpTrainer(model)
    shards = trainer.shards()
    slanted = read_whole(shards["slanted"])
    assert slanted.tobytes() == bits_of(model.slanted.to(torch.bfloat16)).tobytes()
    values = torch.from_numpy(slanted.view(np.int16)).view(torch.bfloat16)
    assert values.flatten().tolist() == [0, 4, 8, 1, 5, 9, 2, 6, 10, 3, 7, 11]
    assert read_whole(shards["temperature"]).tobytes() == bytes.fromhex("c03f")
    with torch.no_grad():
        model.embed.weight.fill_(2.0)
    assert set(read_whole(trainer.shards()["embed.weight"]).flatten().tolist()) == {0x4000}


def test_casts_are_made_when_a_slice_is_read() -> None:
    """What was handed out shows later weights, slices do not share memory, and arrays of it can be made."""
    model = Small()
    bits = FsdpTrainer(model).shards()["slanted"]
    with torch.no_grad():
        model.slanted.fill_(2.0)
    part = bits[slice(1, 3), slice(0, 2)]
    assert (part.shape, part.flags.c_contiguous, set(part.flatten().tolist())) == ((2, 2), True, {0x4000})
    assert not np.shares_memory(part, bits[slice(1, 3), slice(0, 2)])
    assert np.asarray(bits).shape == (4, 3)
    with ThreadPoolExecutor(4) as pool:
        rows = list(pool.map(lambda row: bits[slice(row, row + 1), slice(0, 3)], range(4)))
    assert np.array_equal(np.concatenate(rows), np.array(bits))


def test_matching_dtypes_are_not_copied() -> None:
    model = Small()
    shards = FsdpTrainer(model).shards()
    with torch.no_grad():
        model.brief.zero_()
    assert read_whole(shards["brief"]).tolist() == [0, 0]
    kept = FsdpTrainer(model, wire_dtype=None)
    assert kept.tensors()["embed.weight"].dtype == "float32"
    with torch.no_grad():
        model.embed.weight.zero_()
    assert not read_whole(kept.shards()["embed.weight"]).any()


def test_buffers_on_request() -> None:
    assert "mean" not in FsdpTrainer(Small()).tensors()
    trainer = FsdpTrainer(Small(), has_buffers=True)
    assert trainer.tensors()["mean"].dtype == "float32"
    assert "cache" not in trainer.tensors()


def test_an_unknown_wire_dtype_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="bf16"):
        FsdpTrainer(Small(), wire_dtype="bf16")


def test_wrappers_do_not_show_in_names() -> None:
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._checkpoint_wrapped_module = nn.Linear(2, 2, bias=False)

    model = nn.ModuleDict({"_orig_mod": nn.ModuleDict({"layer": Wrapped()})})
    assert list(FsdpTrainer(model).tensors()) == ["layer.weight"]


class Stacked(nn.Module):
    """A layer of two experts as transformers 5 keeps it: gate above up, one stack each."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(3))
        self.experts = nn.Module()
        self.experts.gate_up_proj = nn.Parameter(torch.arange(24, dtype=torch.float32).view(2, 4, 3))
        self.experts.down_proj = nn.Parameter(torch.arange(12, dtype=torch.float32).view(2, 3, 2).to(torch.bfloat16))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = Stacked()


def test_stacked_experts_leave_under_their_checkpoint_names() -> None:
    model = Model()
    views = stacked_experts_in({name: tuple(p.shape) for name, p in model.named_parameters()})
    trainer = FsdpTrainer(model, views=views)
    names = [f"mlp.experts.{e}.{part}_proj.weight" for part in ("gate", "up") for e in (0, 1)]
    down = [f"mlp.experts.{e}.down_proj.weight" for e in (0, 1)]
    assert set(trainer.tensors()) == {"mlp.norm", *names, *down}
    assert {spec.dtype for spec in trainer.tensors().values()} == {"bfloat16"}
    assert trainer.layout()["mlp.experts.1.up_proj.weight"] == whole_box((2, 3))
    shards = trainer.shards()
    assert set(shards) == set(trainer.layout())
    up = torch.arange(18, 24, dtype=torch.bfloat16).view(2, 3)
    np.testing.assert_array_equal(read_whole(shards["mlp.experts.1.up_proj.weight"]), bits_of(up))
    second = shards["mlp.experts.1.down_proj.weight"][slice(0, 3), slice(1, 2)]
    assert np.shares_memory(second, bits_of(model.mlp.experts.down_proj.detach()))


def test_views_that_do_not_fit_are_refused() -> None:
    model = Small()
    with pytest.raises(LayoutMismatchError, match=r"ghost.* it is no parameter"):
        FsdpTrainer(model, views=[View.whole("w", (2,), "ghost")])
    with pytest.raises(LayoutMismatchError, match="leaves shape"):
        FsdpTrainer(model, views=[View.whole("w", (3,), "brief")])
    part = ShardSpec(offset=(0,), shape=(2,))
    view = View(name="w", shape=(3,), part=part, parameter="brief", box=part)
    with pytest.raises(LayoutMismatchError, match="boxes hold 2 of 3"):
        FsdpTrainer(model, views=[view])
    with pytest.raises(LayoutMismatchError, match=r"tied parameters.* embed.weight"):
        FsdpTrainer(model, views=[View.whole("w", (5, 3), "embed.weight")])
