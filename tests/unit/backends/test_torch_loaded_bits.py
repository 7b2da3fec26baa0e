"""Models whose live weights were repacked after a load are told from those that hold the checkpoint's bits."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from rose.backends.torch_weights.checkpoint_files import find_tensors
from rose.backends.torch_weights.loaded_bits import check_loaded_bits
from rose.backends.torch_weights.slices import SlicePlan, as_meta
from rose.errors import LayoutMismatchError

EXPERTS, WIDTH, HIDDEN = 4, 32, 96
NAMES = {torch.bfloat16: "BF16", torch.float32: "F32"}


class Experts(torch.nn.Module):
    """Rank 1 of 2: gate and up of every expert cut by rows and fused, down cut by columns; a norm, and a scalar."""

    def __init__(self) -> None:
        super().__init__()
        half = WIDTH // 2
        for name, shape in {
            "w13": (EXPERTS, 2 * half, HIDDEN),
            "w2": (EXPERTS, HIDDEN, half),
            "norm": (HIDDEN,),
            "scale": (1,),
        }.items():
            value = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)
            self.register_parameter(name, value)

    def load_weights(self, weights: Iterator[tuple[str, Any]]) -> None:
        half = WIDTH // 2
        for name, tensor in weights:
            kind, _, expert = name.partition(".")
            if kind == "gate":
                self.w13.data[int(expert), :half].copy_(tensor.narrow(0, half, half))
            elif kind == "up":
                self.w13.data[int(expert), half:].copy_(tensor.narrow(0, half, half))
            elif kind == "down":
                self.w2.data[int(expert)].copy_(tensor.narrow(1, half, half))
            else:
                self.get_parameter(name).data.copy_(tensor.reshape(self.get_parameter(name).shape))


def write(path: Path, tensors: dict[str, Any]) -> None:
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    head = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def drawn(dtype: Any = torch.bfloat16) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {"norm": (HIDDEN,), "scale": ()}
    for expert in range(EXPERTS):
        shapes |= {
            f"gate.{expert}": (WIDTH, HIDDEN),
            f"up.{expert}": (WIDTH, HIDDEN),
            f"down.{expert}": (HIDDEN, WIDTH),
        }
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def loaded(folder: Path, dtype: Any = torch.bfloat16) -> Experts:
    write(folder / "model.safetensors", drawn(dtype))
    model = Experts()
    model.load_weights(iter(drawn(dtype).items()))
    return model


def check(model: Any, folder: Path) -> None:
    stored = find_tensors(folder)
    check_loaded_bits(SlicePlan.trace(model, as_meta(stored)), stored, folder)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_was_loaded_passes(tmp_path: Path, dtype: Any) -> None:
    """A rank's parts, and a checkpoint that vLLM rounds to the engine's dtype."""
    check(loaded(tmp_path, dtype), tmp_path)


def _swap_halves(model: Experts) -> None:
    model.w13.data.copy_(model.w13.data.roll(WIDTH // 2, dims=1))


def _transpose_blocks(model: Experts) -> None:
    """Pairs of rows side by side, as matrix units like them."""
    pairs = model.w2.data.view(EXPERTS, HIDDEN // 2, 2, WIDTH // 2).transpose(2, 3).contiguous()
    model.w2.data.copy_(pairs.view_as(model.w2.data))


def _replace(model: Experts) -> None:
    """A parameter of its own, whose padding moved the second half."""
    padded = torch.zeros(EXPERTS, WIDTH + 16, HIDDEN, dtype=torch.bfloat16)
    padded[:, : WIDTH // 2], padded[:, -WIDTH // 2 :] = model.w13.data[:, : WIDTH // 2], model.w13.data[:, WIDTH // 2 :]
    model.w13 = torch.nn.Parameter(padded[:, :WIDTH], requires_grad=False)


def _scale(model: Experts) -> None:
    model.scale.data.mul_(2)


@pytest.mark.parametrize(
    ("repack", "names"),
    [(_swap_halves, "gate|up"), (_transpose_blocks, "down"), (_replace, "up"), (_scale, "scale")],
)
def test_weights_repacked_in_their_shape_are_refused_by_name(
    tmp_path: Path, repack: Callable[[Experts], None], names: str
) -> None:
    model = loaded(tmp_path)
    repack(model)
    with pytest.raises(LayoutMismatchError, match=rf"live weights of ({names}).*without quantization"):
        check(model, tmp_path)


def test_a_loader_that_trips_over_replaced_parameters_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A quantised parameter has lost what its loader calls: the error is ours, and says what to do."""
    model = loaded(tmp_path)
    stored = as_meta(find_tensors(tmp_path))

    def load(weights: Iterator[tuple[str, Any]]) -> None:
        for _, tensor in weights:
            model.w13.load_row_parallel(tensor)

    monkeypatch.setattr(model, "load_weights", load)
    with pytest.raises(LayoutMismatchError, match=r"taken norm.*load_row_parallel.*without quantization"):
        SlicePlan.trace(model, stored)


def test_files_beside_the_index_are_left_alone(tmp_path: Path) -> None:
    """Another copy of the weights in the same folder, which vLLM does not load either."""
    model = loaded(tmp_path)
    write(tmp_path / "other.safetensors", {name: tensor + 1 for name, tensor in drawn().items()})
    index = {"weight_map": dict.fromkeys(drawn(), "model.safetensors")}
    with pytest.raises(LayoutMismatchError, match="bits of the checkpoint"):
        check(model, tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check(model, tmp_path)
