"""The Triton kernels in Triton's own interpreter make what torch's operations make, and write what they write."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton", reason="triton is not installed here; the kernels run where it is, see docs/gpu.md")

from rose.backends.device_codec import triton_kernels
from rose.backends.device_codec.keys import Keys
from rose.backends.device_codec.torch_way import Pair, TorchWay
from rose.backends.device_codec.triton_way import TritonWay
from rose.transfer.kernels import Comparison, Rows

INTS = [torch.int8, torch.int16, torch.int32, torch.int64]
KEYS = Keys(torch.device("cpu"))


def pair(new: Any, fraction: float, generator: Any, *, most: int = 1, start: int = 5) -> Pair:
    """A state, and the one before it in memory of another row distance; a cell of rows with gaps in its tensor."""
    padded = torch.zeros((*new.shape[:-1], new.shape[-1] + 3), dtype=new.dtype) if new.dim() > 1 else None
    before = padded[..., : new.shape[-1]] if padded is not None else torch.zeros_like(new)
    moves = torch.randint(-most, most + 1, new.shape, generator=generator)
    before.copy_(new)
    before += ((torch.rand(new.shape, generator=generator) < fraction) * moves).to(new.dtype)
    row_len = new.shape[-1] if new.dim() else 1
    if new.dim() > 2:  # rows of the tensor are longer than those of the array
        row_len = new[0].numel()
    num_rows = new.numel() // max(1, row_len)
    rows = Rows(num_rows=num_rows, row_len=row_len, start=start, stride=row_len + (7 if num_rows > 1 else 0))
    return Pair(new=new, old=before, rows=rows)


def drawn(shape: tuple[int, ...], dtype: Any, generator: Any) -> Any:
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, dtype=dtype, generator=generator)


def facts(found: Comparison) -> tuple[object, ...]:
    streams = found.streams
    coded = streams and (
        streams.num_changed,
        streams.shift,
        streams.values_sum,
        *map(bytes, (streams.gaps, streams.lows, streams.codes, streams.escapes)),
    )
    return found.num_changed, found.sum_delta, coded


def assert_same(way: TritonWay, pairs: list[Pair], *, is_overwrite: bool) -> list[Comparison]:
    mine = way.compare(pairs, is_overwrite=is_overwrite)
    expected = TorchWay(KEYS).compare(pairs, is_overwrite=is_overwrite)
    for one, other in zip(mine, expected, strict=True):
        assert facts(one) == facts(other)
    return mine


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("fraction", [0.0, 0.003, 0.1, 0.6, 1.0])
@pytest.mark.parametrize("is_overwrite", [False, True])
def test_cells_have_torchs_bytes_and_sums(dtype: Any, fraction: float, is_overwrite: bool) -> None:  # noqa: FBT001
    generator = torch.Generator().manual_seed(7)
    shapes = [(12, 33), (7,), (500,), (3, 5, 8), (1, 1), (), (2, 150)]
    pairs = [
        pair(drawn(shape, dtype, generator), fraction, generator, most=1 + 20 * (i % 2), start=i * 10**12)
        for i, shape in enumerate(shapes)
    ]
    found = assert_same(TritonWay(KEYS, block=64, num_slots=16), pairs, is_overwrite=is_overwrite)
    assert any(one.num_changed for one in found) == (fraction > 0)


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_plain_cells_are_read_without_a_division(dtype: Any) -> None:
    """Rows without gaps, addresses and sizes that are multiples of 16; gaps of more than 255 and of more than a block."""
    generator = torch.Generator().manual_seed(2)
    pairs = []
    for num, fraction in [(64, 0.5), (4096, 0.02), (20480, 0.0003)]:
        new = drawn((num,), dtype, generator)
        old = new + (torch.rand(num, generator=generator) < fraction).to(dtype)
        old[-1] = new[-1] + 1
        pairs.append(Pair(new=new, old=old, rows=Rows(num_rows=1, row_len=num, start=0, stride=num)))
    assert all(one.new.data_ptr() % 16 == one.old.data_ptr() % 16 == 0 for one in pairs)
    assert_same(TritonWay(KEYS, block=1024, num_slots=1024), pairs, is_overwrite=False)


def test_a_full_block_is_compared_again_with_more_room() -> None:
    generator = torch.Generator().manual_seed(1)
    way = TritonWay(KEYS, block=64, num_slots=4, max_elements=3000)
    sparse = pair(drawn((50, 20), torch.int16, generator), 0.01, generator)
    assert_same(way, [sparse], is_overwrite=False)
    assert way._num_slots == 4
    dense = pair(drawn((50, 20), torch.int16, generator), 0.9, generator)
    assert_same(way, [dense, sparse, dense], is_overwrite=False)
    assert way._num_slots == 64


def test_odd_strides_go_the_torch_way(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(1)
    way, asked = TritonWay(KEYS, block=64, num_slots=16), []
    real = way._torch.compare

    def counting(pairs: Any, *, is_overwrite: bool) -> Any:
        asked.append(len(pairs))
        return real(pairs, is_overwrite=is_overwrite)

    monkeypatch.setattr(way._torch, "compare", counting)
    plain = pair(drawn((50, 20), torch.int16, generator), 0.05, generator)
    assert_same(way, [plain], is_overwrite=False)
    assert not asked
    turned = drawn((20, 50), torch.int16, generator).T
    before = turned.clone()
    before[3, 4] += 1
    odd = Pair(new=turned, old=before, rows=Rows(num_rows=50, row_len=20, start=0, stride=20))
    assert_same(way, [odd, plain], is_overwrite=False)
    assert asked == [2]


def test_columns_do_not_slow_down_what_is_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has both; together in one launch all would be read element by element."""
    generator = torch.Generator().manual_seed(2)
    launches: list[tuple[int, bool]] = []
    real = triton_kernels.find_changes

    class Noting:
        def __getitem__(self, grid: Any) -> Any:
            def launch(*args: Any, **kinds: Any) -> None:
                launches.append((args[2], kinds["IS_PLAIN"]))
                real[grid](*args, **kinds)

            return launch

    monkeypatch.setattr(triton_kernels, "find_changes", Noting())
    cells = []
    for columns in (slice(0, 32), slice(0, 16), slice(0, 32), slice(16, 32)):
        whole = drawn((48, 32), torch.int16, generator)
        before = whole.clone()
        before += (torch.rand(whole.shape, generator=generator) < 0.1).to(torch.int16)
        part = whole[:, columns]
        rows = Rows(num_rows=48, row_len=part.shape[1], start=columns.start, stride=32)
        cells.append(Pair(new=part, old=before[:, columns], rows=rows))
    way = TritonWay(KEYS, block=64, num_slots=64)
    found = assert_same(way, cells, is_overwrite=False)
    assert launches == [(2, True), (2, False)]
    assert all(one.num_changed for one in found)


def test_a_way_that_works_here_is_taken() -> None:
    assert TritonWay.open(KEYS, torch.device("cpu")) is not None


@pytest.mark.parametrize(
    ("kernel", "said"), [("raises", "RuntimeError: Failed to find C compiler"), ("nothing", "did not find the changes")]
)
def test_a_way_that_does_not_work_is_not_taken(
    kernel: str, said: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No compiler on the machine shows only when the first kernel is called."""

    def launch(*args: Any, **_: Any) -> None:
        if kernel == "raises":
            message = "Failed to find C compiler"
            raise RuntimeError(message)
        args[6].zero_()  # counts: nothing has changed

    monkeypatch.setattr(triton_kernels, "find_changes", {(2,): launch})
    assert TritonWay.open(KEYS, torch.device("cpu")) is None
    assert said in caplog.text


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


def test_the_kernels_compile_for_a_gpu_that_is_not_there() -> None:
    """To machine code of two generations, in every form that is used; in a process where nothing is interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("compile_triton.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "compiled 36 kernels"
