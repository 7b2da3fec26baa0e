"""The Mooncake transport's own logic, over a double with the store's documented silences."""

from __future__ import annotations

import builtins
import ctypes
import threading
from types import SimpleNamespace

import pytest

from rose.backends.mooncake import MooncakeTransport, objects
from rose.backends.mooncake import transport as transport_module
from rose.errors import (
    BackendUnavailableError,
    BlobNotFoundError,
    CorruptUpdateError,
    TransportError,
    VersionConflictError,
)


class SilentStore:
    """Keeps the old value on a second put, answers a missing get with no bytes, refuses unforced removal."""

    shared: dict[str, bytes]
    setup_code = 0
    put_code = 0
    exist_code: int | None = None

    def setup(self, *args: object) -> int:
        self.setup_args = args
        return self.setup_code

    def put(self, key: str, value: bytes, config: SimpleNamespace) -> int:
        assert config.with_hard_pin, "an unpinned object may be evicted"
        if self.put_code:
            return self.put_code
        self.shared.setdefault(key, bytes(value))
        return 0

    def get(self, key: str) -> bytes:
        return self.shared.get(key, b"")

    def is_exist(self, key: str) -> int:
        return int(key in self.shared) if self.exist_code is None else self.exist_code

    def put_from(self, key: str, pointer: int, size: int, config: SimpleNamespace) -> int:
        return self.put(key, ctypes.string_at(pointer, size), config)

    def get_into(self, key: str, pointer: int, size: int) -> int:
        if key not in self.shared:
            return -704
        data = self.shared[key][:size]
        ctypes.memmove(pointer, data, len(data))
        return len(data)

    def remove(self, key: str, force: bool) -> int:  # noqa: FBT001 - as the binding has it
        if not force:
            return -706
        return 0 if self.shared.pop(key, None) is not None else -704

    def close(self) -> int:
        return 0


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    blobs: dict[str, bytes] = {}
    store = type("Store", (SilentStore,), {"shared": blobs})
    library = SimpleNamespace(MooncakeDistributedStore=store, ReplicateConfig=SimpleNamespace)
    monkeypatch.setattr(objects, "load_library", lambda: library)
    monkeypatch.setattr(objects, "_check_reachable", lambda master: None)
    monkeypatch.setattr(objects, "_READBACK_S", 0.01)
    monkeypatch.setattr(transport_module, "CHUNK_BYTES", 10)
    return blobs


def _open() -> MooncakeTransport:
    return MooncakeTransport(master="m:1")


@pytest.mark.usefixtures("shared")
def test_a_silent_second_put_is_made_loud() -> None:
    first, second = _open(), _open()
    first.put("k", b"bytes of the first")
    first.put("k", b"bytes of the first")
    with pytest.raises(VersionConflictError, match="18 other bytes"):
        second.put("k", b"bytes of another one")
    assert second.get("k") == b"bytes of the first"


def test_blobs_are_cut_into_chunks_and_removed_whole(shared: dict[str, bytes]) -> None:
    transport = _open()
    for size in (0, 9, 10, 11, 35):
        transport.put(f"k{size}", bytes(range(size)))
        assert transport.get(f"k{size}") == bytes(range(size))
    assert sum(key.startswith("chunk/k35/") for key in shared) == 4
    transport.delete([f"k{size}" for size in (0, 9, 10, 11, 35, 99)])
    assert not shared


def test_a_blob_that_is_not_whole_is_not_found(shared: dict[str, bytes]) -> None:
    transport = _open()
    transport.put("k", bytes(25))
    del shared["chunk/k/1"]
    with pytest.raises(BlobNotFoundError):
        transport.get("k")
    transport.delete(["k"])
    assert not shared


def test_bytes_that_changed_in_the_store_are_noticed(shared: dict[str, bytes]) -> None:
    transport = _open()
    transport.put("k", bytes(25))
    shared["chunk/k/1"] = b"\1" + bytes(9)
    with pytest.raises(CorruptUpdateError, match="other bytes"):
        transport.get("k")
    shared["chunk/k/1"] = bytes(3)
    with pytest.raises(TransportError, match="code 3"):
        transport.get("k")


@pytest.mark.parametrize("num_set", [1, 2, 3, 7, 8, 9, 100])
def test_a_newcomer_finds_the_newest_generation(shared: dict[str, bytes], num_set: int) -> None:
    writer = _open()
    for g in range(num_set):
        assert writer.compare_and_set("p", str(g - 1) if g else None, str(g))
    assert _open().read_pointer("p") == str(num_set - 1)
    assert len(shared) == num_set


@pytest.mark.usefixtures("shared")
def test_one_writer_wins_even_with_equal_values() -> None:
    """Two set the same value at once: the nonce tells whose it is, so only one may think that it moved the pointer."""
    transports = [_open() for _ in range(4)]
    barrier, won = threading.Barrier(4), []

    def race(transport: MooncakeTransport) -> None:
        barrier.wait()
        won.append(transport.compare_and_set("p", None, "same"))

    threads = [threading.Thread(target=race, args=(transport,)) for transport in transports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(won) == [False, False, False, True]


def test_a_restarted_master_has_forgotten_its_pointers(shared: dict[str, bytes]) -> None:
    transport = _open()
    for g in range(5):
        transport.compare_and_set("p", str(g - 1) if g else None, str(g))
    assert transport.read_pointer("p") == "4"
    shared.clear()
    assert transport.read_pointer("p") is None
    assert transport.compare_and_set("p", None, "again")
    assert transport.read_pointer("p") == "again"


@pytest.mark.usefixtures("shared")
def test_failures_say_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = _open()
    monkeypatch.setattr(SilentStore, "put_code", -200)
    with pytest.raises(TransportError, match=r"could not put .*code -200.*segment_bytes"):
        transport.put("k", b"v")
    monkeypatch.setattr(SilentStore, "exist_code", -900)
    with pytest.raises(TransportError, match=r"could not look up .*code -900"):
        transport.get("k")
    monkeypatch.setattr(SilentStore, "setup_code", -1)
    with pytest.raises(TransportError, match="cannot join"):
        _open()


@pytest.mark.usefixtures("shared")
def test_an_address_gives_no_memory() -> None:
    transport = MooncakeTransport(master="m:1", segment_bytes=1 << 20)
    second = MooncakeTransport(**dict(transport.address().options))
    assert second._objects._store.setup_args[2] == 0
    assert transport._objects._store.setup_args[2] == 1 << 20
    transport.close()
    transport.close()


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def absent(name: str, *args: object) -> object:
        if name.startswith("mooncake"):
            message = "libibverbs.so.1: cannot open shared object file"
            raise ImportError(message)
        return real(name, *args)

    monkeypatch.setattr(objects.importlib, "import_module", lambda name: absent(name))
    with pytest.raises(
        BackendUnavailableError, match=r"libibverbs.so.1.*rose-rl\[mooncake\].*apt-get install libibverbs1"
    ):
        MooncakeTransport(master="m:1")


@pytest.mark.parametrize("master", ["127.0.0.1:1", "nonsense"])
def test_an_unreachable_master_is_named_at_once(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setattr(objects, "load_library", lambda: None)
    with pytest.raises(TransportError, match=f"{master}.*is mooncake_master running there"):
        MooncakeTransport(master=master)
