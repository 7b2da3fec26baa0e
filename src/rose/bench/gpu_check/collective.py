"""NCCL on one card: a group of one rank moves bytes; two ranks on the card must fail in time, and nothing else may break."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch.distributed as dist

from rose.backends.collective.group import Group, host_store, join_store
from rose.backends.collective.nccl import ABANDON
from rose.bench.gpu_check.outcome import Figure
from rose.bench.gpu_check.part import Bench, MismatchError, Part
from rose.errors import TransportError

_TIMEOUT_S = 20.0
_HOST = "127.0.0.1"


class OneRank(Part):
    """A group of size 1: staging, stream and communicator are real, only the wire is not."""

    name = "nccl"
    shows = "a group of one rank broadcasts 256 MiB through page-locked and device memory, unchanged (two ranks need two cards)"

    def problem(self, bench: Bench) -> str:
        """On a GPU torch must have NCCL."""
        return "" if not bench.is_gpu or dist.is_nccl_available() else "this torch has no NCCL"

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Broadcast; the rehearsal does so over gloo."""
        size = 1 << 16 if bench.is_quick else 256 << 20
        data = np.random.default_rng(0).integers(0, 256, size, dtype=np.uint8)
        before = data.copy()
        store, _ = host_store(_HOST, _TIMEOUT_S)
        backend = "nccl" if bench.is_gpu else "gloo"
        started = time.perf_counter()
        group = Group(
            store, "one", rank=0, size=1, backend=backend, host=_HOST, timeout_s=_TIMEOUT_S, device=bench.device.index
        )
        made_s = time.perf_counter() - started
        seconds = bench.timed(lambda: group.broadcast(data), repeats=3)
        group.close()
        if not np.array_equal(data, before):
            message = "the root's own bytes changed"
            raise MismatchError(message)
        return [
            Figure(name="making the group", value=1e3 * made_s, unit="ms"),
            Figure(name="the root's side of a broadcast", value=size / seconds / 1e9, unit="GB/s"),
        ]


class TwoOnOneCard(Part):
    """Two processes ask for what NCCL does not do, as two engines on one card would."""

    name = "nccl-refusal"
    shows = "two ranks on one card: NCCL refuses, both sides get a TransportError within the time limit, and neither process ends"

    def problem(self, bench: Bench) -> str:
        """On the CPU nothing refuses."""
        if not bench.is_gpu:
            return "needs a GPU: only NCCL refuses two ranks on one"
        return "" if dist.is_nccl_available() else "this torch has no NCCL"

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Let this process and another one try."""
        store, port = host_store(_HOST, _TIMEOUT_S)
        index = bench.device.index or 0
        context = multiprocessing.get_context("spawn")
        answers: Any = context.SimpleQueue()
        other = context.Process(target=_join, args=(port, index, answers))
        other.start()
        started = time.perf_counter()
        mine = _attempt(store, rank=0, index=index)
        seconds = time.perf_counter() - started
        other.join(3 * _TIMEOUT_S)
        theirs = answers.get() if other.exitcode == 0 else f"exit code {other.exitcode}"
        if other.is_alive():
            other.kill()
        if not (mine.startswith("TransportError") and theirs.startswith("TransportError")):
            message = f"two ranks on one card ended otherwise: {mine!r} and {theirs!r}"
            raise MismatchError(message)
        return [Figure.at_most("until both sides had given up", seconds, "s", _TIMEOUT_S + 1)]


def _attempt(store: Any, *, rank: int, index: int) -> str:
    try:
        group = Group(store, "two", rank=rank, size=2, backend="nccl", host=_HOST, timeout_s=_TIMEOUT_S, device=index)
        group.broadcast(np.zeros(1 << 16, dtype=np.uint8))
    except TransportError as error:
        return f"TransportError: {error}"
    return "it worked"


def _join(port: int, index: int, answers: Any) -> None:
    answers.put(_attempt(join_store(_HOST, port, _TIMEOUT_S), rank=1, index=index))
    for thread in threading.enumerate():
        if thread.name == ABANDON:
            thread.join(
                _TIMEOUT_S
            )  # cut off within the library it would abort the process, which is not what is asked here
