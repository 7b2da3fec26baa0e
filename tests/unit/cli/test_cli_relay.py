"""``rose relay``: what it refuses, and how it ends while it waits."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rose.backends.memory import MemoryTransport
from rose.cli import relay, stores
from rose.cli.main import main
from rose.errors import ConfigError, TransportError
from rose.testing.ports import free_ports
from rose.transfer.cluster import ClusterRelay


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
    monkeypatch.setattr(relay, "_CHECK_S", 60.0)
    (port,) = free_ports(1)
    origin = MemoryTransport()
    show = relay._print

    def show_and_stop(value: Mapping[str, Any]) -> None:
        show(value)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(relay, "_print", show_and_stop)
    timer = threading.Timer(0.5, lambda: origin.serve(port=port, token="t"))  # noqa: S106 - for a test
    timer.start()
    try:
        assert main(["relay", "--upstream", f"memory:127.0.0.1:{port}", "--max-bytes", "1M"]) == 0
        assert origin._server is not None, "it was waited for"
        assert json.loads(capsys.readouterr().out.splitlines()[0])["name"] == "memory"
    finally:
        timer.join()
        origin.close()


def _signal_once_heard(unheard: Any) -> None:
    """Send a SIGTERM once the command has put its own handler in place of this one."""
    deadline_s = time.monotonic() + 60
    while signal.getsignal(signal.SIGTERM) is unheard and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.2)  # it waits for its origin by now, or will
    os.kill(os.getpid(), signal.SIGTERM)


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
    sender = threading.Thread(target=_signal_once_heard, args=(signal.getsignal(signal.SIGTERM),))
    sender.start()
    started_s = time.monotonic()
    try:
        assert main(["relay", "--upstream", f"memory:127.0.0.1:{port}", "--max-bytes", "1M"]) == 0
        assert time.monotonic() - started_s < 50, "long before it would have given up"
        assert json.loads(capsys.readouterr().out.splitlines()[-1])["link_objects"] == 0
    finally:
        sender.join()
        deaf.close()


class Deaf(MemoryTransport):
    """Answers no read until it is closed; the first close may come too early, before the read that it should end."""

    def __init__(self, *, num_early: int = 0) -> None:
        super().__init__()
        self.num_early = num_early
        self.num_asked = self.num_closes = 0
        self.asked = threading.Event()
        self.closed = threading.Condition()

    def read_pointer(self, name):
        with self.closed:
            self.num_asked += 1
            num_closes, self.num_early = self.num_closes + self.num_early, 0
            self.asked.set()
            is_closed = self.closed.wait_for(lambda: self.num_closes > num_closes, 60)
        raise TransportError("it was closed" if is_closed else "nobody answered")

    def close(self):
        with self.closed:
            self.num_closes += 1
            self.closed.notify_all()


class Served:
    """``rose relay`` in a thread, without its check of the origin."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, origin: MemoryTransport, *, is_following: bool) -> None:
        self.stopped, self.printed, self._is_shown = threading.Event(), [], threading.Event()
        monkeypatch.setattr(relay, "open_store", lambda *_, **__: origin)
        monkeypatch.setattr(relay, "_print", self._show)
        settings = relay._Settings(
            upstream="memory:a:1",
            host="127.0.0.1",
            port=0,
            is_public=False,
            max_bytes=1 << 20,
            token_file=None,
            pointer="current",
            is_following=is_following,
        )
        self._thread = threading.Thread(target=relay._serve, args=(settings, self.stopped), daemon=True)

    def start(self) -> dict[str, Any]:
        """Start; returns the options that engines open it by."""
        self._thread.start()
        assert self._is_shown.wait(20)
        return {name: self.printed[0][name] for name in ("host", "port", "token")}

    def ends(self) -> bool:
        """Send the signal; returns whether it ends at once, give or take a busy machine."""
        self.stopped.set()
        self._thread.join(20)
        return not self._thread.is_alive() and len(self.printed) == 2

    def _show(self, value: Mapping[str, Any]) -> None:
        self.printed.append(dict(value))
        self._is_shown.set()


def test_one_that_follows_a_deaf_origin_stops_at_once_and_complains_of_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    origin = Deaf()
    served = Served(monkeypatch, origin, is_following=True)
    served.start()
    assert origin.asked.wait(20)
    assert served.ends()
    assert "held up" not in caplog.text


@pytest.mark.parametrize("num_early", [0, 1])
def test_a_stop_ends_what_an_engine_waits_for_and_repeats_nothing(
    monkeypatch: pytest.MonkeyPatch, num_early: int
) -> None:
    """Also a request that reaches the origin's transport only after it was closed, and so opens it again."""
    origin = Deaf(num_early=num_early)
    served = Served(monkeypatch, origin, is_following=False)
    engine = MemoryTransport(**served.start())
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(engine.read_pointer, "p")
        assert origin.asked.wait(20)
        assert served.ends()
        with pytest.raises(TransportError):
            call.result(timeout=20)
    assert origin.num_asked == 1
    engine.close()


def test_a_signal_before_it_serves_lets_it_follow_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = []
    monkeypatch.setattr(ClusterRelay, "follow", lambda *_, **options: followed.append(options))
    served = Served(monkeypatch, MemoryTransport(), is_following=True)
    served.stopped.set()
    served.start()
    assert served.ends()
    assert not followed
