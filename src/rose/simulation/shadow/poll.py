"""Reading an engine's ``/metrics`` over HTTP, again and again. Sends plain GET requests and nothing else.

Invariants: only http and https, no proxy, no redirect; an answer is at most 32 MB and takes at most ``timeout_s``; times are one
wall-clock reading at the start plus the monotonic clock, so that a clock that is set meanwhile moves nothing.
"""

from __future__ import annotations

import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Protocol
from urllib.parse import urlsplit

import attrs

from rose import checks
from rose.errors import ConfigError
from rose.simulation.shadow.exposition import Scrape, parse_scrape
from rose.simulation.shadow.series import is_wanted

_MAX_BYTES = 32 << 20
_PIECE_BYTES = 1 << 16
_MOST_FAILURES = 5


class Stop(Protocol):
    """What ends polling early (``threading.Event``)."""

    def wait(self, timeout: float) -> bool:
        """Return whether it is set, after ``timeout`` seconds at most."""


@attrs.frozen(kw_only=True)
class Polling:
    """Where to read, how often and for how long, in seconds."""

    url: str
    duration_s: float = attrs.field(default=600.0, validator=checks.number(above=0))
    interval_s: float = attrs.field(default=5.0, validator=checks.number(at_least=0.1))
    timeout_s: float = attrs.field(default=5.0, validator=checks.number(above=0))

    def __attrs_post_init__(self) -> None:
        """Refuse what is no address of the web.

        Raises:
            ConfigError: It is not.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            message = f"metrics {self.url}: not an http or https address; name an engine's, such as http://10.0.0.5:8000/metrics"
            raise ConfigError(message)


@attrs.frozen(kw_only=True)
class Polled:
    """What was read, and what failed on the way (one line a kind)."""

    scrapes: list[Scrape]
    notes: list[str]


def poll(polling: Polling, stop: Stop, on_text: Callable[[float, str], None] | None = None) -> Polled:
    """Read until ``duration_s`` is over, ``stop`` is set, or the engine no longer answers.

    Args:
        polling: Where and how often.
        stop: Ends it early.
        on_text: Called with the time and the text of each answer.

    Raises:
        ConfigError: The first reading failed, or what was read is not metrics text; one line that says what to do.
    """
    began_s, offset_s = time.monotonic(), time.time() - time.monotonic()
    scrapes: list[Scrape] = []
    num_failed, failed_in_a_row, last = 0, 0, ""
    for number in range(int(polling.duration_s / polling.interval_s) + 1):
        if stop.wait(max(0.0, began_s + number * polling.interval_s - time.monotonic())):
            break
        try:
            text = fetch(polling.url, polling.timeout_s)
        except OSError as error:
            last = _why(error)
            if not scrapes:
                message = f"metrics {polling.url}: {last}; check the address, and that the engine runs"
                raise ConfigError(message) from error
            num_failed, failed_in_a_row = num_failed + 1, failed_in_a_row + 1
            if failed_in_a_row >= _MOST_FAILURES:
                break
            continue
        failed_in_a_row, at_s = 0, offset_s + time.monotonic()
        try:
            scrapes.append(parse_scrape(text, at_s, is_wanted))
        except ValueError as error:
            message = f"metrics {polling.url}: {error}; name an engine's /metrics"
            raise ConfigError(message) from error
        if on_text is not None:
            on_text(at_s, text)
    notes = [f"{num_failed} readings failed (the last: {last})"] if num_failed else []
    return Polled(scrapes=scrapes, notes=notes)


def fetch(url: str, timeout_s: float) -> str:
    """Return the body of one GET.

    Raises:
        OSError: No answer, not in time, not 200, or too large.
    """
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    give_up_s, pieces, num_bytes = time.monotonic() + timeout_s, [], 0
    try:
        with opener.open(url, timeout=timeout_s) as answer:
            while piece := answer.read1(_PIECE_BYTES):
                pieces.append(piece)
                num_bytes += len(piece)
                if num_bytes > _MAX_BYTES:
                    message = f"the answer is larger than {_MAX_BYTES >> 20} MB"
                    raise OSError(message)
                if time.monotonic() > give_up_s:
                    raise TimeoutError
    except urllib.error.HTTPError as error:
        error.close()
        place = error.headers.get("Location")
        message = f"HTTP status {error.code}" + (f", moved to {place}" if place else "")
        raise OSError(message) from None
    except (http.client.HTTPException, ValueError) as error:
        message = f"no HTTP answer ({type(error).__name__})"
        raise OSError(message) from error
    return b"".join(pieces).decode("utf-8", errors="replace")


def _why(error: OSError) -> str:
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, TimeoutError):
        return "no answer in time"
    return str(getattr(reason, "strerror", None) or reason)
