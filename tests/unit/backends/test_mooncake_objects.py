"""The Mooncake transport's own logic, over a double with the store's documented silences."""

from __future__ import annotations

import builtins
import ctypes
import os
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from rose.backends.mooncake import MooncakeTransport, library, objects
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
    put_codes: ClassVar[list[int]] = []
    get_codes: ClassVar[list[int]] = []
    exist_code: int | None = None

    def setup(self, *args: object) -> int:
        self.setup_args = args
        self.registered: set[int] = set()
        return self.setup_code

    def get_hostname(self) -> str:
        return "127.0.0.1:7"

    def register_buffer(self, pointer: int, size: int) -> int:
        self.registered.add(pointer)
        return 0

    def unregister_buffer(self, pointer: int) -> int:
        self.registered.remove(pointer)
        return 0

    def is_exist(self, key: str) -> int:
        return int(key in self.shared) if self.exist_code is None else self.exist_code

    def put_from(self, key: str, pointer: int, size: int, config: SimpleNamespace) -> int:
        assert config.with_hard_pin, "an unpinned object may be evicted"
        if self.put_codes:
            return self.put_codes.pop(0)
        self.shared.setdefault(key, ctypes.string_at(pointer, size))
        return 0

    def get_into(self, key: str, pointer: int, size: int) -> int:
        if self.get_codes:
            return self.get_codes.pop(0)
        if key not in self.shared:
            return -704
        data = self.shared[key]
        if len(data) > size:
            return -600
        ctypes.memmove(pointer, data, len(data))
        return len(data)

    def get_into_ranges(self, pointers: list[int], keys: object, _to: object, _from: object, sizes: object) -> object:
        assert pointers[0] in self.registered, "ranges are read into registered memory only"
        [[key]], [[[size]]] = keys, sizes
        ctypes.memmove(pointers[0], self.shared[key], size)
        return [[[size]]]

    def remove(self, key: str, force: bool) -> int:  # noqa: FBT001 - as the binding has it
        if not force:
            return -706
        return 0 if self.shared.pop(key, None) is not None else -704

    def close(self) -> int:
        assert not self.registered
        return 0


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    blobs: dict[str, bytes] = {}
    store = type("Store", (SilentStore,), {"shared": blobs})
    library = SimpleNamespace(MooncakeDistributedStore=store, ReplicateConfig=SimpleNamespace)
    monkeypatch.setattr(objects, "load_library", lambda: library)
    monkeypatch.setattr(objects, "check_reachable", lambda *args: None)
    monkeypatch.setattr(transport_module, "CHUNK_BYTES", 10)
    monkeypatch.setattr(transport_module, "INLINE_BYTES", 4)
    return blobs


def _open(retry_s: float = 0.05) -> MooncakeTransport:
    return MooncakeTransport(master="m:1", retry_s=retry_s)


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
    for size in (0, 4, 5, 10, 11, 35):
        transport.put(f"k{size}", bytes(range(size)))
        assert transport.get(f"k{size}") == bytes(range(size))
    assert sum(key.startswith("chunk/k35/") for key in shared) == 4
    assert not any(key.startswith(("chunk/k0/", "chunk/k4/")) for key in shared), "a small blob is one object"
    transport.delete([f"k{size}" for size in (0, 4, 5, 10, 11, 35, 99)])
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
    transport.put("small", b"abc")
    shared["claim/small"] = shared["claim/small"][:-1] + b"d"
    with pytest.raises(CorruptUpdateError, match="other bytes"):
        transport.get("small")
    shared["claim/small"] = b"not ROSE's"
    with pytest.raises(CorruptUpdateError, match="no claim of ROSE's"):
        transport.get("small")


