"""The link model: rate, delay, and everything that goes wrong on a link."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rose.backends.memory import MemoryTransport
from rose.errors import TransportError
from rose.testing.links import LinkProxy, NamespacePair, why_unavailable


@pytest.fixture
def origin():
    transport = MemoryTransport()
    transport.serve()
    yield transport
    transport.close()


def _port(origin: MemoryTransport) -> int:
    return int(dict(origin.address().options)["port"])


def _client(origin: MemoryTransport, link: LinkProxy) -> MemoryTransport:
    return MemoryTransport(**{**dict(origin.address().options), "port": link.port})


def test_bytes_cross_unchanged_and_are_counted(origin: MemoryTransport) -> None:
    payload = os.urandom(3 << 20)
    with LinkProxy("127.0.0.1", _port(origin)) as link:
        client = _client(origin, link)
        client.put("k", payload)
        assert client.get("k") == payload == origin.get("k")
        for crossed in (link.bytes_up, link.bytes_down):
            assert len(payload) < crossed < len(payload) + 1000
        client.close()


@pytest.mark.parametrize("num_connections", [1, 3])
def test_the_rate_is_kept_by_all_connections_together(origin: MemoryTransport, num_connections: int) -> None:
    for i in range(num_connections):
        origin.put(str(i), bytes((6 << 20) // num_connections))
    with LinkProxy("127.0.0.1", _port(origin), bytes_per_s=20e6) as link:
        client = _client(origin, link)
        started_s = time.monotonic()
        with ThreadPoolExecutor(num_connections) as threads:
            list(threads.map(client.get, map(str, range(num_connections))))
        took_s = time.monotonic() - started_s
        assert 0.9 * (6 << 20) / 20e6 < took_s < 3 * (6 << 20) / 20e6, "never faster; slower only on a busy machine"
        client.close()


def test_the_delay_is_one_way_and_does_not_limit_the_rate(origin: MemoryTransport) -> None:
    origin.put("k", bytes(8 << 20))
    with LinkProxy("127.0.0.1", _port(origin), bytes_per_s=100e6, delay_s=0.05) as link:
        client = _client(origin, link)
        client.read_pointer("warm")
        started_s = time.monotonic()
        client.read_pointer("p")
        assert 0.1 <= time.monotonic() - started_s < 0.5
        started_s = time.monotonic()
        client.get("k")
        assert time.monotonic() - started_s < 1.0, "one trip and the time of the bytes, not one trip a piece"
        client.close()


def test_a_cut_at_a_byte_lets_exactly_the_bytes_before_through() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, LinkProxy("127.0.0.1", server.getsockname()[1]) as link:
        link.cut_after_bytes(100_000)
        with socket.create_connection((link.host, link.port), timeout=5) as client:
            far, _ = server.accept()
            threading.Thread(target=_send_all, args=(far, bytes(1 << 20)), daemon=True).start()
            assert _receive_all(client) == 100_000
            far.close()


def _send_all(sock: socket.socket, data: bytes) -> None:
    try:
        sock.sendall(data)
    except OSError:
        return


def _receive_all(sock: socket.socket) -> int:
    count = 0
    try:
        while piece := sock.recv(1 << 16):
            count += len(piece)
    except OSError:
        return count
    return count


def test_cuts_on_command_and_at_a_time(origin: MemoryTransport) -> None:
    with LinkProxy("127.0.0.1", _port(origin), bytes_per_s=1e6) as link:
        origin.put("k", bytes(5 << 20))
        client = _client(origin, link)
        assert client.read_pointer("p") is None
        link.cut()
        assert client.read_pointer("p") is None, "a new connection is taken"
        assert link.num_connections == 2
        fresh = _client(origin, link)  # has no connection to be lost, so its first loss is told
        link.cut_after_s(0.2)
        started_s = time.monotonic()
        with pytest.raises(TransportError, match=r"inside a frame|cannot be reached"):
            fresh.get("k")
        assert 0.15 < time.monotonic() - started_s < 3
        fresh.close()
        client.close()


def test_one_bit_of_one_byte_is_flipped_once(origin: MemoryTransport) -> None:
    payload = bytes(200_000)
    origin.put("k", payload)
    with LinkProxy("127.0.0.1", _port(origin)) as link:
        client = _client(origin, link)
        assert client.read_pointer("p") is None
        link.corrupt_byte(9 + 123_456)  # behind the length and the status of the answer
        damaged = client.get("k")
        assert [i for i, byte in enumerate(damaged) if byte] == [123_456]
        assert client.get("k") == payload
        client.close()


def test_refusing_keeps_those_there_and_accepting_takes_the_same_port(origin: MemoryTransport) -> None:
    with LinkProxy("127.0.0.1", _port(origin)) as link:
        old, new = _client(origin, link), _client(origin, link)
        assert old.read_pointer("p") is None
        link.refuse()
        assert old.read_pointer("p") is None
        with pytest.raises(TransportError, match="cannot be reached"):
            new.read_pointer("p")
        link.accept()
        assert new.read_pointer("p") is None
        old.close()
        new.close()


def test_a_proxy_without_a_server_ends_its_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as gone:
        port = gone.getsockname()[1]
    with LinkProxy("127.0.0.1", port) as link, socket.create_connection((link.host, link.port), timeout=5) as client:
        assert _receive_all(client) == 0


_NO_NAMESPACES = why_unavailable()


@pytest.mark.skipif(_NO_NAMESPACES is not None, reason=str(_NO_NAMESPACES))
def test_a_pair_of_name_spaces_reach_each_other_and_leave_nothing() -> None:
    before = _names()
    code = "import socket; s = socket.create_server(('10.231.0.1', 5000)); print('up', flush=True); s.accept()[0].sendall(b'hello')"
    with NamespacePair(rate_gbps=1) as pair, NamespacePair(rate_gbps=None) as other:
        server = pair.start("a", [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert server.stdout.readline() == "up\n"
        ask = "import socket; print(socket.create_connection(('10.231.0.1', 5000), timeout=5).recv(9))"
        done = pair.run("b", [sys.executable, "-c", ask], capture_output=True, text=True)
        assert done.stdout == "b'hello'\n"
        qdisc = pair.run("b", ["tc", "qdisc", "show"], capture_output=True, text=True).stdout
        assert "tbf" in qdisc
        assert "rate 1Gbit" in qdisc
        refused = other.run("b", [sys.executable, "-c", ask], capture_output=True, text=True, check=False)
        assert refused.returncode != 0, "another pair is another network"
        sleeper = pair.start("a", ["sleep", "100"])
        server.stdout.close()
    assert sleeper.poll() is not None
    assert _names() == before


def _names() -> str:
    return subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
