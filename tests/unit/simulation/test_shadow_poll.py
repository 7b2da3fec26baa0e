"""Polling a real HTTP server on this machine: only GETs, errors told in one line, hiccups survived."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import attrs
import pytest

from rose.errors import ConfigError
from rose.simulation.shadow.poll import Polling, fetch, poll

TEXT = "vllm:prompt_tokens_total 5\n"


@attrs.define
class Engine:
    """A server whose answers the test scripts."""

    url: str = ""
    answer: Callable[[int], tuple[int, bytes]] = lambda _: (200, TEXT.encode())
    delay_s: float = 0.0
    methods: list[str] = attrs.field(factory=list)


@pytest.fixture
def engine() -> Iterator[Engine]:
    state = Engine()

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self) -> None:
            state.methods.append(self.command)
            time.sleep(state.delay_s)
            status, body = state.answer(len(state.methods))
            self.send_response(status)
            if status == 307:
                self.send_header("Location", "http://elsewhere/metrics")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815 - the server's names

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    state.url = f"http://127.0.0.1:{server.server_port}/metrics"
    yield state
    server.shutdown()
    server.server_close()
    thread.join()


def polling(engine: Engine, **further: float) -> Polling:
    return Polling(url=engine.url, **{"duration_s": 0.45, "interval_s": 0.1, "timeout_s": 2.0, **further})


def test_reads_at_its_interval_and_sends_nothing_else(engine: Engine) -> None:
    texts: list[tuple[float, str]] = []
    polled = poll(polling(engine), threading.Event(), lambda at_s, text: texts.append((at_s, text)))
    assert engine.methods == ["GET"] * 5
    assert [scrape.samples[0].value for scrape in polled.scrapes] == [5.0] * 5
    assert [text for _, text in texts] == [TEXT] * 5
    assert texts[-1][0] - texts[0][0] == pytest.approx(0.4, abs=0.15)
    assert abs(texts[0][0] - time.time()) < 5
    assert polled.notes == []


def test_hiccups_are_survived_and_said(engine: Engine) -> None:
    engine.answer = lambda number: (500, b"") if number in (2, 3) else (200, TEXT.encode())
    polled = poll(polling(engine), threading.Event())
    assert len(polled.scrapes) == 3
    assert polled.notes == ["2 readings failed (the last: HTTP status 500)"]


def test_an_engine_that_stays_away_ends_it(engine: Engine) -> None:
    engine.answer = lambda number: (200, TEXT.encode()) if number < 3 else (503, b"")
    polled = poll(polling(engine, duration_s=60.0), threading.Event())
    assert len(polled.scrapes) == 2
    assert "5 readings failed" in polled.notes[0]


def test_a_signal_ends_it_early(engine: Engine) -> None:
    stop = threading.Event()
    polled = poll(polling(engine, duration_s=60.0), stop, lambda *_: stop.set())
    assert len(polled.scrapes) == 1


@pytest.mark.parametrize(
    ("status", "said"), [(404, "HTTP status 404"), (401, "HTTP status 401"), (307, "moved to http://elsewhere/metrics")]
)
def test_a_first_refusal_is_told(engine: Engine, status: int, said: str) -> None:
    engine.answer = lambda _: (status, b"no")
    with pytest.raises(ConfigError, match=said) as caught:
        poll(polling(engine), threading.Event())
    assert engine.url in str(caught.value)


def test_slow_dead_and_foreign_servers_are_told(engine: Engine) -> None:
    engine.delay_s = 0.6
    with pytest.raises(ConfigError, match="no answer in time"):
        poll(polling(engine, timeout_s=0.1), threading.Event())
    engine.delay_s = 0.0
    engine.answer = lambda _: (200, b"vllm:prompt_tokens_total <html>\n")
    with pytest.raises(ConfigError, match="name an engine's /metrics"):
        poll(polling(engine), threading.Event())
    with pytest.raises(ConfigError, match=r"[Cc]onnection refused"):
        poll(Polling(url="http://127.0.0.1:9/metrics"), threading.Event())


def test_an_answer_without_end_is_cut(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.simulation.shadow.poll._MAX_BYTES", 1000)
    engine.answer = lambda _: (200, b"x" * 2000)
    with pytest.raises(OSError, match="larger than"):
        fetch(engine.url, 2.0)


@pytest.mark.parametrize("url", ["file:///etc/passwd", "ftp://host/metrics", "http://", "host:8000/metrics"])
def test_only_the_web_is_read(url: str) -> None:
    with pytest.raises(ConfigError, match="not an http or https address"):
        Polling(url=url)


def test_numbers_are_checked() -> None:
    with pytest.raises(ValueError, match="interval_s must be"):
        Polling(url="http://x/metrics", interval_s=0.0)
