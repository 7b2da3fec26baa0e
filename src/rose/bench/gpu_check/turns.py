"""Two processes take turns on one device, as a serving and a rollout engine do: the hand-over, and what it adds to a step."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rose.backends.cuda import CudaDevice
from rose.backends.host import HostDevice
from rose.bench.gpu_check.outcome import Figure
from rose.bench.gpu_check.part import Bench, MismatchError, Part
from rose.interfaces.device import StepWork

_AIM_US = 100.0
_WAIT_S, _LOOK_S = 60.0, 0.5
_THINK_S = 2e-4
"""What an engine does between two steps, on its own processor."""


class DeviceTurns(Part):
    """Each process: take the turn, compute on the device, wait for it, give the turn back."""

    name = "device-turns"
    shows = "two processes take turns on the device: never both at once, how long a hand-over takes, how much longer a step lasts"

    def run(self, bench: Bench) -> Sequence[Figure]:
        """Let one process run alone, then two."""
        num_steps, size = (40, 256) if bench.is_quick else (400, 4096)
        index = (bench.device.index or 0) if bench.is_gpu else None
        with tempfile.TemporaryDirectory() as folder:
            (alone,) = _processes(Path(folder) / "alone", 1, num_steps, size, index)
            turns = _processes(Path(folder) / "both", 2, num_steps, size, index)
        handovers = _handovers(turns)
        alone_us, both_us = (np.median(_lengths(one)) for one in (alone, np.concatenate(turns)))
        waits = 1e6 * np.concatenate([one[:, 1] - one[:, 0] for one in turns])
        return [
            Figure(name="hand-overs from one process to the other", value=len(handovers), unit=""),
            Figure.at_most("hand-over, median", float(np.median(handovers)), "us", _AIM_US),
            Figure(name="hand-over, P99", value=float(np.quantile(handovers, 0.99)), unit="us"),
            Figure(name="a step alone, median", value=float(alone_us), unit="us"),
            Figure(name="a step between the other's, median", value=float(both_us), unit="us"),
            Figure(name="waiting for a turn, P99", value=float(np.quantile(waits, 0.99)), unit="us"),
        ]


def _processes(path: Path, num: int, num_steps: int, size: int, index: int | None) -> list[np.ndarray]:
    """Return what each process did: ``[num_steps, 3]`` seconds at which it wanted, had and gave back the turn."""
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    barrier = context.Barrier(num)
    workers = [context.Process(target=_work, args=(path, num_steps, size, index, barrier, answers)) for _ in range(num)]
    for worker in workers:
        worker.start()
    try:
        return _gathered(workers, answers)
    finally:
        for worker in workers:
            worker.kill()  # who has answered has nothing more to do, and who has not never will
            worker.join(_WAIT_S)


def _gathered(workers: Sequence[Any], answers: Any) -> list[np.ndarray]:
    """Return what every process answers.

    Raises:
        MismatchError: One ended without an answer, or did not come to one.
    """
    found: list[np.ndarray] = []
    give_up_s = time.monotonic() + _WAIT_S
    while len(found) < len(workers):
        with contextlib.suppress(queue.Empty):
            found.append(np.array(answers.get(timeout=_LOOK_S)))
            continue
        codes = [worker.exitcode for worker in workers if worker.exitcode]
        if codes or time.monotonic() > give_up_s:
            end = f"ended with exit code {codes[0]}" if codes else f"took no {_WAIT_S:.0f} s of turns to an end"
            message = f"of {len(workers)} processes that take turns one {end}"
            raise MismatchError(message)
    return found


def _work(path: Path, num_steps: int, size: int, index: int | None, barrier: Any, answers: Any) -> None:
    device = HostDevice(path) if index is None else CudaDevice(path, index=index, memory="sleep")
    place = torch.device("cpu") if index is None else torch.device("cuda", index)
    matrix = torch.zeros(size, size, dtype=torch.float32 if index is None else torch.bfloat16, device=place)
    step = StepWork(num_prefill_tokens=0, num_decodes=1)
    matrix @ matrix  # the library's first call allocates
    barrier.wait(_WAIT_S)
    times = []
    for _ in range(num_steps):
        wanted = time.monotonic()
        device.acquire(is_blocking=True)
        had = time.monotonic()
        end_s = device.begin_step(step, had)
        for _ in range(8):
            matrix @ matrix
        device.finish_step(end_s)
        times.append((wanted, had, time.monotonic()))
        device.release()
        time.sleep(_THINK_S)
    answers.put(times)
    device.close()


def _lengths(times: np.ndarray) -> np.ndarray:
    lengths: np.ndarray = 1e6 * (times[:, 2] - times[:, 1])
    return lengths


def _handovers(turns: Sequence[np.ndarray]) -> np.ndarray:
    """Return how long after one process's turn the other's began, where that one was waiting, in microseconds.

    Raises:
        MismatchError: Two turns overlap.
    """
    rows = sorted((had, gave, wanted, owner) for owner, one in enumerate(turns) for wanted, had, gave in one.tolist())
    found = []
    for (_, gave, _, owner), (had, _, wanted, other) in pairwise(rows):
        if had < gave:
            message = f"two processes had the turn at once, for {1e6 * (gave - had):.0f} us"
            raise MismatchError(message)
        if owner != other and wanted < gave:
            found.append(1e6 * (had - gave))
    if not found:
        message = "neither process ever waited for the other"
        raise MismatchError(message)
    return np.array(found)
