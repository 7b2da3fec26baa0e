"""What a real Mooncake Store does when parts of it fail, and what the transport makes of it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rose.backends.mooncake import MooncakeMaster, MooncakeTransport
from rose.backends.mooncake.library import RPC_TIMEOUT_S, load_library
from rose.errors import BackendUnavailableError, BlobNotFoundError, TransportError
from rose.testing import FakeTrainer
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.sink import ArraySink
from rose.transfer.subscriber import Subscriber

pytestmark = pytest.mark.mooncake

_MB = 1 << 20
_RETRY_S = 0.5
_GIVES_UP_S = _RETRY_S + RPC_TIMEOUT_S + 3.0
"""How long a call over a dead master may take: the retries, one try, and some room on a busy machine."""


class Node:
    """A process that gives memory to the store."""

    def __init__(self, master: str, segment_bytes: int) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("mooncake_node.py")), master, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert self._process.stdout is not None
        self.segment = self._process.stdout.readline().decode().strip()
        assert self.segment

    def kill(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.kill()
        self._process.wait()


@pytest.fixture
def master() -> Iterator[MooncakeMaster]:
    try:
        load_library()
        master = MooncakeMaster()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with master:
        yield master


@pytest.fixture
def node(master: MooncakeMaster) -> Iterator[Node]:
    node = Node(master.address, 256 * _MB)
    yield node
    node.kill()


def test_what_is_put_goes_to_the_preferred_segment_and_dies_with_it(master: MooncakeMaster, node: Node) -> None:
    other = MooncakeTransport(master=master.address, segment_bytes=64 * _MB, retry_s=0.5)
    writer = MooncakeTransport(master=master.address, preferred_segment=node.segment, retry_s=0.5)
    sizes = (100, _MB, 5 * _MB)
    for size in sizes:
        for index in range(4):
            writer.put(f"{size}/{index}", bytes([index]) * size)
            assert other.get(f"{size}/{index}") == bytes([index]) * size
    node.kill()
    for size in sizes:
        for index in range(4):
            with pytest.raises((TransportError, BlobNotFoundError)):
                other.get(f"{size}/{index}")
    for transport in (writer, other):
        transport.close()


def test_a_preferred_segment_that_is_not_there_is_refused(master: MooncakeMaster, node: Node) -> None:
    """The store itself would ignore the name and put things anywhere."""
    own = MooncakeTransport(master=master.address, segment_bytes=64 * _MB)
    with pytest.raises(TransportError, match=r"has no segment '127\.0\.0\.1:1' with room; take the name from"):
        MooncakeTransport(master=master.address, preferred_segment="127.0.0.1:1")
    own.close()
    MooncakeTransport(master=master.address, preferred_segment=node.segment).close()


def test_an_unknown_segment_is_not_this_process_itself(master: MooncakeMaster) -> None:
    with pytest.raises(TransportError, match="has no segment"):
        MooncakeTransport(master=master.address, segment_bytes=64 * _MB, preferred_segment="127.0.0.1:1")


def test_a_full_store_refuses_and_keeps_what_it_has(master: MooncakeMaster) -> None:
    """Overfilling evicts nothing, and what is let go of makes room."""
    transport = MooncakeTransport(master=master.address, segment_bytes=64 * _MB, retry_s=0.5)
    held: list[int] = []

    def fill() -> None:
        for index in range(40):
            transport.put(f"k{index}", bytes([index]) * (6 * _MB))
            held.append(index)

    with pytest.raises(TransportError, match=rf"no room for the {6 * _MB} bytes of .*segment_bytes={64 * _MB}"):
        fill()
    assert len(held) >= 8
    time.sleep(3.0)  # eviction, if it took anything, would have
    for index in held:
        assert transport.get(f"k{index}") == bytes([index]) * (6 * _MB)
    transport.delete(["k0", f"k{len(held)}"])
    transport.put("again", bytes(5 * _MB))
    assert transport.get("again") == bytes(5 * _MB)
    transport.close()


def test_a_store_node_killed_in_the_middle_of_a_get_ends_the_get(master: MooncakeMaster, node: Node) -> None:
    own = MooncakeTransport(master=master.address, retry_s=1.0)
    payload = np.random.default_rng(0).bytes(160 * _MB)
    own.put("k", payload)
    assert own.get("k") == payload
    outcome: list[object] = []

    def read() -> None:
        try:
            while True:
                assert own.get("k") == payload
        except (TransportError, BlobNotFoundError) as error:
            outcome.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    time.sleep(0.2)
    node.kill()
    reader.join(timeout=15.0)
    assert not reader.is_alive(), "the get hangs"
    assert outcome
    own.close()


def test_a_dead_master_is_an_error_in_time(master: MooncakeMaster) -> None:
    transport = MooncakeTransport(master=master.address, segment_bytes=64 * _MB, retry_s=_RETRY_S)
    transport.put("k", b"bytes")
    assert transport.compare_and_set("p", None, "1")
    master.kill()
    for call in (
        lambda: transport.get("k"),
        lambda: transport.put("other", bytes(2 * _MB)),
        lambda: transport.read_pointer("p"),
    ):
        started = time.monotonic()
        with pytest.raises(TransportError, match="are the master and the processes with segment_bytes alive"):
            call()
        assert time.monotonic() - started < _GIVES_UP_S
    transport.close()


def test_after_a_master_restart_everybody_ends_at_the_same_bits(master: MooncakeMaster) -> None:
    """The restarted master has lost every key; the publisher starts again with full weights, the version goes on."""
    transport = MooncakeTransport(master=master.address, segment_bytes=64 * _MB, retry_s=10.0)
    (trainer,) = FakeTrainer.group(1)
    publisher = Publisher(trainer, transport, run="run", timeout_s=60.0)
    engines = [Subscriber(ArraySink(trainer.tensors())) for _ in range(2)]
    _sync(publisher, engines, transport)
    trainer.step(0.1)
    _sync(publisher, engines[:1], transport)  # the other one misses a version
    master.restart()
    assert _when_back(transport) is None
    trainer.step(0.1)
    report = _sync(publisher, engines, transport)
    assert report.is_anchor
    assert report.version.n == 2
    for engine in engines:
        for name, bits in trainer.full().items():
            np.testing.assert_array_equal(engine._sink.array(name), bits, err_msg=name)
    trainer.step(0.1)
    assert not _sync(publisher, engines, transport).is_anchor
    transport.close()


def _sync(publisher: Publisher, engines: list[Subscriber], transport: MooncakeTransport):
    report = publisher.publish_sync()
    for engine in engines:
        update = plan_update(transport, engine.version)
        assert update is not None
        engine.stage(update, transport)
        assert engine.activate(verify=True).version == report.version
    return report


def _when_back(transport: MooncakeTransport) -> str | None:
    """Return the pointer once the store's members have found the restarted master and it takes bytes again."""
    deadline = time.monotonic() + 30.0
    while True:
        try:
            transport.put("probe", bytes(100))
        except TransportError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
        else:
            return transport.read_pointer("current")
