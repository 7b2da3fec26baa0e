"""The transport, trainer, device and clock contracts fail on doubles that are broken in the way each test is about."""

from __future__ import annotations

import asyncio
import itertools
import threading
import time

import attrs
import numpy as np
import pytest

from rose.clocks import MonotonicClock
from rose.errors import BlobNotFoundError, ConfigError, VersionConflictError
from rose.interfaces import Device, ShardSpec, StepWork
from rose.testing import (
    ClockContract,
    DeviceContract,
    FakeTrainer,
    InMemoryTransport,
    ManualClock,
    TrainerContract,
    TrainerRecord,
    TransportContract,
)
from rose.types import TransportAddress

WRONG = (
    AssertionError,
    BlobNotFoundError,
    VersionConflictError,
    ValueError,
    TypeError,
    RuntimeError,
    pytest.fail.Exception,
)


def names(suite):
    return {name.removeprefix("test_") for name in dir(suite) if name.startswith("test_")}


# Transports


class Overwrites(InMemoryTransport):
    def put(self, key, payload):
        self.delete([key])
        super().put(key, payload)


class KeepsSilently(InMemoryTransport):
    def put(self, key, payload):
        try:
            self.get(key)
        except BlobNotFoundError:
            super().put(key, payload)


class RefusesRepeats(InMemoryTransport):
    def put(self, key, payload):
        super().put(key, bytes(payload))
        super().put(key + "/lock", str(time.monotonic_ns()).encode())


class KeepsViews(InMemoryTransport):
    def put(self, key, payload):
        self.views = {**getattr(self, "views", {}), key: payload}

    def get(self, key):
        return bytes(self.views[key])


class Decodes(InMemoryTransport):
    def get(self, key):
        return super().get(key).decode("latin-1")


class Cuts(InMemoryTransport):
    def put(self, key, payload):
        super().put(key, payload[: 1 << 20])


class FindsNothingAsEmpty(InMemoryTransport):
    def get(self, key):
        try:
            return super().get(key)
        except BlobNotFoundError:
            return b""


class DeletesByPrefix(InMemoryTransport):
    def delete(self, keys):
        super().delete([key + suffix for key in keys for suffix in ("", "/other")])


class SetsAlways(InMemoryTransport):
    def compare_and_set(self, name, expected, value):
        return super().compare_and_set(name, self.read_pointer(name), value)


class ChecksThenSets(InMemoryTransport):
    def compare_and_set(self, name, expected, value):
        if self.read_pointer(name) != expected:
            return False
        time.sleep(0.01)
        super().compare_and_set(name, self.read_pointer(name), value)
        return True


class PointersAreBlobs(InMemoryTransport):
    def read_pointer(self, name):
        try:
            return self.get(name).decode()
        except BlobNotFoundError:
            return None


class SharesABuffer(InMemoryTransport):
    def put(self, key, payload):
        self.buffer = bytes(payload)
        time.sleep(0.001)
        super().put(key, self.buffer)


class GivesAnotherStore(InMemoryTransport):
    def address(self):
        self.other = InMemoryTransport()
        return self.other.address()


class ClosesOnce(InMemoryTransport):
    def close(self):
        self.closed = getattr(self, "closed", 0) + 1
        if self.closed > 1:
            raise RuntimeError


TRANSPORT_BITES = [
    (Decodes, "get_returns_what_was_put"),
    (Cuts, "empty_and_large_blobs"),
    (KeepsViews, "views_are_taken_as_they_are_now"),
    (FindsNothingAsEmpty, "a_missing_key_is_not_found"),
    (RefusesRepeats, "the_same_bytes_again_are_a_no_op"),
    (Overwrites, "other_bytes_are_refused"),
    (KeepsSilently, "other_bytes_are_refused"),
    (DeletesByPrefix, "delete_removes_and_ignores_unknown_keys"),
    (SetsAlways, "the_pointer_moves_by_its_old_value_only"),
    (PointersAreBlobs, "pointers_and_blobs_do_not_meet"),
    (ChecksThenSets, "one_of_many_wins_the_pointer"),
    (SharesABuffer, "threads_do_not_disturb_each_other"),
    (GivesAnotherStore, "another_opens_the_same_store"),
    (ClosesOnce, "close_may_come_twice"),
]


