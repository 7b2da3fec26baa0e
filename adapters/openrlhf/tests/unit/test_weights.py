"""Syncs to versions: whole or not at all."""

import asyncio
import threading
from types import SimpleNamespace

import numpy as np
import pytest

from rose.errors import LayoutMismatchError, TransferError, TransportError
from rose.frameworks import StreamedTrainer
from rose_openrlhf.weights import WeightInlet


class Published:
    """A push that keeps what it would publish."""

    def __init__(self, trainer, errors=()):
        self.trainer, self.errors, self.versions, self.sync_errors = trainer, list(errors), [], []

    def push(self):
        if self.errors:
            raise self.errors.pop(0)
        self.versions.append({name: np.array(bits) for name, bits in self.trainer.shards().items()})
        error = self.sync_errors.pop(0) if self.sync_errors else None
        return SimpleNamespace(version=SimpleNamespace(n=len(self.versions) - 1), error=error)


def make(errors=(), retry_s=10.0):
    trainer = StreamedTrainer()
    pushed, reports, clock = Published(trainer, errors), [], [0.0]

    async def rest(seconds):
        clock[0] += seconds

    inlet = WeightInlet(
        copy=trainer, push=pushed, retry_s=retry_s, announce=reports.append, rest=rest, clock=lambda: clock[0]
    )
    return inlet, pushed, reports


def tensor(value):
    return np.full((2, 3), value, dtype=np.float32)


def values(version):
    return {name: float(bits.view(np.float32)[0, 0]) for name, bits in version.items()}


async def sync(inlet, **tensors):
    names = list(tensors)
    for name, value in tensors.items():
        await inlet.take(name, tensor(value), is_last=name == names[-1])


async def test_the_last_tensor_publishes():
    inlet, pushed, reports = make()
    await inlet.take("a", tensor(1), is_last=False)
    assert not pushed.versions
    await inlet.take("b", tensor(2), is_last=True)
    assert [values(version) for version in pushed.versions] == [{"a": 1, "b": 2}]
    assert [report.version.n for report in reports] == [0]


async def test_a_sync_without_changes_is_a_version():
    inlet, pushed, reports = make()
    await sync(inlet, a=1, b=2)
    await sync(inlet, a=1, b=2)
    assert len(pushed.versions) == 2
    assert [report.version.n for report in reports] == [0, 1]


async def test_a_tensor_that_is_missing_publishes_nothing():
    inlet, pushed, _ = make()
    await sync(inlet, a=1, b=2, c=3)
    await inlet.take("a", tensor(5), is_last=False)
    with pytest.raises(LayoutMismatchError, match="b is missing"):
        await inlet.take("c", tensor(5), is_last=True)
    assert len(pushed.versions) == 1
    await sync(inlet, a=7, b=8, c=9)
    assert values(pushed.versions[-1]) == {"a": 7, "b": 8, "c": 9}


async def test_a_tensor_that_does_not_fit_publishes_nothing():
    inlet, pushed, _ = make()
    await sync(inlet, a=1, b=2)
    await inlet.take("a", np.zeros((9,), dtype=np.float32), is_last=False)
    with pytest.raises(LayoutMismatchError, match="a is float32"):
        await inlet.take("b", tensor(5), is_last=True)
    assert len(pushed.versions) == 1


async def test_a_sync_that_was_cut_and_begins_anew():
    inlet, pushed, _ = make()
    await sync(inlet, a=1, b=2, c=3)
    await inlet.take("a", tensor(50), is_last=False)
    await inlet.take("b", tensor(60), is_last=False)  # the rest never comes
    await sync(inlet, a=7, b=8, c=9)
    assert [values(version) for version in pushed.versions] == [{"a": 1, "b": 2, "c": 3}, {"a": 7, "b": 8, "c": 9}]
    assert not [thread for thread in threading.enumerate() if thread.name == "rose-pass"]  # the first one has ended


async def test_a_store_out_of_reach_is_tried_again():
    inlet, pushed, _ = make(errors=[TransportError("away")] * 3)
    await sync(inlet, a=1)
    assert len(pushed.versions) == 1
    inlet, pushed, _ = make(errors=[TransportError("away")] * 30)
    with pytest.raises(TransportError, match="away"):
        await sync(inlet, a=1)
    assert not pushed.versions


@pytest.mark.parametrize("kind", [TransportError, TransferError])
async def test_a_sync_of_the_pool_that_failed_is_the_caller_s_error(kind):
    inlet, pushed, reports = make()
    pushed.sync_errors = [kind("broken")]
    with pytest.raises(kind, match="broken"):
        await sync(inlet, a=1)
    assert len(pushed.versions) == 1  # the push has asked for as long as it should; another version would not do better
    assert not reports
    await sync(inlet, a=2)
    assert [report.version.n for report in reports] == [1]


async def test_one_tensor_is_held_at_a_time():
    inlet, _, _ = make()
    held = []

    class Counting(StreamedTrainer):
        def update(self, pairs):
            def counted():
                for name, value in pairs:
                    held.append(name)
                    yield name, value

            super().update(counted())

    inlet.copy = Counting()
    inlet.push = Published(inlet.copy)
    await asyncio.wait_for(inlet.take("a", tensor(1), is_last=False), 5)
    assert held == ["a"]  # taken when the call returned, not kept for later
    await asyncio.wait_for(inlet.take("b", tensor(1), is_last=True), 5)
    assert held == ["a", "b"]


async def test_a_whole_checkpoint_at_once():
    inlet, pushed, _ = make()
    await inlet.take_all(iter({"a": tensor(1), "b": tensor(2)}.items()))
    await sync(inlet, a=3, b=4)
    assert [values(version) for version in pushed.versions] == [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
