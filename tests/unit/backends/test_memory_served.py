"""The served memory store: ports, tokens, lost connections, hostile frames."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from rose.backends.memory import MemoryTransport, StoreServer, wire
from rose.backends.memory.store import LocalStore
from rose.backends.memory.wire import Op, Status
from rose.errors import BlobNotFoundError, ConfigError, CorruptUpdateError, TransportError
from rose.registry import open_transport
from rose.testing.links import LinkProxy
from rose.types import TransportAddress


def _client(owner: MemoryTransport, **options: object) -> MemoryTransport:
    return MemoryTransport(**{**dict(owner.address().options), **options})


@pytest.fixture
def owner():
    transport = MemoryTransport()
    transport.serve()
    yield transport
    transport.close()


@pytest.mark.parametrize("num_taken", [0, 20])
def test_fifty_relays_start_at_once(num_taken: int) -> None:
    """Case O01: 50 of 50 listen on distinct ports, also when candidate ports are taken already."""
    taken = [socket.create_server(("127.0.0.1", 0)) for _ in range(num_taken)]
    relays = [MemoryTransport() for _ in range(50)]
    try:
        barrier = threading.Barrier(50)

        def start(relay: MemoryTransport) -> int:
            barrier.wait()
            return int(dict(relay.serve().options)["port"])

        with ThreadPoolExecutor(50) as threads:
            ports = list(threads.map(start, relays))
        assert len(set(ports)) == 50
        assert not set(ports) & {sock.getsockname()[1] for sock in taken}
        for i, relay in enumerate(relays):
            client = _client(relay)
            client.put("who", str(i).encode())
            client.close()
        assert [relay.get("who") for relay in relays] == [str(i).encode() for i in range(50)]
    finally:
        for closing in (*relays, *taken):
            closing.close()


def test_a_taken_port_is_named(owner: MemoryTransport) -> None:
    port = dict(owner.address().options)["port"]
    with pytest.raises(TransportError, match=f"cannot listen on 127.0.0.1:{port}.*0 for a free one"):
        MemoryTransport().serve(port=int(port))


def test_only_loopback_unless_asked() -> None:
    with pytest.raises(TransportError, match="is_public=True"):
        MemoryTransport().serve("0.0.0.0")  # noqa: S104 - refused
    public = MemoryTransport()
    public.serve("0.0.0.0", is_public=True)  # noqa: S104 - asked for
    public.close()


def test_serving_twice_or_from_a_client_is_refused(owner: MemoryTransport) -> None:
    client = _client(owner)
    for transport in (owner, client):
        with pytest.raises(TransportError, match="only the owner"):
            transport.serve()
    client.close()


def test_arguments_name_one_place() -> None:
    for options in ({"host": "h"}, {"local": "x", "host": "h", "port": 1, "token": "t"}):
        with pytest.raises(ConfigError, match="together"):
            MemoryTransport(**options)
    with pytest.raises(TransportError, match="must serve it"):
        MemoryTransport(local="elsewhere")


def test_an_unserved_store_is_found_in_its_own_process() -> None:
    owner = MemoryTransport()
    owner.put("k", b"v")
    second = open_transport(owner.address())
    assert second.get("k") == b"v"
    address = owner.address()
    del owner
    assert second.get("k") == b"v", "whoever opened the store keeps it"
    del second
    with pytest.raises(TransportError):
        open_transport(address)


def test_another_process_reads_and_writes(owner: MemoryTransport) -> None:
    owner.put("in", b"x" * 200_000)
    code = (
        "import json, sys; from rose.backends.memory import MemoryTransport\n"
        "t = MemoryTransport(**json.loads(sys.argv[1]))\n"
        "t.put('out', t.get('in')[::-1] + b'!'); assert t.compare_and_set('p', None, 'q'); t.close()\n"
    )
    subprocess.run([sys.executable, "-c", code, json.dumps(dict(owner.address().options))], check=True, timeout=60)
    assert owner.get("out") == b"x" * 200_000 + b"!"
    assert owner.read_pointer("p") == "q"


def test_a_wrong_token_gets_nothing(owner: MemoryTransport) -> None:
    stranger = _client(owner, token="0" * 32)
    with pytest.raises(TransportError, match="refused the token"):
        stranger.get("k")
    stranger.close()


def test_a_lost_connection_is_opened_again_once(owner: MemoryTransport) -> None:
    client = _client(owner)
    client.put("k", b"v")
    client._store._idle[0].shutdown(socket.SHUT_RDWR)
    assert client.get("k") == b"v"
    client._store._idle[0].shutdown(socket.SHUT_RDWR)
    assert client.compare_and_set("p", None, "a")
    owner.close()
    with pytest.raises(TransportError, match="is its process alive"):
        client.get("k")
    client.close()


def test_a_pointer_set_before_the_answer_was_lost_counts(
    owner: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server applied the first request; its repetition finds the new value and must not report a loss."""
    client = _client(owner)
    client.read_pointer("p")
    real, lost = wire.receive_answer, []

    def lose_one(sock: socket.socket) -> tuple[Status, memoryview] | None:
        answer = real(sock)
        if not lost:
            lost.append(answer)
            message = "the cable was pulled"
            raise ConnectionResetError(message)
        return answer

    monkeypatch.setattr(wire, "receive_answer", lose_one)
    assert client.compare_and_set("p", None, "mine")
    assert lost
    assert not client.compare_and_set("p", None, "again")
    client.close()


