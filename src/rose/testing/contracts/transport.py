"""What every transport must do; see ``rose.interfaces.transport``."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from rose.errors import BlobNotFoundError, ConfigError, VersionConflictError
from rose.interfaces.transport import Transport
from rose.registry import open_transport

_NUM_THREADS = 8


class TransportContract:
    """Subclass it and override ``make_transport``. Keys are fresh in every test, so a store may be shared.

    Attributes:
        large_bytes: Size of the large blob; make it larger than any internal buffer.
    """

    large_bytes: int = 3 * 1024 * 1024 + 17

    def make_transport(self) -> Transport:
        """Return an open transport."""
        message = "override make_transport() and return an open transport"
        raise NotImplementedError(message)

    def open_second(self, transport: Transport) -> Transport:
        """Open the same store as another process would: by its address, which needs the backend's entry point."""
        try:
            return open_transport(transport.address())
        except ConfigError as error:
            message = f"{error}; install the backend's entry point, or override open_second()"
            raise ConfigError(message) from error

    @pytest.fixture
    def transport(self) -> Iterator[Transport]:
        """Give a transport for the length of one test."""
        transport = self.make_transport()
        yield transport
        transport.close()

    @pytest.fixture
    def key(self) -> str:
        """Return a key that no other test uses, with the characters that keys are made of."""
        return f"contract/{uuid.uuid4().hex}:1-a_b.c"

    def test_get_returns_what_was_put(self, transport: Transport, key: str) -> None:
        """Bytes come back as they were, whatever they are. Look at text encodings and at zero bytes."""
        payload = bytes(range(256)) * 3
        transport.put(key, payload)
        got = transport.get(key)
        assert isinstance(got, bytes)
        assert got == payload

    def test_empty_and_large_blobs(self, transport: Transport, key: str) -> None:
        """No bytes is a blob too, and a large one is neither cut nor padded. Look at internal buffer sizes."""
        large = bytes(i * 131 % 251 for i in range(1021)) * (self.large_bytes // 1021 + 1)
        transport.put(key, b"")
        transport.put(key + "/large", large[: self.large_bytes])
        assert transport.get(key) == b""
        assert transport.get(key + "/large") == large[: self.large_bytes]

    def test_views_are_taken_as_they_are_now(self, transport: Transport, key: str) -> None:
        """A ``memoryview`` of any item size is its bytes, and changing its buffer later changes nothing that was put."""
        buffer = bytearray(b"abcdefgh")
        transport.put(key, memoryview(buffer).cast("I"))
        buffer[:] = b"ABCDEFGH"
        assert transport.get(key) == b"abcdefgh"

    def test_a_missing_key_is_not_found(self, transport: Transport, key: str) -> None:
        """``BlobNotFoundError``, never empty bytes and never a wait."""
        with pytest.raises(BlobNotFoundError):
            transport.get(key)

    def test_the_same_bytes_again_are_a_no_op(self, transport: Transport, key: str) -> None:
        """A retried ``put`` is legal."""
        transport.put(key, b"same")
        transport.put(key, b"same")
        assert transport.get(key) == b"same"

    def test_other_bytes_are_refused(self, transport: Transport, key: str) -> None:
        """A key is written once; the first bytes stay. A store that silently keeps or replaces them breaks updates."""
        transport.put(key, b"first")
        for other in (b"second", b"firs", b""):
            with pytest.raises(VersionConflictError):
                transport.put(key, other)
        assert transport.get(key) == b"first"

    def test_delete_removes_and_ignores_unknown_keys(self, transport: Transport, key: str) -> None:
        """Deleting twice, or what was never there, is no error; other keys stay; the key may be written again."""
        transport.put(key, b"gone")
        transport.put(key + "/other", b"stays")
        transport.delete([key, key + "/never"])
        transport.delete([key])
        with pytest.raises(BlobNotFoundError):
            transport.get(key)
        assert transport.get(key + "/other") == b"stays"
        transport.put(key, b"again")
        assert transport.get(key) == b"again"

    def test_the_pointer_moves_by_its_old_value_only(self, transport: Transport, key: str) -> None:
        """Unset is ``None``; a wrong expectation changes nothing. Look at a check and a write that are not one step."""
        assert transport.read_pointer(key) is None
        assert not transport.compare_and_set(key, "0", "1")
        assert transport.read_pointer(key) is None
        assert transport.compare_and_set(key, None, "1")
        assert not transport.compare_and_set(key, None, "2")
        assert not transport.compare_and_set(key, "0", "2")
        assert transport.read_pointer(key) == "1"
        assert transport.compare_and_set(key, "1", "2")
        assert transport.read_pointer(key) == "2"

    def test_pointers_and_blobs_do_not_meet(self, transport: Transport, key: str) -> None:
        """A pointer and a blob of one name are two things."""
        transport.put(key, b"blob")
        assert transport.read_pointer(key) is None
        assert transport.compare_and_set(key, None, "pointer")
        assert transport.get(key) == b"blob"

    def test_one_of_many_wins_the_pointer(self, transport: Transport, key: str) -> None:
        """Of concurrent compare-and-sets from one old value exactly one succeeds, and its value stands."""
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            won = list(threads.map(lambda i: transport.compare_and_set(key, None, str(i)), range(_NUM_THREADS)))
        assert won.count(True) == 1
        assert transport.read_pointer(key) == str(won.index(True))

    def test_threads_do_not_disturb_each_other(self, transport: Transport, key: str) -> None:
        """Trainer ranks and engine threads call one object at a time of their own choosing."""

        def round_trip(i: int) -> bool:
            payload = bytes([i]) * 10_000
            transport.put(f"{key}/{i}", payload)
            return transport.get(f"{key}/{i}") == payload

        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            assert all(threads.map(round_trip, range(4 * _NUM_THREADS)))

    def test_another_opens_the_same_store(self, transport: Transport, key: str) -> None:
        """``address()`` is all that another process needs: blobs and pointers are seen both ways."""
        second = self.open_second(transport)
        try:
            transport.put(key, b"here")
            assert second.get(key) == b"here"
            assert second.compare_and_set(key, None, "there")
            assert transport.read_pointer(key) == "there"
            with pytest.raises(VersionConflictError):
                second.put(key, b"other")
        finally:
            second.close()
        assert transport.get(key) == b"here", "closing one handle closed the store for the other"

    def test_close_may_come_twice(self) -> None:
        """``close`` is idempotent."""
        transport = self.make_transport()
        transport.close()
        transport.close()
