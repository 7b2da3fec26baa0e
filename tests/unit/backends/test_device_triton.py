"""The Triton kernels in Triton's own interpreter find what torch's operations find, and write what they write."""

from __future__ import annotations

import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed here; the kernels run where it is, see docs/gpu.md")

from rose.backends.device_codec import triton_kernels
from rose.backends.device_codec.finding import Pair, TorchFinder
from rose.backends.device_codec.triton_finder import TritonFinder
from rose.transfer.kernels import Rows

INTS = [torch.int8, torch.int16, torch.int32, torch.int64]


def pair(new: Any, fraction: float, generator: Any, *, old: Any = None) -> Pair:
    """A state, and the one before it in memory of another row distance."""
    padded = torch.zeros((*new.shape[:-1], new.shape[-1] + 3), dtype=new.dtype) if new.dim() > 1 else None
    before = padded[..., : new.shape[-1]] if padded is not None else torch.zeros_like(new)
    before.copy_(new)
    before += (torch.rand(new.shape, generator=generator) < fraction).to(new.dtype)
    row_len = new.shape[-1] if new.dim() else 1
    rows = Rows(num_rows=new.numel() // max(1, row_len), row_len=row_len, start=5, stride=row_len)
    return Pair(new=new, old=before if old is None else old, rows=rows)


def drawn(shape: tuple[int, ...], dtype: Any, generator: Any) -> Any:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype, generator=generator)


def assert_same(mine: Any, expected: Any) -> None:
    assert list(mine.counts) == list(expected.counts)
    assert mine.cells == expected.cells
    for name in ("positions", "new", "old"):
        one, other = getattr(mine, name), getattr(expected, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.1, 0.6, 1.0])
def test_changes_are_those_that_torch_finds(dtype: Any, fraction: float) -> None:
    generator = torch.Generator().manual_seed(7)
    shapes = [(40, 33), (7,), (300,), (3, 5, 8), (1, 1), ()]
    pairs = [pair(drawn(shape, dtype, generator), fraction, generator) for shape in shapes]
    finder = TritonFinder(block=64, num_slots=16)
    assert_same(finder.find(pairs), TorchFinder().find(pairs))


def test_a_full_block_and_odd_strides_go_the_torch_way(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    finder = TritonFinder(block=64, num_slots=16)
    asked: list[int] = []
    real = finder._torch.find

    def counting(pairs: Any) -> Any:
        asked.append(len(pairs))
        return real(pairs)

    monkeypatch.setattr(finder._torch, "find", counting)
    sparse = pair(drawn((50, 20), torch.int16, generator), 0.02, generator)
    finder.find([sparse])
    assert not asked
    dense = pair(drawn((50, 20), torch.int16, generator), 0.9, generator)
    assert_same(finder.find([dense]), TorchFinder().find([dense]))
    turned = drawn((20, 50), torch.int16, generator).T
    odd = pair(turned, 0.02, generator, old=turned.clone())
    odd.old[3, 4] += 1
    assert_same(finder.find([odd, sparse]), TorchFinder().find([odd, sparse]))
    assert asked == [1, 2]


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_a_scatter_writes_rows_in_place(dtype: Any, kind: Any) -> None:
    generator = torch.Generator().manual_seed(3)
    memory = drawn((30, 50), dtype, generator)
    before, live = memory.clone(), memory[:, 10:40]
    positions = torch.randperm(live.numel(), generator=generator)[:137].sort().values.to(kind)
    values = drawn((137,), dtype, generator)
    triton_kernels.scatter_rows[(3,)](live, positions, values, 137, 30, 50, BLOCK=64)
    expected = before[:, 10:40].clone().view(-1)
    expected[positions.long()] = values
    assert torch.equal(live.reshape(-1), expected)
    assert torch.equal(memory[:, :10], before[:, :10])
    assert torch.equal(memory[:, 40:], before[:, 40:])
