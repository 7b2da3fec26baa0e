"""What the adapter tells the user: one line each, with its name in front, whatever level veRL logs at."""

from __future__ import annotations

import logging
import sys

_NAME = "rose_verl"


def logger() -> logging.Logger:
    """Return the adapter's logger. It shows ``INFO`` and up on stderr, which Ray forwards to the driver."""
    log = logging.getLogger(_NAME)
    if not log.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[rose] %(levelname)s %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        log.propagate = False
    return log
