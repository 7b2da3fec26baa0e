"""One process group, made without touching torch's global one, and thrown away at the first failure.

Invariant: rank 0 is the root, and every rank broadcasts the same byte counts in the same order; whoever cannot says so by
closing, upon which the others' calls fail at once or, where the peer is frozen, after the timeout.
"""

from __future__ import annotations

import ctypes
import socket
import threading
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rose.backends.collective.nccl import NcclGroup
from rose.errors import BackendUnavailableError, ConfigError, TransportError

CHUNK_BYTES = 32 << 20
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


def check_backend(backend: str) -> None:
    """Check that groups of this kind can be made here.

    Raises:
        ConfigError: There is no such kind.
        BackendUnavailableError: This torch does not have it.
    """
    if backend not in ("gloo", "nccl"):
        message = f"a collective's backend is 'gloo' or 'nccl', not {backend!r}"
        raise ConfigError(message)
    if not (dist.is_gloo_available() if backend == "gloo" else dist.is_nccl_available()):
        message = f"this torch has no {backend}; {'use gloo, or a torch for CUDA' if backend == 'nccl' else 'use nccl'}"
        raise BackendUnavailableError(message)


def host_store(host: str, timeout_s: float) -> tuple[Any, int]:
    """Return a meeting place for groups that listens on one address only, and its port."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    store = dist.TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def join_store(host: str, port: int, timeout_s: float) -> Any:
    """Return a client of a meeting place."""
    return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))


def current_gpu() -> int | None:
    """Return the index of this thread's GPU, which threads it starts do not inherit; ``None`` where this process uses none yet."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else None


class Group:
    """A gloo or NCCL group of one root and its members.

    Args:
        store: Where they meet.
        name: What no other group of that store is called.
        rank: This process's rank; 0 is the root.
        size: How many there are.
        backend: ``gloo`` or ``nccl``.
        host: Address that gloo listens on.
        timeout_s: How long meeting, or the broadcast of one chunk, may take.
        device: Index of this rank's GPU under NCCL, which refuses two ranks on one; ``None`` is this thread's current one.

    Raises:
        ConfigError: There is no such backend.
        BackendUnavailableError: This torch does not have it.
        TransportError: They did not meet in time.
    """

    def __init__(
        self,
        store: Any,
        name: str,
        *,
        rank: int,
        size: int,
        backend: str,
        host: str,
        timeout_s: float,
        device: int | None = None,
    ) -> None:
        check_backend(backend)
        timeout, meeting = timedelta(seconds=timeout_s), dist.PrefixStore(name, store)
        try:
            self._group: Any = (
                _GlooGroup(meeting, rank, size, timeout=timeout, host=host)
                if backend == "gloo"
                else NcclGroup(meeting, rank, size, timeout=timeout, device=_gpu(device), chunk_bytes=CHUNK_BYTES)
            )
        except RuntimeError as error:
            message = f"group {name} of {size} did not meet within {timeout_s} s: {_first_line(error)}"
            raise TransportError(message) from error

    def broadcast(self, data: Bytes) -> None:
        """Send the root's bytes to, or fill them at, every member; ``data`` has the same size everywhere.

        Raises:
            TransportError: A peer is gone or did not answer in time. The group is of no more use.
        """
        for start in range(0, data.nbytes, CHUNK_BYTES):
            group = self._group
            try:
                if group is None:
                    message = "the group is closed"
                    raise RuntimeError(message)  # noqa: TRY301 - fails as a group that is closed meanwhile does
                group.broadcast(_tensor_over(data[start : start + CHUNK_BYTES]))
            except RuntimeError as error:
                message = f"a broadcast of {data.nbytes} bytes failed at byte {start}: {_first_line(error)}"
                raise TransportError(message) from error

    def close(self) -> None:
        """Let go of the group in the background, since that waits for what is under way. Idempotent.

        The interpreter waits for it at its end: a thread that is cut off inside the library would abort the process.
        """
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=_tear_down, args=(group,), name="rose-group-end", daemon=False).start()


class _GlooGroup:
    """A gloo group that listens on one address."""

    def __init__(self, store: Any, rank: int, size: int, *, timeout: timedelta, host: str) -> None:
        options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - the only way to name the interface
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
        options._timeout = timeout  # noqa: SLF001
        self._timeout = timeout
        self._group: Any = dist.ProcessGroupGloo(store, rank, size, options)

    def broadcast(self, chunk: torch.Tensor) -> None:
        """Send rank 0's bytes to, or fill them at, every other rank."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._group.broadcast([chunk], options).wait(self._timeout)

    def abort(self) -> None:
        """End what is under way."""
        self._group.abort()


def _gpu(index: int | None) -> torch.device:
    return torch.device("cuda", torch.cuda.current_device() if index is None else index)


def _tear_down(group: Any) -> None:
    """End what is under way; an abort of a group that has failed may itself complain, and nothing is left to save."""
    try:
        group.abort()
    except RuntimeError:
        return


def _tensor_over(data: Bytes) -> torch.Tensor:
    """Return a tensor over memory that numpy holds to be read-only: a root only reads it, a member owns it alone."""
    block = (ctypes.c_ubyte * data.nbytes).from_address(data.ctypes.data)
    return torch.frombuffer(block, dtype=torch.uint8)


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]