@pytest.mark.parametrize(("broken", "test"), TRANSPORT_BITES, ids=lambda value: getattr(value, "__name__", value))
def test_the_transport_contract_bites(broken, test):
    class Suite(TransportContract):
        def make_transport(self):
            return broken()

    check = getattr(Suite(), f"test_{test}")
    arguments = () if test == "close_may_come_twice" else (broken(), f"bites/{test}")
    with pytest.raises(WRONG):
        check(*arguments)


def test_every_transport_test_bites():
    assert {test for _, test in TRANSPORT_BITES} == names(TransportContract)


# Trainers: broken records of sound ranks


def group():
    return [TrainerRecord.of(trainer) for trainer in FakeTrainer.group(3)]


def change(ranks, index, **changes):
    ranks[index] = attrs.evolve(ranks[index], **changes)
    return ranks


def with_item(mapping, name, value):
    return {**mapping, name: value}


EMBED, NORM = "model.embed_tokens.weight", "model.norm.weight"


def same_rank_twice(ranks):
    return change(ranks, 1, rank=0)


def another_order(ranks):
    return change(ranks, 2, tensor_specs=dict(reversed(ranks[2].tensor_specs.items())))


def overlapping(ranks):
    return change(ranks, 1, boxes=with_item(ranks[1].boxes, NORM, ShardSpec(offset=(0,), shape=(1,))))


def a_hole(ranks):
    return change(ranks, 1, boxes={name: box for name, box in ranks[1].boxes.items() if name != NORM})


def values_for_bits(ranks):
    return change(ranks, 0, bits=with_item(ranks[0].bits, EMBED, ranks[0].bits[EMBED].astype(np.float32)))


def flat_bits(ranks):
    return change(ranks, 0, bits=with_item(ranks[0].bits, EMBED, ranks[0].bits[EMBED].reshape(-1)))


class ReadingChanges(FakeTrainer):
    def shards(self):
        self.step(0.5)
        return super().shards()


def restless(ranks):
    return [ReadingChanges()]


class Shifted:
    """Bits whose slices all begin at the first row."""

    def __init__(self, bits):
        self.shape, self.dtype, self._bits = bits.shape, bits.dtype, bits

    def __getitem__(self, index):
        rows = index[0].stop - index[0].start
        return self._bits[(slice(0, rows), *index[1:])]


def slices_from_the_start(ranks):
    return change(ranks, 0, bits=with_item(ranks[0].bits, EMBED, Shifted(ranks[0].bits[EMBED])))


def step_without_effect(ranks):
    return ranks


TRAINER_BITES = [
    (same_rank_twice, "ranks_are_numbered"),
    (another_order, "every_rank_names_the_same_tensors"),
    (overlapping, "boxes_cover_every_element_once"),
    (a_hole, "boxes_cover_every_element_once"),
    (values_for_bits, "shards_are_the_bits_of_the_boxes"),
    (flat_bits, "shards_are_the_bits_of_the_boxes"),
    (restless, "reading_changes_nothing"),
    (slices_from_the_start, "slices_are_parts_of_the_box"),
    (step_without_effect, "a_step_shows"),
]


class TrainerSuite(TrainerContract):
    def make_trainers(self):
        return group()

    def step(self, trainers):
        return trainers


@pytest.mark.parametrize(("spoil", "test"), TRAINER_BITES, ids=lambda value: getattr(value, "__name__", value))
def test_the_trainer_contract_bites(spoil, test):
    with pytest.raises(AssertionError):
        getattr(TrainerSuite(), f"test_{test}")(spoil(group()))


def test_every_trainer_test_bites():
    assert {test for _, test in TRAINER_BITES} == names(TrainerContract)


# Devices


class SoundDevice(Device):
    """A device in this process whose steps take a hundredth of a millisecond a token."""

    def __init__(self, lock=None):
        self.device_id = "sound"
        self.clock = MonotonicClock()
        self.lock = lock or threading.Lock()
        self.is_held = False

    def acquire(self, *, is_blocking):
        self.is_held = self.is_held or self.lock.acquire(blocking=is_blocking)
        return self.is_held

    def release(self):
        if self.is_held:
            self.lock.release()
        self.is_held = False

    def predict_s(self, work):
        return 1e-5 * (work.num_prefill_tokens + work.num_decodes)

    def begin_step(self, work, ready_at_s):
        return max(ready_at_s, self.clock.now()) + self.predict_s(work)

    def finish_step(self, end_s):
        while self.clock.now() < end_s:
            time.sleep(1e-5)
        return self.clock.now() - end_s

    def give_pages(self, address, num_bytes):
        return 0


class NotReentrant(SoundDevice):
    def acquire(self, *, is_blocking):
        return not self.is_held and super().acquire(is_blocking=is_blocking)


