"""The way of an engine's update into live weights on a device: staged in page-locked memory, moved and written on one stream.

Invariants:

* Writes are queued in the order in which they were asked for, on one stream of this way's own; that stream starts behind everything
  the device had to do when the first of them came.
* A staging buffer is filled again only when the device has read it (its event).
* What is written is in the live weights when ``flush`` has returned, and not before.
* Whatever takes long the first time (pinning, Triton's compiler) is done by ``warm_up``, since the engine is paused while it is written to.
* Reads (``gather``, ``read``) have a stream of their own with the lowest priority, since the engine serves meanwhile.

On the device ``cpu`` there are no streams, and every step is done when it was asked for.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from rose.backends.device_codec.pinned import (
    SIGNED_BY_SIZE,
    Array,
    empty_pinned,
    is_async,
    on,
    to_device,
    to_host,
    wait_for,
)
from rose.backends.device_codec.strides import is_rows, row_step

_logger = logging.getLogger(__name__)
_STAGE_BYTES = 16 << 20
_NUM_STAGES = 2
_SCATTER_BLOCK = 1024


class _Stages:
    """Page-locked buffers that are filled one after the other."""

    def __init__(self, device: torch.device, num_bytes: int) -> None:
        self._device = device
        self._buffers = [empty_pinned((num_bytes,), torch.uint8, device) for _ in range(_NUM_STAGES)]
        self._events: list[Any] = [None] * _NUM_STAGES
        self._next = 0

    @contextlib.contextmanager
    def filled(self, arrays: Sequence[Array]) -> Iterator[list[torch.Tensor]]:
        """Give small arrays in the next buffer; what is queued within has read it when the buffer is taken again."""
        number, self._next = self._next, (self._next + 1) % _NUM_STAGES
        if self._events[number] is not None:
            self._events[number].synchronize()
        memory, at, staged = self._buffers[number].numpy(), 0, []
        for array in arrays:
            end = at + array.nbytes
            room = memory[at:end].view(f"i{array.itemsize}").reshape(array.shape)
            room[...] = array.view(f"i{array.itemsize}")
            staged.append(torch.from_numpy(room) if not is_async(self._device) else self._slice(number, at, room))
            at = -(-end // 8) * 8
        yield staged
        if is_async(self._device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._device))
            self._events[number] = event

    def _slice(self, number: int, start: int, room: Array) -> torch.Tensor:
        part = self._buffers[number][start : start + room.nbytes]
        return part.view(SIGNED_BY_SIZE[room.itemsize]).view(room.shape)


class DeviceWay:
    """Writes into, and reads from, live tensors of one device. Threads may share it; one writes at a time.

    Args:
        device: The device.
        stage_bytes: Size of a staging buffer; there are two.
    """

    def __init__(self, device: torch.device, *, stage_bytes: int = _STAGE_BYTES) -> None:
        self._device, self._stage_bytes = device, stage_bytes
        self._lock = threading.Lock()
        self._stages: _Stages | None = None
        self._is_open = False
        self._write_stream: Any = None
        self._read_stream: Any = None
        self._scatter = _scatter_kernel(device)

    def warm_up(self, dtypes: Iterable[torch.dtype]) -> None:
        """Write to scratch memory, so that the first update finds everything made.

        Where Triton's kernel does not compile, or writes what it should not, torch's operations write from then on, with a warning.

        Args:
            dtypes: Of the live tensors.
        """
        for dtype in dtypes:
            try:
                problem = "" if self._writes_well(dtype) else "it did not write what it was given"
            except Exception as error:
                if self._scatter is None:
                    raise
                problem = f"{type(error).__name__}: {error}"
            if problem and self._scatter is not None:
                _logger.warning("Triton is of no use on %s, torch writes updates instead: %s", self._device, problem)
                self._scatter = None

    def _writes_well(self, dtype: torch.dtype) -> bool:
        """Write a few elements, at positions of either width."""
        num_rows, num_columns = 4, 48
        whole = torch.zeros((num_rows, 2 * num_columns), dtype=dtype, device=self._device)
        expected = np.zeros((num_rows, num_columns), dtype=f"u{dtype.itemsize}")
        for kind, start in ((np.int32, 1), (np.int64, 2)):
            positions = np.arange(start, expected.size, 5, dtype=kind)
            expected.reshape(-1)[positions] = start + positions % 100
            self.write_sparse([whole[:, :num_columns]], positions, expected.reshape(-1)[positions])
        self.flush()
        wanted = torch.from_numpy(expected.view(f"i{dtype.itemsize}")).view(dtype)
        found = whole.cpu()
        return torch.equal(found[:, :num_columns], wanted) and not bool(found[:, num_columns:].any())

    def write_sparse(self, lives: Sequence[torch.Tensor], positions: Array, values: Array) -> None:
        """Queue new patterns of some elements.

        Args:
            lives: Every live copy of a box: signed, of the box's shape, any strides.
            positions: Flat row-major positions in the box, each once.
            values: Their new patterns.
        """
        num_at_once = self._stage_bytes // (positions.itemsize + values.itemsize + 16)
        with self._writing() as stages:
            for start in range(0, positions.size, num_at_once):
                part = slice(start, start + num_at_once)
                with stages.filled([positions[part], values[part]]) as staged:
                    index, bits = (one.to(self._device, non_blocking=True) for one in staged)
                    for live in lives:
                        self._put(live, index, bits)

    def write_dense(self, lives: Sequence[torch.Tensor], bits: Array) -> None:
        """Queue new patterns of a whole box, of its shape."""
        flat = np.ascontiguousarray(bits).reshape(-1)
        num_at_once = self._stage_bytes // flat.itemsize
        with self._writing() as stages:
            for start in range(0, flat.size, num_at_once):
                part = flat[start : start + num_at_once]
                with stages.filled([part]) as (staged,):
                    for live in lives:
                        self._put_run(live, start, staged)

    def flush(self) -> None:
        """Wait until everything queued is in the live weights. Idempotent."""
        with self._lock:
            if self._write_stream is not None:
                self._write_stream.synchronize()
            self._is_open = False

    def gather(self, live: torch.Tensor, positions: Array) -> torch.Tensor:
        """Return elements at flat positions, signed, on the host."""
        with self._reading():
            index = to_device(positions, self._device)
            return to_host(_at(live, index))

    def read(self, live: torch.Tensor) -> torch.Tensor:
        """Return a whole box, row-major, signed, on the host."""
        with self._reading():
            return to_host(live)

    def _put(self, live: torch.Tensor, index: torch.Tensor, patterns: torch.Tensor) -> None:
        bits = patterns.view(live.dtype)  # bytes may be held as unsigned
        if self._scatter is not None and is_rows(live):
            row_len = live.shape[-1] if live.dim() else 1
            grid = (-(-index.numel() // _SCATTER_BLOCK),)
            self._scatter[grid](live, index, bits, index.numel(), row_len, row_step(live), BLOCK=_SCATTER_BLOCK)
        elif live.is_contiguous():
            live.view(-1).index_copy_(0, index.long(), bits)
        else:
            live.index_put_(tuple(torch.unravel_index(index.long(), live.shape)), bits)

    def _put_run(self, live: torch.Tensor, start: int, patterns: torch.Tensor) -> None:
        """Overwrite consecutive elements of a box in row-major order."""
        staged = patterns.view(live.dtype)
        if live.is_contiguous():
            live.view(-1)[start : start + staged.numel()].copy_(staged, non_blocking=True)
            return
        if staged.numel() == live.numel():
            live.copy_(staged.view(live.shape), non_blocking=True)
            return
        bits = staged.to(self._device, non_blocking=True)
        index = torch.arange(start, start + bits.numel(), dtype=torch.int64, device=self._device)
        live.index_put_(tuple(torch.unravel_index(index, live.shape)), bits)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[_Stages]:
        with self._lock, torch.no_grad(), on(self._device):
            if self._stages is None:
                self._stages = _Stages(self._device, self._stage_bytes)
            if not is_async(self._device):
                yield self._stages
                return
            if self._write_stream is None:
                self._write_stream = torch.cuda.Stream(self._device)
            if not self._is_open:
                wait_for(self._device)  # whatever stream the engine computes on: it is paused, and done now
                self._is_open = True
            with torch.cuda.stream(self._write_stream):
                yield self._stages

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        with torch.no_grad(), on(self._device):
            if not is_async(self._device):
                yield
                return
            if self._read_stream is None:
                self._read_stream = torch.cuda.Stream(
                    self._device, priority=0
                )  # the lowest; torch's others are below 0
            with torch.cuda.stream(self._read_stream):
                yield


def _at(live: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    if live.is_contiguous():
        return live.view(-1)[index.long()]
    return live[tuple(torch.unravel_index(index.long(), live.shape))]


def _scatter_kernel(device: torch.device) -> Any:
    """Return Triton's scatter for a GPU; ``None`` where there is none, and torch's index operations write."""
    if not is_async(device) or importlib.util.find_spec("triton") is None:
        return None
    try:
        from rose.backends.device_codec import triton_kernels  # noqa: PLC0415 - needs triton
    except ImportError as error:
        _logger.warning("Triton does not import here, torch writes updates instead: %s", error)
        return None
    return triton_kernels.scatter_rows
