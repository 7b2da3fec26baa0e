"""Signals of long commands."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def terminated_as_interrupted() -> Iterator[None]:
    """Let SIGTERM end the command as Ctrl-C does, so that one that is timed out removes its processes too.

    Both work also where the shell started the command with SIGINT ignored, as it does for jobs in the background.
    """
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    terminate = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, interrupt)
        signal.signal(signal.SIGTERM, terminate)


@contextlib.contextmanager
def told_by_signals() -> Iterator[threading.Event]:
    """Give an event that SIGTERM and Ctrl-C set, in place of what they do otherwise."""
    event = threading.Event()
    before = {number: signal.signal(number, lambda *_: event.set()) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield event
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