def test_the_idle_connections_beside_a_lost_one_are_dropped(owner: MemoryTransport) -> None:
    client = _client(owner)
    beside = client._store._connect(0)
    client.read_pointer("p")
    (lost,) = client._store._idle
    client._store._give_back(beside, 0)
    client._store._idle.reverse()  # the lost one is taken first
    lost.shutdown(socket.SHUT_RDWR)
    assert client.read_pointer("p") is None
    assert beside.fileno() == -1, "it is as old, so it may be lost as well"
    assert len(client._store._idle) == 1
    client.close()


@contextlib.contextmanager
def _unanswered_port() -> Iterator[int]:
    """Give a port where connections are neither taken nor refused: its queue is full."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)  # noqa: FBT003 - positional only
            filler.connect_ex(listener.getsockname())
        yield listener.getsockname()[1]


def test_a_connection_that_nobody_answers_times_out() -> None:
    with _unanswered_port() as port:
        client = MemoryTransport(host="127.0.0.1", port=port, token="t", timeout_s=0.1)  # noqa: S106 - nobody reads it
        with pytest.raises(TransportError, match=r"did not answer GET within 0.1 s"):
            client.get("k")
        assert not client._store._busy


def test_closing_ends_a_request_that_is_connecting() -> None:
    with _unanswered_port() as port, ThreadPoolExecutor(1) as threads:
        client = MemoryTransport(host="127.0.0.1", port=port, token="t", timeout_s=30.0)  # noqa: S106 - nobody reads it
        call = threads.submit(client.read_pointer, "p")
        deadline_s = time.monotonic() + 10
        while not client._store._busy:
            assert time.monotonic() < deadline_s
            time.sleep(0.001)
        client.close()
        with pytest.raises(TransportError, match=r"cannot be reached.*closed while it connected"):
            call.result(timeout=10)
        assert not client._store._busy


@pytest.mark.parametrize("is_repeated", [False, True])
def test_a_request_that_began_before_a_close_opens_no_connection_after_it(
    owner: MemoryTransport, monkeypatch: pytest.MonkeyPatch, *, is_repeated: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = _client(owner, timeout_s=5.0)
        if is_repeated:
            client.read_pointer("p")
            client._store._idle[0].shutdown(socket.SHUT_RDWR)
        client._store._port = deaf.getsockname()[1]
        step = "_drop_idle" if is_repeated else "_reach"
        go_on = getattr(client._store, step)

        def closed_before(*args: int) -> Any:
            client.close()
            return go_on(*args)

        monkeypatch.setattr(client._store, step, closed_before)
        with pytest.raises(TransportError, match="closed while it connected"):
            client.read_pointer("p")
        deaf.settimeout(0.0)
        with pytest.raises(BlockingIOError):
            deaf.accept()


def test_a_request_that_ends_while_the_client_is_closed_leaves_no_connection(
    owner: MemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = _client(owner)
    receive = wire.receive_answer

    def then_closed(sock: socket.socket) -> tuple[Status, memoryview] | None:
        answer = receive(sock)
        client.close()
        return answer

    with monkeypatch.context() as patch:
        patch.setattr(wire, "receive_answer", then_closed)
        assert client.read_pointer("p") is None, "the answer had come"
    assert not client._store._idle
    assert not client._store._busy
    assert client.compare_and_set("p", None, "v"), "the next request opens one"
    assert client.read_pointer("p") == "v"
    client.close()


def test_the_next_address_of_a_host_is_tried(owner: MemoryTransport, monkeypatch: pytest.MonkeyPatch) -> None:
    client = _client(owner)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        refusing = taken.getsockname()
    (found,) = socket.getaddrinfo("127.0.0.1", int(dict(owner.address().options)["port"]), type=socket.SOCK_STREAM)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*found[:4], refusing), found])
    assert client.read_pointer("p") is None
    client.close()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [(*found[:4], refusing)] * 2)
    with pytest.raises(TransportError, match=r"cannot be reached.*refused"):
        client.read_pointer("p")
    assert not client._store._busy


def test_a_silent_server_times_out() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = MemoryTransport(host="127.0.0.1", port=deaf.getsockname()[1], token="t", timeout_s=0.1)  # noqa: S106 - nobody reads it
        with pytest.raises(TransportError, match=r"did not answer GET within 0.1 s"):
            client.get("k")
        client.close()


def _hello(owner: MemoryTransport) -> socket.socket:
    options = dict(owner.address().options)
    sock = socket.create_connection((str(options["host"]), int(options["port"])), timeout=5)
    wire.send_frame(sock, str(options["token"]).encode())
    assert wire.receive_frame(sock) is not None
    return sock


@pytest.mark.parametrize(
    "frame", [b"", b"\x09\0\0\0\0", b"\x02\xff\0\0\0k", bytes([Op.COMPARE_AND_SET]) + b"\0" * 4 + b"\1\0\0"]
)
def test_malformed_requests_are_answered_and_survived(owner: MemoryTransport, frame: bytes) -> None:
    with _hello(owner) as sock:
        wire.send_frame(sock, frame)
        answer = wire.receive_frame(sock)
        assert answer is not None
        assert answer[0] == Status.BAD_REQUEST
        wire.send_frame(sock, wire.request_head(Op.GET, "k"))
        answer = wire.receive_frame(sock)
        assert answer is not None
        assert answer[0] == Status.NOT_FOUND


def test_an_oversized_frame_ends_the_connection_only(owner: MemoryTransport) -> None:
    with _hello(owner) as sock:
        sock.sendall(struct.pack("<Q", wire.MAX_FRAME_BYTES + 1))
        assert wire.receive_frame(sock) is None
    options = dict(owner.address().options)
    with socket.create_connection(("127.0.0.1", int(options["port"])), timeout=5) as sock:
        sock.sendall(struct.pack("<Q", wire.MAX_TOKEN_BYTES + 1))
        assert wire.receive_frame(sock) is None
    client = _client(owner)
    with pytest.raises(BlobNotFoundError):
        client.get("k")
    client.close()


def test_strings_round_trip() -> None:
    values = ["", None, "ä/b", "x" * 1000]
    packed = wire.pack_strings(values)
    assert wire.unpack_strings(memoryview(packed)) == values
    for cut in (1, 3, 5, len(packed) - 1):
        with pytest.raises(ValueError, match=r"cut off|does not fit"):
            wire.unpack_strings(memoryview(packed)[:cut])


def test_closing_twice_is_fine_and_frees_the_port(owner: MemoryTransport) -> None:
    client = _client(owner)
    client.put("k", b"v")
    port = int(dict(owner.address().options)["port"])
    owner.close()
    owner.close()
    client.close()
    again = MemoryTransport()
    again.serve(port=port)
    again.close()


def test_an_address_is_plain_data(owner: MemoryTransport) -> None:
    address = owner.address()
    assert isinstance(address, TransportAddress)
    assert [type(value) for _, value in address.options] == [str, int, str]


def test_a_wait_ends_when_the_blob_comes_and_blocks_nobody(owner: MemoryTransport) -> None:
    client = _client(owner)
    with ThreadPoolExecutor(4) as threads:
        waits = [threads.submit(client.get_when_ready, "k", 30.0) for _ in range(3)]
        assert client.read_pointer("p") is None, "another request goes beside the waits"
        assert not any(wait.done() for wait in waits)
        owner.put("k", b"v" * 100)
        assert [wait.result(timeout=5) for wait in waits] == [b"v" * 100] * 3
    assert owner._store._arrivals == {}
    client.close()


def test_a_wait_for_nothing_ends_in_time(owner: MemoryTransport) -> None:
    client = _client(owner, timeout_s=0.4)
    for timeout_s, least_s, most_s in ((0.0, 0.0, 0.2), (0.6, 0.55, 1.5)):
        started_s = time.monotonic()
        with pytest.raises(BlobNotFoundError, match="'never'"):
            client.get_when_ready("never", timeout_s)
        assert least_s <= time.monotonic() - started_s < most_s
    assert owner._store._arrivals == {}
    client.close()


def test_a_server_that_closes_does_not_wait_for_waiting_clients() -> None:
    owner = MemoryTransport()
    owner.serve()
    client = _client(owner)
    with ThreadPoolExecutor(1) as threads:
        wait = threads.submit(client.get_when_ready, "never", 5.0)
        time.sleep(0.1)
        started_s = time.monotonic()
        owner.close()
        assert time.monotonic() - started_s < 2
        with pytest.raises((TransportError, BlobNotFoundError)):
            wait.result(timeout=10)
    client.close()


def test_closing_a_client_ends_its_requests() -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        client = MemoryTransport(host="127.0.0.1", port=deaf.getsockname()[1], token="t")  # noqa: S106 - nobody reads it
        owner = MemoryTransport()
        owner.serve()
        waiting = _client(owner)
        assert waiting.read_pointer("p") is None
        with ThreadPoolExecutor(2) as threads:
            calls = [threads.submit(waiting.get_when_ready, "never", 30.0), threads.submit(client.get, "k")]
            time.sleep(0.1)
            waiting.close()
            client.close()
            for call in calls:
                with pytest.raises(TransportError):
                    call.result(timeout=5)
        owner.close()


def test_a_slow_reader_holds_up_nobody_and_is_let_go() -> None:
    store = LocalStore()
    store.put("large", bytes(64 << 20))
    server = StoreServer(store, "127.0.0.1", 0, is_public=False, stall_s=0.5)
    client = MemoryTransport(**dict(server.address().options))
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=5) as slow:
            wire.send_frame(slow, server.token.encode())
            assert wire.receive_frame(slow) is not None
            wire.send_frame(slow, wire.request_head(Op.GET, "large"))
            assert len(client.get("large")) == 64 << 20
            deadline_s = time.monotonic() + 10
            while len(server._connections) > 1 and time.monotonic() < deadline_s:
                time.sleep(0.05)
            assert len(server._connections) == 1, "only the client that reads is left"
    finally:
        client.close()
        server.close()


@pytest.mark.parametrize("size", [0, 1, wire.JOIN_BYTES - 1, wire.JOIN_BYTES, wire.JOIN_BYTES + 1, 5 << 20])
def test_bodies_around_every_limit_cross_whole(owner: MemoryTransport, size: int) -> None:
    client = _client(owner)
    payload = (bytes(range(251)) * (size // 251 + 1))[:size]
    client.put("k", payload)
    assert owner.get("k") == payload
    assert client.get("k") == payload
    assert isinstance(client.get("k"), bytes)
    client.close()


def test_a_cut_inside_a_large_body_is_an_error_and_the_next_request_works(owner: MemoryTransport) -> None:
    owner.put("large", bytes(8 << 20))
    with LinkProxy("127.0.0.1", int(dict(owner.address().options)["port"])) as link:
        client = _client(owner, port=link.port)
        link.cut_after_bytes(3 << 20)
        with pytest.raises(TransportError, match=r"inside a frame|cannot be reached"):
            client.get("large")
        assert client.get("large") == bytes(8 << 20)
        client.close()


def test_errors_of_the_served_store_keep_their_kind() -> None:
    class Broken(LocalStore):
        def get(self, key: str) -> bytes:
            kind = {"t": TransportError, "c": CorruptUpdateError, "n": BlobNotFoundError}[key]
            raise kind("about " + key)

    server = StoreServer(Broken(), "127.0.0.1", 0, is_public=False)
    client = MemoryTransport(**dict(server.address().options))
    for key, kind in (("t", TransportError), ("c", CorruptUpdateError), ("n", BlobNotFoundError)):
        with pytest.raises(kind, match=f"about {key}"):
            client.get(key)
    client.close()
    server.close()
