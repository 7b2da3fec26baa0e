from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal

import pytest
from study_standins import work

from rose.simulation.processes import ProcessDied, run_parallel


@pytest.fixture
def children():
    """Return the child processes that came since the test began; other tests' engines may live beside it."""
    others = {child.pid for child in multiprocessing.active_children()}
    return lambda: [child for child in multiprocessing.active_children() if child.pid not in others]


def test_a_process_that_dies_loses_its_own_task_only(children):
    tasks = [1, 3, 2, 4, 8, 9]
    found = list(run_parallel(work, tasks, 2))
    assert sorted(index for index, _ in found) == list(range(6))
    results = dict(found)
    assert results[1] == ProcessDied(-signal.SIGKILL)
    assert results[3] == ProcessDied(7)
    assert "was killed" in str(results[1])
    assert "exit code 7" in str(results[3])
    assert (results[1].is_killed, results[3].is_killed) == (True, False)
    healthy = {index: result for index, result in results.items() if index not in {1, 3}}
    assert {index: value for index, (value, _) in healthy.items()} == {0: 2, 2: 4, 4: 16, 5: 18}
    assert os.getpid() not in {pid for _, pid in healthy.values()}
    assert children() == []


def test_leaving_early_ends_every_process(children):
    with contextlib.closing(run_parallel(work, [1, 6, 6], 2)) as results:
        assert next(results)[0] == 0
        assert len(children()) == 2
    assert children() == []


@pytest.mark.parametrize(("tasks", "num_processes"), [([1, 2], 1), ([1], 8), ([], 4)])
def test_one_process_is_this_one(tasks, num_processes):
    results = list(run_parallel(work, tasks, num_processes))
    assert results == [(index, (2 * task, os.getpid())) for index, task in enumerate(tasks)]
