"""What backends share that read tokens as they come: how ROSE's own endings are named, and the events of an HTTP stream.

Invariants of a reader:

* A stream is over when an event has a finish reason or something is wrong, and only then: an end of the connection is neither.
* Every token is handed out once. What is wrong with an event is raised after the tokens of the events before it have been handed out, and
  nothing is filled in: a missing, positive or undefined log-prob is an error.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rose.errors import EngineError, RequestRefusedError
from rose.types import EngineRequest, FinishReason

EVICTED = "rose:evicted"
"""The name under which an engine's scheduler ends a request whose KV memory was taken back."""

REFUSED = "rose:refused"
"""The name under which it ends a request that the device's memory can never hold."""

FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH, "abort": FinishReason.ABORTED}
"""The words of vLLM and SGLang."""

_MAX_EVENT_BYTES = 64 << 20
_NUMBERS, _INTEGERS = frozenset({int, float}), frozenset({int})


def own_ending(name: object, what: str) -> FinishReason | None:
    """Return what an ending of ROSE's own means; ``None`` for any other.

    Raises:
        RequestRefusedError: It was refused; the message begins with ``what``.
    """
    if name == REFUSED:
        message = f"{what} needs more KV memory than its device can ever give; ask for fewer tokens"
        raise RequestRefusedError(message)
    return FinishReason.EVICTED if name == EVICTED else None


def are_ids(ids: object) -> bool:
    """Return whether this is a list of plain integers."""
    return isinstance(ids, list) and set(map(type, ids)) <= _INTEGERS


class AnswerReader(ABC):
    """Reads the server-sent events that answer one request. No I/O.

    Attributes:
        num_tokens: Tokens handed out so far.
        finish_reason: Why the stream ended, once it has.
        is_done: The server has said that no event follows.
        error: What was wrong with the last event; the tokens before it were handed out.
    """

    def __init__(self, request: EngineRequest) -> None:
        self.num_tokens = 0
        self.finish_reason: FinishReason | None = None
        self.is_done = False
        self.error: EngineError | None = None
        self._has_logprobs = request.sampling.logprobs
        self._max_tokens = request.sampling.max_tokens
        self._rest = b""

    @property
    def is_over(self) -> bool:
        """Return whether nothing is to be read any more."""
        return self.finish_reason is not None or self.error is not None

    @abstractmethod
    def _take(self, event: Mapping[str, Any]) -> None:
        """Take one event.

        Raises:
            EngineError: What is wrong with it, or what it says is wrong.
        """

    def _read(self, data: bytes) -> None:
        """Take the whole events of what came next; what is wrong becomes ``error``."""
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()
        try:
            if len(self._rest) > _MAX_EVENT_BYTES:
                self._fail(f"an event is longer than {_MAX_EVENT_BYTES >> 20} MiB")
            for line in lines:
                if line.startswith(b"data:"):
                    self._read_event(line[5:].strip())
        except EngineError as error:
            self.error = self.error or error

    def _read_event(self, text: bytes) -> None:
        if text == b"[DONE]":
            self.is_done = True
            return
        try:
            event = json.loads(text.decode())  # quicker than to let json guess the encoding
        except ValueError as error:  # a wrong encoding among them
            self._fail(f"an event is no JSON ({error})", error)
        if not isinstance(event, Mapping):
            self._fail(f"an event is no object: {str(event)[:200]}")
        self._take(event)

    def _check_logprobs(self, values: Sequence[object]) -> None:
        for value in values:
            if type(value) not in _NUMBERS or not -math.inf < value <= 0:  # type: ignore[operator] # a number by then
                self._fail(f"a log-prob is {value!r}; it must be a number, and not above 0")

    def _check_count(self, num_tokens: int) -> None:
        if num_tokens > self._max_tokens:
            self._fail(f"{num_tokens} tokens came of the {self._max_tokens} that were asked for")

    def _finish_reason(self, word: object) -> FinishReason:
        found = FINISH_REASONS.get(str(word))
        if found is None:
            self._fail(f"the server ended it with {word!r}; see its log")
        return found

    def _fail(self, what: str, cause: Exception | None = None) -> NoReturn:
        message = f"after {self.num_tokens} tokens of an answer: {what}"
        raise EngineError(message) from cause
