"""``rose relay``: what it refuses, and how it ends while it waits."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rose.backends.memory import MemoryTransport
from rose.cli import relay, stores
from rose.cli.main import main
from rose.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1500", 1500),
        ("40G", 40 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512MB", 512 * 10**6),
        ("2k", 2000),
        ("600K", 600_000),
        ("3giB", 3 << 30),
    ],
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
    "text",
    [
        "",
        "memory",
        "memory:",
        "memory:host",
        "mooncake:",
        "redis:host:1",
        "memory:h:99999",
        "mooncake:h",
        "mooncake:h:1:2",
    ],
)
def test_what_is_no_upstream(text: str) -> None:
    words = "is no mooncake:HOST:PORT; name the port" if text.startswith("mooncake:h") else "is neither"
    with pytest.raises(ConfigError, match=words):
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
        (["--listen", "0.0.0.0:0"], "--listen 0.0.0.0 can be reached from other machines; add --public"),
        (["--max-bytes", "x"], "is no size"),
        (["--pointer", ""], "--pointer is empty"),
        (["--token-file", " "], "--token-file is empty"),
    ):
        assert main([*argv, *more]) == 2
        assert words in capsys.readouterr().err


@pytest.fixture
def survivor() -> Iterator[None]:
    """Let this process outlive a SIGTERM that comes when the command has ended already."""
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    yield
    signal.signal(signal.SIGTERM, before)


def _refused(capsys: pytest.CaptureFixture[str], where: str) -> str:
    before = signal.getsignal(signal.SIGTERM)
    assert main(["relay", "--upstream", where, "--max-bytes", "1M"]) == 2
    assert signal.getsignal(signal.SIGTERM) is before
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    assert not out
    return line


def test_a_wrong_token_is_told_at_once(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stores.TOKEN_VARIABLE, "wrong")
    origin = MemoryTransport()
    try:
        where = f"memory:127.0.0.1:{dict(origin.serve().options)['port']}"
        started_s = time.monotonic()
        line = _refused(capsys, where)
        assert time.monotonic() - started_s < relay._CHECK_S / 2
        assert f"--upstream {where}: the store refused the token; put the store's own into" in line
    finally:
        origin.close()


@pytest.mark.parametrize("where", ["memory:nowhere.invalid:7000", "memory:127.0.0.1:1"])
def test_an_origin_that_is_not_there_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv(stores.TOKEN_VARIABLE, "t")
    monkeypatch.setattr(relay, "_CHECK_S", 0.3)
    assert f"--upstream {where}: the store at" in _refused(capsys, where)


@pytest.mark.usefixtures("survivor")
def test_an_origin_may_come_a_moment_later(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(stores.TOKEN_VARIABLE, "t")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    origin = MemoryTransport()
    timers = [
        threading.Timer(0.5, lambda: origin.serve(port=port, token="t")),  # noqa: S106 - for a test
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGTERM)),
    ]
    for timer in timers:
        timer.start()
    try:
        assert main(["relay", "--upstream", f"memory:127.0.0.1:{port}", "--max-bytes", "1M"]) == 0
        assert json.loads(capsys.readouterr().out.splitlines()[0])["name"] == "memory"
    finally:
        for timer in timers:
            timer.join()
        origin.close()


@pytest.mark.usefixtures("survivor")
@pytest.mark.parametrize("is_deaf", [False, True])
def test_a_signal_ends_one_that_waits_for_its_origin(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    is_deaf: bool,  # noqa: FBT001 - a case
) -> None:
    monkeypatch.setenv(stores.TOKEN_VARIABLE, "t")
    monkeypatch.setattr(relay, "_CHECK_S", 100.0)
    deaf = socket.create_server(("127.0.0.1", 0))
    port = deaf.getsockname()[1] if is_deaf else 1
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    started_s = time.monotonic()
    try:
        assert main(["relay", "--upstream", f"memory:127.0.0.1:{port}", "--max-bytes", "1M"]) == 0
        assert time.monotonic() - started_s < 10
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["link_objects"] == 0
    finally:
        timer.join()
        deaf.close()