def test_claims_larger_than_a_quick_read_are_read_back_by_their_start(
    shared: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport_module, "INLINE_BYTES", 512 << 10)
    first, second = _open(), _open()
    payload = bytes(range(256)) * 512
    first.put("k", payload)
    assert len(shared) == 1
    assert second.get("k") == payload
    with pytest.raises(VersionConflictError, match="131072 other bytes"):
        second.put("k", payload[1:] + b"x")
    first.close()
    second.close()


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
    transport = _open(retry_s=0.0)
    monkeypatch.setattr(SilentStore, "put_codes", [-200, -7])
    with pytest.raises(TransportError, match=r"no room for the 37 bytes of 'claim/k'.*segment_bytes=0"):
        transport.put("k", b"v")
    with pytest.raises(TransportError, match=r"could not put 37 bytes as 'claim/k' \(code -7\)"):
        transport.put("k", b"v")
    monkeypatch.setattr(SilentStore, "get_codes", [-901])
    with pytest.raises(TransportError, match=r"could not get .*code -901: the master does not answer"):
        transport.get("k")
    monkeypatch.setattr(SilentStore, "exist_code", -900)
    with pytest.raises(TransportError, match=r"could not look up .*code -900"):
        transport.read_pointer("p")
    monkeypatch.setattr(SilentStore, "setup_code", -1)
    with pytest.raises(TransportError, match="cannot join"):
        _open()


@pytest.mark.usefixtures("shared")
def test_what_passes_by_itself_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = _open(retry_s=5.0)
    monkeypatch.setattr(SilentStore, "put_codes", [-800, -900])
    transport.put("k", b"v")
    assert not SilentStore.put_codes
    monkeypatch.setattr(SilentStore, "get_codes", [-703, -800, -901])
    assert transport.get("k") == b"v"
    assert not SilentStore.get_codes


@pytest.mark.usefixtures("shared")
def test_what_does_not_pass_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    transport = _open(retry_s=0.2)
    monkeypatch.setattr(SilentStore, "get_codes", [-800] * 1000)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"tried for 0\.2 s"):
        transport.get("k")
    assert time.monotonic() - started < 1.0
    assert len(SilentStore.get_codes) > 900, "the pauses do not grow"
    monkeypatch.setattr(SilentStore, "get_codes", [-703] * 1000)
    with pytest.raises(BlobNotFoundError):
        transport.get("k")


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

    monkeypatch.setattr(library.importlib, "import_module", lambda name: absent(name))
    with pytest.raises(
        BackendUnavailableError, match=r"libibverbs.so.1.*rose-rl\[mooncake\].*apt-get install libibverbs1"
    ):
        MooncakeTransport(master="m:1")


@pytest.mark.parametrize("master", ["127.0.0.1:1", "nonsense"])
def test_an_unreachable_master_is_named_at_once(monkeypatch: pytest.MonkeyPatch, master: str) -> None:
    monkeypatch.setattr(objects, "load_library", lambda: None)
    with pytest.raises(TransportError, match=f"{master}.*is mooncake_master running there"):
        MooncakeTransport(master=master)


@pytest.mark.usefixtures("shared")
def test_the_library_finds_its_settings_and_the_users_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_RPC_TIMEOUT_MS", "1234")
    for name in ("MC_TCP_STATUS_TIMEOUT_SEC", "MC_TCP_BIND_ADDRESS"):
        monkeypatch.setenv(name, "")  # so that it is taken back afterwards
        monkeypatch.delenv(name)
    MooncakeTransport(master="m:1", hostname="10.0.0.7:5")
    assert os.environ["MC_RPC_TIMEOUT_MS"] == "1234"
    assert os.environ["MC_TCP_STATUS_TIMEOUT_SEC"] == "10"
    assert os.environ["MC_TCP_BIND_ADDRESS"] == "10.0.0.7"


@pytest.mark.usefixtures("shared")
def test_other_protocols_get_their_buffers_registered() -> None:
    transport = MooncakeTransport(master="m:1", protocol="rdma")
    transport.put("k", bytes(25))
    assert transport.get("k") == bytes(25)
    assert transport._objects._store.setup_args[4] == "rdma"
    transport.close()  # the double checks that nothing stays registered


@pytest.mark.parametrize(
    ("address", "parts"),
    [("h:1", ("h", "1")), ("h", ("h", "")), ("[::1]:5", ("::1", "5")), ("::1", ("::1", "")), ("[::1]", ("::1", ""))],
)
def test_addresses_split_into_host_and_port(address: str, parts: tuple[str, str]) -> None:
    assert library.split_address(address) == parts
