"""How commands of ROSE reach the inside of an SGLang server: what both sides know.

A command is the ``action`` of ``POST /weights_checker``: ``COMMAND_PREFIX`` and JSON, ``{"command": name, ...}``. SGLang takes a text of any
length there, hands it to every rank between two steps, paused or not, and sends the first rank's text back: JSON
``{"ranks": [...]}`` with ``{"value": ...}`` or ``{"error": [type, text]}``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from rose.errors import RoseError

PATH = "/weights_checker"
COMMAND_PREFIX = "rose "
REFUSAL_QUESTION = "rose-memory-refusal"
"""The ``action`` that is answered with why the last memory call was refused, once."""

Answer = dict[str, Any]
"""What one rank answers: ``{"value": ...}`` or ``{"error": [type, text]}``."""

_logger = logging.getLogger(__name__)


def attempt(work: Callable[[], Any]) -> Answer:
    """Return the answer of some work: its value, or its error as plain data."""
    try:
        return {"value": work()}
    except RoseError as error:
        return {"error": [type(error).__name__, str(error)]}
    except Exception as error:  # the root of a command: an exception that leaves it would end the engine
        _logger.exception("a command failed")
        return {"error": ["EngineError", f"{type(error).__name__}: {error}"]}
