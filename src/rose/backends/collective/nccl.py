"""One NCCL communicator, so that its failures stay inside this module.

torch's NCCL groups are made for jobs that end when a peer does: their watchdog ends the *process* when a collective times out, and a
communicator that is being made waits for its peers without a limit. Here a member of a group is a serving engine, so:

* the group is made with the watchdog's ending of the process off (torch reads that from the environment when a group is made);
* the first collective, which makes the communicator, runs on a thread of its own and is given up after ``timeout_s``;
* a broadcast is polled until it is done, failed or late; whoever finds it failed aborts the communicator.

Bytes of the host go through two page-locked blocks and one on the device, on a stream of their own, so that neither side waits for
what the engine or the trainer computes. NCCL refuses two ranks on one GPU; such a group fails at its first collective.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

ABANDON = "rose-nccl-abandon"
"""Name of the threads that end communicators which could not be made."""
_POLL_S = 2e-4
_AT_CREATION = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}
_creation_lock = threading.Lock()


class NcclGroup:
    """A group of one rank a GPU.

    Args:
        store: Where the ranks meet.
        rank: This one's.
        size: How many there are.
        timeout: How long making the communicator, or one broadcast, may take.
        device: This rank's GPU.
        chunk_bytes: The most that one broadcast carries.

    Raises:
        RuntimeError: They did not meet, in time or at all.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, timeout: timedelta, device: torch.device, chunk_bytes: int
    ) -> None:
        self._rank, self._timeout, self._device = rank, timeout, device
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout  # noqa: SLF001 - the only way to set it
        with _creation_lock, _environment(_AT_CREATION):
            self._group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device)
            self._pinned = torch.empty(chunk_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            self._block = torch.empty(chunk_bytes, dtype=torch.uint8, device=device)
        try:
            self._connect()
        except BaseException:
            # An abort may wait for the thread that still makes the communicator, so that nobody may wait for it.
            threading.Thread(target=self._abandon, name=ABANDON, daemon=True).start()
            raise

    def broadcast(self, chunk: torch.Tensor) -> None:
        """Send rank 0's bytes to, or fill them at, every other rank.

        Args:
            chunk: Bytes of the host, at most ``chunk_bytes``.

        Raises:
            RuntimeError: A peer is gone or late, or the group is closed.
        """
        pinned, block = self._pinned[: chunk.numel()], self._block[: chunk.numel()]
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if self._rank == 0:
                pinned.copy_(chunk)
                block.copy_(pinned, non_blocking=True)
            self._run(block)
            if self._rank:
                pinned.copy_(block, non_blocking=True)
            self._stream.synchronize()
        if self._rank:
            chunk.copy_(pinned)

    def abort(self) -> None:
        """End what is under way and let go of the communicator."""
        self._group.abort()

    def _abandon(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()

    def _connect(self) -> None:
        """Make the communicator, which may hang, on a thread that can be left behind."""
        failed: list[BaseException] = []

        def first() -> None:
            try:
                with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                    self._run(self._block[:1])
            except RuntimeError as error:
                failed.append(error)

        thread = threading.Thread(target=first, name="rose-nccl-connect", daemon=True)
        thread.start()
        thread.join(self._timeout.total_seconds())
        if thread.is_alive():
            message = f"the communicator was not made within {self._timeout.total_seconds()} s"
            raise RuntimeError(message)
        if failed:
            raise failed[0]

    def _run(self, block: torch.Tensor) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        work = self._group.broadcast([block], options)
        deadline_s = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline_s:
                message = f"a peer did not take part within {self._timeout.total_seconds()} s"
                raise RuntimeError(message)
            time.sleep(_POLL_S)
        # It is over, so nothing is waited for; with a limit every torch raises what it failed of. This stream is ordered behind it.
        work.wait(self._timeout)


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    """Set variables of the environment for the time of a call."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
