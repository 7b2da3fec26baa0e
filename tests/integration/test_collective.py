"""Dedicated engines fed by the collective and others by the relay, in processes of their own, with failures in between."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[collective]'")

from rose.backends.collective import CollectiveMirror, member_address
from rose.backends.memory import MemoryTransport
from rose.testing import FakeTrainer
from rose.transfer.delta import digest
from rose.transfer.publisher import Publisher
from rose.types import TransportAddress

pytestmark = pytest.mark.distributed

_TIMEOUT_S = 3.0
_ROLL_CALL_S = 1.0
_SLACK_S = 4.0
_LARGE_BYTES = 96 << 20


class Worker:
    """An engine process."""

    def __init__(self, address: TransportAddress) -> None:
        self.process = subprocess.Popen(
            [
                sys.executable,
                str(Path(__file__).with_name("collective_member_worker.py")),
                address.name,
                json.dumps(dict(address.options)),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, do: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def ask(self, do: str, **fields: Any) -> dict[str, Any]:
        self.tell(do, **fields)
        return self.answer()

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture
def store() -> Iterator[MemoryTransport]:
    store = MemoryTransport()
    store.serve()
    yield store
    store.close()


@pytest.fixture
def new_mirror(store: MemoryTransport) -> Iterator[Callable[[], CollectiveMirror]]:
    made: list[CollectiveMirror] = []

    def make() -> CollectiveMirror:
        made.append(CollectiveMirror(store, timeout_s=_TIMEOUT_S, roll_call_s=_ROLL_CALL_S))
        return made[-1]

    yield make
    for mirror in made:
        mirror.close()


@pytest.fixture
def start() -> Iterator[Callable[[TransportAddress, int], list[Worker]]]:
    made: list[Worker] = []

    def make(address: TransportAddress, num: int) -> list[Worker]:
        workers = [Worker(address) for _ in range(num)]
        made.extend(workers)
        assert all(worker.answer() == {"is_ready": True} for worker in workers)
        return workers

    yield make
    for worker in made:
        if worker.process.returncode is None:
            worker.kill()


def test_members_and_a_relay_reader_are_at_the_same_bits_at_each_version(store, new_mirror, start) -> None:
    mirrors = [new_mirror() for _ in range(2)]
    members = start(member_address(store.address(), [mirror.root for mirror in mirrors]), 2)
    relay = start(store.address(), 1)
    trainers = FakeTrainer.group(2)
    publishers = [
        Publisher(trainer, mirror, run="run", timeout_s=30.0) for trainer, mirror in zip(trainers, mirrors, strict=True)
    ]
    for n in range(5):
        with ThreadPoolExecutor(2) as threads:
            list(threads.map(Publisher.publish_sync, publishers))
        truth = {name: digest(np.ascontiguousarray(bits)) for name, bits in trainers[0].full().items()}
        for worker in (*members, *relay):
            worker.tell("follow", n=n)
        for worker in (*members, *relay):
            assert worker.answer()["digests"][str(n)] == truth
        for trainer in trainers:
            trainer.step(0.1)
    for member in members:
        counts = member.ask("counts")
        assert counts["num_from_collective"] > counts["num_from_origin"], "the members took everything from the relay"


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "frozen"])
def test_a_member_lost_in_the_middle_of_a_broadcast_holds_nobody_up(store, new_mirror, start, is_killed) -> None:
    mirror = new_mirror()
    survivor, victim = start(member_address(store.address(), [mirror.root]), 2)
    assert mirror.regroup() == 2
    payload = np.random.default_rng(0).bytes(_LARGE_BYTES)
    os.kill(victim.process.pid, signal.SIGSTOP)  # so that the broadcast is certainly under way when it ends
    put = threading.Thread(target=mirror.put, args=("large", payload))
    started = time.monotonic()
    put.start()
    time.sleep(0.5)
    assert put.is_alive(), "the broadcast does not take part"
    if is_killed:
        victim.kill()
    put.join(timeout=_TIMEOUT_S + _SLACK_S)
    assert not put.is_alive(), "the put hangs"
    assert time.monotonic() - started < (2.5 if is_killed else _TIMEOUT_S + _SLACK_S)
    assert survivor.ask("get", key="large") == {"digest": digest(payload)}
    started = time.monotonic()
    mirror.put("next", payload[:1000])
    assert time.monotonic() - started < _ROLL_CALL_S + _SLACK_S
    before = survivor.ask("counts")["num_from_collective"]
    assert survivor.ask("get", key="next") == {"digest": digest(payload[:1000])}
    assert survivor.ask("counts")["num_from_collective"] == before + 1, "the survivors are not grouped again"
    if not is_killed:  # it finds itself let go, reads from the origin, and is taken in again
        os.kill(victim.process.pid, signal.SIGCONT)
        assert victim.ask("get", key="large") == {"digest": digest(payload)}
        _wait_until(lambda: mirror.regroup() == 2)


def test_members_outlive_their_root(store, new_mirror, start) -> None:
    mirror = new_mirror()
    (member,) = start(member_address(store.address(), [mirror.root]), 1)
    mirror.put("first", b"first")
    assert member.ask("get", key="first") == {"digest": digest(b"first")}
    mirror.close()
    store.put("second", b"second")
    assert member.ask("get", key="second") == {"digest": digest(b"second")}
    assert member.ask("get", key="third") == {"digest": None}
    mirror.put("after", b"after")  # a closed mirror is the origin alone
    assert member.ask("get", key="after") == {"digest": digest(b"after")}


def test_a_newcomer_is_taken_in_at_the_next_put(store, new_mirror, start) -> None:
    mirror = new_mirror()
    address = member_address(store.address(), [mirror.root])
    mirror.put("alone", b"0")
    start(address, 1)
    mirror.put("one", b"1")
    (second,) = start(address, 1)
    mirror.put("two", b"2")
    assert second.ask("get", key="one") == {"digest": digest(b"1")}
    assert second.ask("get", key="two") == {"digest": digest(b"2")}
    assert second.ask("counts") == {"num_delivered": 1, "num_from_collective": 1, "num_from_origin": 1}


def _wait_until(is_true: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.1)
