"""``rose relay``: what it refuses, and one that runs as a process."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rose.backends.memory import MemoryTransport
from rose.cli import stores
from rose.cli.main import main
from rose.errors import ConfigError, TransportError


@pytest.mark.parametrize(
    ("text", "size"), [("1500", 1500), ("40G", 40 * 10**9), ("1.5 GiB", 3 << 29), ("512MB", 512 * 10**6), ("2k", 2000)]
)
def test_sizes(text: str, size: int) -> None:
    assert stores.parse_size(text, option="--max-bytes") == size


@pytest.mark.parametrize("text", ["", "0", "-1", "4X", "G", "1e9", "4i"])
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ConfigError, match="is no size"):
        stores.parse_size(text, option="--max-bytes")


def test_places() -> None:
    assert stores.parse_place("127.0.0.1:0", option="--listen") == ("127.0.0.1", 0)
    assert stores.parse_place("[::1]:70", option="--listen") == ("::1", 70)
    for text in ("127.0.0.1", "host:", "host:70000", "host:1:2", ":1"):
        with pytest.raises(ConfigError, match="--listen"):
            stores.parse_place(text, option="--listen")


@pytest.mark.parametrize(
    "text", ["", "memory", "memory:", "memory:host", "mooncake:", "redis:host:1", "memory:h:99999"]
)
def test_what_is_no_upstream(text: str) -> None:
    with pytest.raises(ConfigError, match="is neither"):
        stores.open_store(text, {stores.TOKEN_VARIABLE: "t"}, option="--upstream")


def test_a_token_comes_from_the_environment_or_a_file(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("from-file\n")
    for text, environment, token in (
        ("memory:127.0.0.1:1", {stores.TOKEN_VARIABLE: "from-variable"}, "from-variable"),
        (f"memory:127.0.0.1:1:{tmp_path}/token", {stores.TOKEN_VARIABLE: "from-variable"}, "from-file"),
    ):
        assert dict(stores.open_store(text, environment, option="--upstream").address().options)["token"] == token
    with pytest.raises(ConfigError, match=r"token.*is missing"):
        stores.open_store("memory:127.0.0.1:1", {}, option="--upstream")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match="holds no token"):
        stores.open_store(f"memory:127.0.0.1:1:{tmp_path}/empty", {}, option="--upstream")
    with pytest.raises(ConfigError, match="cannot read a token"):
        stores.open_store(f"memory:127.0.0.1:1:{tmp_path}/missing", {}, option="--upstream")


def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stores.TOKEN_VARIABLE, "t")
    argv = ["relay", "--upstream", "memory:127.0.0.1:1", "--max-bytes", "1M"]
    for more, words in (
        (["--listen", "0.0.0.0:0"], "can be reached from other machines"),
        (["--max-bytes", "x"], "is no size"),
    ):
        assert main([*argv, *more]) == 2
        assert words in capsys.readouterr().err


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
        engine = MemoryTransport(host=shown["host"], port=shown["port"], token=token)
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


@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_relay_whose_origin_is_away_or_deaf_starts_and_ends_at_once(is_deaf: bool) -> None:  # noqa: FBT001 - a case
    deaf = socket.create_server(("127.0.0.1", 0))
    port = deaf.getsockname()[1] if is_deaf else 1
    argv = [
        sys.executable,
        "-m",
        "rose.cli.main",
        "relay",
        "--upstream",
        f"memory:127.0.0.1:{port}",
        "--max-bytes",
        "1M",
    ]
    process = subprocess.Popen(argv, env={**os.environ, stores.TOKEN_VARIABLE: "t"}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)  # fmt: skip
    try:
        json.loads(process.stdout.readline())
        time.sleep(0.3)
        assert process.poll() is None
        started_s = time.monotonic()
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=100)
        assert time.monotonic() - started_s < 10
        assert json.loads(output)["link_objects"] == 0
        assert "Traceback" not in errors
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
        deaf.close()
