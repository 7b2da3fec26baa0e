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

    Raises:
        ConfigError: There is no such backend.
        BackendUnavailableError: This torch does not have it.
        TransportError: They did not meet in time.
    """

    def __init__(
        self, store: Any, name: str, *, rank: int, size: int, backend: str, host: str, timeout_s: float
    ) -> None:
        check_backend(backend)
        self._rank, self._timeout = rank, timedelta(seconds=timeout_s)
        self._device = torch.device("cpu" if backend == "gloo" else f"cuda:{torch.cuda.current_device()}")
        make = _gloo if backend == "gloo" else _nccl
        try:
            self._group: Any = make(dist.PrefixStore(name, store), rank, size, host, self._timeout)
        except RuntimeError as error:
            message = f"group {name} of {size} did not meet within {timeout_s} s: {_first_line(error)}"
            raise TransportError(message) from error

    def broadcast(self, data: Bytes) -> None:
        """Send the root's bytes to, or fill them at, every member; ``data`` has the same size everywhere.

        Raises:
            TransportError: A peer is gone or did not answer in time. The group is of no more use.
        """
        for start in range(0, data.nbytes, CHUNK_BYTES):
            chunk = _tensor_over(data[start : start + CHUNK_BYTES])
            staged = chunk.to(self._device)
            try:
                self._broadcast_chunk(staged)
            except RuntimeError as error:
                message = f"a broadcast of {data.nbytes} bytes failed at byte {start}: {_first_line(error)}"
                raise TransportError(message) from error
            if staged is not chunk and self._rank:
                chunk.copy_(staged)

    def close(self) -> None:
        """Let go of the group in the background, since that waits for what is under way. Idempotent.

        The interpreter waits for it at its end: a thread that is cut off inside the library would abort the process.
        """
        group, self._group = self._group, None
        if group is not None:
            threading.Thread(target=_tear_down, args=(group,), name="rose-group-end", daemon=False).start()

    def _broadcast_chunk(self, chunk: torch.Tensor) -> None:
        if self._group is None:
            message = "the group is closed"
            raise RuntimeError(message)
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, self._timeout
        self._group.broadcast([chunk], options).wait(self._timeout)
        if chunk.is_cuda:
            torch.cuda.synchronize(chunk.device)


def _gloo(store: Any, rank: int, size: int, host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupGloo._Options()  # noqa: SLF001 - the only way to name the interface
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]  # noqa: SLF001
    options._timeout = timeout  # noqa: SLF001
    return dist.ProcessGroupGloo(store, rank, size, options)


def _nccl(store: Any, rank: int, size: int, _host: str, timeout: timedelta) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout  # noqa: SLF001
    return dist.ProcessGroupNCCL(store, rank, size, options)


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