class NotExclusive(SoundDevice):
    def acquire(self, *, is_blocking):
        return True


class FasterWithMoreWork(SoundDevice):
    def predict_s(self, work: StepWork):
        return 1.0 / (1 + work.num_decodes)


class EndsEarly(SoundDevice):
    def finish_step(self, end_s):
        return 0.0


class EndsBeforeItStarts(SoundDevice):
    def begin_step(self, work, ready_at_s):
        return ready_at_s - 1.0


class GivesTooMuch(SoundDevice):
    def give_pages(self, address, num_bytes):
        return num_bytes * 2


DEVICE_BITES = [
    (NotReentrant, "the_turn_is_reentrant"),
    (NotExclusive, "one_holder_at_a_time"),
    (FasterWithMoreWork, "more_work_takes_no_less_time"),
    (EndsEarly, "steps_follow_each_other"),
    (EndsBeforeItStarts, "steps_follow_each_other"),
    (GivesTooMuch, "given_pages_are_lost_and_usable_again"),
]


class TestSoundDevice(DeviceContract):
    device_class = SoundDevice

    def make_device(self):
        return self.device_class()

    def make_contender(self, device):
        return self.device_class(device.lock)


@pytest.mark.parametrize(("broken", "test"), DEVICE_BITES, ids=lambda value: getattr(value, "__name__", value))
def test_the_device_contract_bites(broken, test, monkeypatch):
    monkeypatch.setattr(TestSoundDevice, "device_class", broken)
    with pytest.raises(AssertionError):
        getattr(TestSoundDevice(), f"test_{test}")(broken())


def test_every_device_test_bites():
    assert {test for _, test in DEVICE_BITES} == names(DeviceContract)


# Clocks


class GoesBack(MonotonicClock):
    readings = itertools.count(0, -1)

    def now(self):
        return float(next(self.readings))


class SleepsHalf(ManualClock):
    async def sleep(self, duration_s):
        await super().sleep(duration_s / 2)


class RefusesThePast(MonotonicClock):
    async def sleep(self, duration_s):
        if duration_s <= 0:
            raise ValueError
        await super().sleep(duration_s)


class LastInFirstOut(MonotonicClock):
    order = ()

    async def sleep(self, duration_s):
        if duration_s < 0.03:
            await super().sleep(0.05)
        await super().sleep(duration_s)


class CancelsAll(MonotonicClock):
    shared = None

    async def sleep(self, duration_s):
        CancelsAll.shared = CancelsAll.shared or asyncio.ensure_future(super().sleep(duration_s))
        await CancelsAll.shared


CLOCK_BITES = [
    (GoesBack, "now_never_goes_back"),
    (SleepsHalf, "sleep_lasts_at_least_as_long"),
    (RefusesThePast, "zero_and_negative_sleeps_return"),
    (LastInFirstOut, "sleepers_wake_in_order"),
    (CancelsAll, "a_cancelled_sleep_leaves_the_clock_whole"),
]


@pytest.mark.parametrize(("broken", "test"), CLOCK_BITES, ids=lambda value: getattr(value, "__name__", value))
async def test_the_clock_contract_bites(broken, test):
    class Suite(ClockContract):
        def make_clock(self):
            return broken()

        async def let_pass(self, clock, duration_s):
            await (clock.advance if isinstance(clock, ManualClock) else clock.sleep)(duration_s)

    with pytest.raises((AssertionError, ValueError, asyncio.CancelledError)):
        await getattr(Suite(), f"test_{test}")()


def test_every_clock_test_bites():
    assert {test for _, test in CLOCK_BITES} == names(ClockContract)


@pytest.mark.parametrize(
    ("suite", "factory"),
    [
        (TransportContract, "make_transport"),
        (TrainerContract, "make_trainers"),
        (DeviceContract, "make_device"),
        (ClockContract, "make_clock"),
    ],
)
def test_a_misspelt_factory_is_named(suite, factory):
    class Misspelt(suite):
        def make_it(self):
            return None

    with pytest.raises(NotImplementedError, match=rf"override {factory}\(\)"):
        getattr(Misspelt(), factory)()


def test_a_store_without_an_entry_point_is_told_what_to_override():
    class Nameless(InMemoryTransport):
        def address(self):
            return TransportAddress(name="nameless", options=())

    with pytest.raises(ConfigError, match="install the backend's entry point, or override open_second"):
        TransportContract().open_second(Nameless())
