"""Acknowledgements told through a transport."""

from __future__ import annotations

import pytest

from rose.backends.memory import MemoryTransport
from rose.errors import CorruptUpdateError, VersionConflictError
from rose.policies.retention import VersionLease
from rose.transfer.acks import Ack, AckBoard, known_versions, leases_of, read_acks
from rose.types import EngineId, WeightVersion

A, B, C = EngineId("a"), EngineId("b"), EngineId("c")


def ack(n: int | None, expires_unix_s: float = 100.0, run: str = "r") -> Ack:
    return Ack(version=None if n is None else WeightVersion(run, n), expires_unix_s=expires_unix_s)


def test_what_was_written_is_read() -> None:
    store = MemoryTransport()
    assert read_acks(store) == {}
    board = AckBoard(store)
    for acks in ({A: ack(3, 1_700_000_000.125), B: ack(None)}, {A: ack(4)}, {}):
        board.write(acks)
        assert read_acks(store) == acks


def test_a_new_writer_takes_over_and_the_old_one_notices() -> None:
    store = MemoryTransport()
    old, new = AckBoard(store), AckBoard(store)
    old.write({A: ack(1)})
    new.write({A: ack(2)})
    with pytest.raises(VersionConflictError, match="only one pool"):
        old.write({A: ack(1)})
    assert read_acks(store) == {A: ack(2)}
    new.write({A: ack(3)})


def test_a_store_that_has_lost_everything_is_written_anew() -> None:
    store = MemoryTransport()
    board = AckBoard(store)
    board.write({A: ack(1)})
    store._store._pointers.clear()
    board.write({A: ack(2)})
    assert read_acks(store) == {A: ack(2)}


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"schema": "other", "engines": {}}', '{"schema": "rose.acks/1"}',
                                  '{"schema": "rose.acks/1", "engines": {"a": ["r", 1]}}',
                                  '{"schema": "rose.acks/1", "engines": {"a": 1}}'])  # fmt: skip
def test_what_is_no_record_is_refused(text) -> None:
    store = MemoryTransport()
    store.compare_and_set("acks", None, text)
    with pytest.raises(CorruptUpdateError, match="holds no record of acknowledgements"):
        read_acks(store)


def test_an_engine_may_still_read_what_comes_after_its_version() -> None:
    acks = {A: ack(3, 10.0), B: ack(None, 20.0), C: ack(9, 30.0, run="other")}
    assert known_versions(acks, "r") == {"a": 3}
    assert leases_of(acks, "r", 2) == (
        VersionLease(holder="a", n=4, expires_s=10.0),
        VersionLease(holder="b", n=2, expires_s=20.0),
        VersionLease(holder="c", n=2, expires_s=30.0),
    )
