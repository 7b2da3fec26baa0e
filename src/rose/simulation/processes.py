"""Many independent tasks over worker processes.

Invariants: a task is given to one process at a time and has exactly one result; a process that dies loses the task that
it had and nothing else; leaving the iterator, by an error or an interrupt too, ends every process. Workers ignore the
interrupt key, so that the parent alone decides, and end by themselves when the parent is gone.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, Generic, TypeVar

import attrs

T = TypeVar("T")
R = TypeVar("R")

_END_TIMEOUT_S = 5.0


@attrs.frozen
class ProcessDied:
    """In the place of a result: the process that had the task ended with this exit code; negative ones are signals."""

    exit_code: int | None

    @property
    def is_killed(self) -> bool:
        """Whether somebody killed it; mostly the operating system, for want of memory."""
        return self.exit_code == -signal.SIGKILL

    def __str__(self) -> str:
        """Return what happened as one line."""
        if self.is_killed:
            return "its process was killed; if memory ran out, give fewer --jobs"
        return f"its process ended with exit code {self.exit_code}"


def run_parallel(
    function: Callable[[T], R], tasks: Sequence[T], num_processes: int
) -> Generator[tuple[int, R | ProcessDied]]:
    """Yield ``(index of the task, result)`` in the order in which tasks end.

    Args:
        function: Importable by name and not raising; with one process it is called in this one.
        tasks: Anything that pickles; handed out in order.
        num_processes: At most this many at a time.
    """
    if min(num_processes, len(tasks)) <= 1:
        yield from ((index, function(task)) for index, task in enumerate(tasks))
        return
    waiting = iter(enumerate(tasks))
    crew: list[_Worker[T, R]] = []
    try:
        for index, task in _first(waiting, num_processes):
            crew.append(_Worker(function))
            crew[-1].give(index, task)
        while crew:
            ready = wait([worker.connection for worker in crew])
            for worker in [worker for worker in crew if worker.connection in ready]:
                index, result = worker.take()
                following = next(waiting, None)
                is_dead = isinstance(result, ProcessDied)
                if is_dead or following is None:
                    crew.remove(worker)
                    worker.end()
                if following is not None:
                    successor: _Worker[T, R] = _Worker(function) if is_dead else worker
                    if is_dead:
                        crew.append(successor)
                    successor.give(*following)
                yield index, result
    finally:
        for worker in crew:
            worker.end()


def _first(items: Iterator[T], count: int) -> Iterator[T]:
    for _, item in zip(range(count), items, strict=False):
        yield item


class _Worker(Generic[T, R]):
    """A process and this side of its pipe."""

    def __init__(self, function: Callable[[T], R]) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=_work, args=(function, theirs), daemon=True)
        self._process.start()
        theirs.close()  # the process has the only copy now: its death is an end of file here
        self._index = -1

    def give(self, index: int, task: T) -> None:
        self._index = index
        try:
            self.connection.send(task)
        except OSError:
            return  # it is dead, which ``take`` will find

    def take(self) -> tuple[int, R | ProcessDied]:
        try:
            result: R = self.connection.recv()
        except (EOFError, OSError):
            self._process.join(_END_TIMEOUT_S)
            return self._index, ProcessDied(self._process.exitcode)
        return self._index, result

    def end(self) -> None:
        self.connection.close()
        self._process.terminate()
        self._process.join(_END_TIMEOUT_S)
        if self._process.exitcode is None:
            self._process.kill()
            self._process.join()


def _work(function: Callable[[Any], Any], connection: Connection) -> None:
    """Do tasks until the other side is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.dup2(2, 1)  # the parent's standard output is kept for its result
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        result = function(task)
        try:
            connection.send(result)
        except OSError:
            return
