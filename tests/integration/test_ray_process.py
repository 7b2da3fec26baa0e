"""A relay as a process beside its actor: placed, started again, gone with its host."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from processes import is_running
from ray_parts import until
from rose import open_transport
from rose.backends.memory import MemoryTransport
from rose.errors import TransportError
from rose.hosts.ray.process_host import ProcessHost
from rose.hosts.ray.specs import ProcessSpec
from rose.policies.node_placement import PartRole
from rose.types import TransportAddress


@pytest.fixture
def upstream():
    """A trainer's store and how a relay reaches it."""
    transport = MemoryTransport()
    transport.serve()
    yield transport, dict(transport.address().options)
    transport.close()


def relay(options: dict[str, object], *more: str) -> ProcessSpec:
    return ProcessSpec(
        name="relay",
        role=PartRole.RELAY,
        arguments=(
            *("relay", "--upstream", f"memory:127.0.0.1:{options['port']}", "--listen", "{host}:0"),
            *("--max-bytes", "1M", *more),
        ),
        environment={"ROSE_UPSTREAM_TOKEN": str(options["token"])},
    )


def fetched(address: TransportAddress) -> bytes:
    """Return what a relay gives."""
    store = open_transport(address)
    try:
        return bytes(store.get("k"))
    finally:
        store.close()


async def test_a_relay_serves_is_started_again_and_ends_with_its_host(upstream):
    transport, options = upstream
    transport.put("k", b"weights")
    host = ProcessHost(relay(options), host="127.0.0.1", node_id="n", restart_s=0.01)
    first = await host.address()
    assert await asyncio.to_thread(fetched, first) == b"weights"
    assert await host.address() == first, "it is started once"
    process = host._process
    assert process is not None
    process.kill()
    await until(lambda: host._process is not None and host._process is not process and host._said)
    second = await host.address()
    assert second != first
    assert await asyncio.to_thread(fetched, second) == b"weights"
    process = host._process
    await host.close()
    assert process.returncode == 0, "it was asked to end and could tidy up"
    await host.close()


async def test_a_command_that_ends_at_once_is_told_with_its_last_words(upstream):
    _, options = upstream
    host = ProcessHost(relay(options, "--no-such-option"), host="127.0.0.1", node_id="n7")
    with pytest.raises(TransportError, match=r"on node n7 did not get ready: .*unknown option --no-such-option"):
        await host.ready()
    await host.close()


def test_a_process_ends_when_its_parent_is_killed(tmp_path):
    """The command only has to live: the relay's own check of its upstream does for seconds."""
    code = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-m', 'rose.hosts.ray.tied', str(os.getpid()), 'relay', '--upstream',"
        f" 'memory:127.0.0.1:1', '--max-bytes', '1M'], stderr=open({str(tmp_path / 'words')!r}, 'w'))\n"
        "print(child.pid, flush=True)\ntime.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    try:
        command = Path(f"/proc/{pid}/cmdline")
        while b"rose.cli.main" not in command.read_bytes():  # tied, and become the command
            time.sleep(0.01)
        parent.kill()
        parent.wait()
        while is_running(pid):
            time.sleep(0.01)
    finally:
        parent.stdout.close()
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_parent_that_is_gone_already_is_noticed():
    done = subprocess.run(
        [sys.executable, "-m", "rose.hosts.ray.tied", "1", "relay", "--help"], capture_output=True, check=False
    )
    assert done.returncode == 0
    assert done.stdout == b""


def test_only_executors_and_relays_are_processes():
    with pytest.raises(ValueError, match="process 'x': role must be executor or relay, got engine"):
        ProcessSpec(name="x", role=PartRole.ENGINE, arguments=("demo",))
    assert ProcessSpec(name="x", role=PartRole.EXECUTOR, arguments=("serve", "x.toml")).stays
