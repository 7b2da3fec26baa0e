"""``rose relay`` as a process: it follows, serves, and ends on a signal."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

import rose
from rose.backends.memory import MemoryTransport, StoreServer
from rose.cli import stores
from rose.errors import TransportError


@pytest.mark.parametrize("has_token_file", [False, True])
def test_a_relay_process_follows_serves_and_ends_on_a_signal(tmp_path: Path, has_token_file: bool) -> None:  # noqa: FBT001 - a case
    origin = MemoryTransport()
    options = dict(origin.serve().options)
    argv = [sys.executable, "-m", "rose.cli.main", "relay", "--upstream", f"memory:127.0.0.1:{options['port']}"]
    argv += ["--max-bytes", "64M", *(["--token-file", str(tmp_path / "relay")] if has_token_file else [])]
    environment = {**os.environ, stores.TOKEN_VARIABLE: str(options["token"])}
    process = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        shown = json.loads(process.stdout.readline())
        token = shown.get("token") or (tmp_path / "relay").read_text()
        assert ("token" in shown) is not has_token_file
        assert str(options["token"]) not in Path(f"/proc/{process.pid}/cmdline").read_text()
        if has_token_file:
            assert stat.S_IMODE((tmp_path / "relay").stat().st_mode) == 0o600
        engine = rose.open_transport(json.dumps(shown))
        assert dict(engine.address().options)["token"] == token
        assert origin.compare_and_set("current.open", None, "r/0/0 1")
        origin.put("r/0/0/rank-0/blob-0", b"x" * 1000)
        assert engine.get_when_ready("r/0/0/rank-0/blob-0", 10.0) == b"x" * 1000
        assert engine.compare_and_set("ack", None, "r/0")
        assert origin.read_pointer("ack") == "r/0"
        process.send_signal(signal.SIGTERM)
        stats = json.loads(process.stdout.readline())
        assert process.wait(timeout=20) == 0
        assert stats["redundancy"] == 1.0
        assert stats["link_objects"] == 1
        with pytest.raises(TransportError):
            engine.get("r/0/0/rank-0/blob-0")
        engine.close()
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        origin.close()


class _SlowPointers(MemoryTransport):
    """A store in which somebody is always reading a pointer."""

    def read_pointer(self, name: str) -> str | None:
        time.sleep(0.3)
        return super().read_pointer(name)


@pytest.mark.parametrize("is_away", [False, True])
def test_an_interrupt_ends_it_without_a_word(is_away: bool) -> None:  # noqa: FBT001 - a case
    origin = StoreServer(_SlowPointers(), "127.0.0.1", 0, is_public=False)
    argv = [sys.executable, "-m", "rose.cli.main", "relay", "--upstream", f"memory:127.0.0.1:{origin.port}"]
    process = subprocess.Popen([*argv, "--max-bytes", "1M"], env={**os.environ, stores.TOKEN_VARIABLE: origin.token},
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        json.loads(process.stdout.readline())
        if is_away:
            origin.close()
        time.sleep(0.4)
        assert process.poll() is None
        started_s = time.monotonic()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=100)
        assert time.monotonic() - started_s < 10
        assert json.loads(output)["link_objects"] == 0
        assert "Traceback" not in errors
        assert is_away or not errors
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        origin.close()
