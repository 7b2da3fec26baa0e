"""One completion: the body that asks for it, and a reader of the events that answer. No I/O.

Invariants of the reader:

* Those of ``rose.backends.answers``.
* The server's running count (``usage.completion_tokens``) tells repeated events, which are dropped, from
  lost ones, which are an error; a server that sends no count cannot be checked for either.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rose.backends.answers import AnswerReader, are_ids, own_ending
from rose.errors import RequestRefusedError
from rose.types import EngineRequest, TokenChunk, WeightVersion

_TOKEN_PREFIX = "token_id:"  # noqa: S105 - how vLLM writes ids where OpenAI has texts
_NEUTRAL: Mapping[str, Any] = {
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
}
"""What a server would take from the model's ``generation_config.json`` if it were left out: another distribution than was asked for."""

_BAD_REQUEST = range(400, 500)


def request_body(request: EngineRequest, *, model: str | None = None) -> bytes:
    """Return the body of ``POST /v1/completions`` for a request, as JSON.

    Args:
        request: What is asked for.
        model: The server's name of the model; a server of one model may not need it.
    """
    sampling = request.sampling
    body: dict[str, Any] = {
        **_NEUTRAL,
        "prompt": request.prompt_ids,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "ignore_eos": sampling.ignore_eos,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        "return_token_ids": True,
        "add_special_tokens": False,
        "skip_special_tokens": False,
    }
    if model is not None:
        body["model"] = model
    if sampling.logprobs:
        body |= {"logprobs": 0, "return_tokens_as_token_ids": True}
    if sampling.stop_token_ids:
        body["stop_token_ids"] = sampling.stop_token_ids
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    if request.priority:
        body["priority"] = request.priority
    return json.dumps(body, separators=(",", ":")).encode()


class CompletionReader(AnswerReader):
    """Reads the events of one request.

    Args:
        request: What was asked for.
        version: What the server's weights are.
    """

    def __init__(self, request: EngineRequest, version: WeightVersion | None = None) -> None:
        super().__init__(request)
        self._prompt_ids = request.prompt_ids
        self._version = version
        self._ids: list[int] = []
        self._logprobs: list[float] = []

    def feed(self, data: bytes) -> TokenChunk | None:
        """Read what came next; returns its tokens as one chunk without a finish reason, ``None`` when it has no whole event with any."""
        self._read(data)
        if not self._ids:
            return None
        chunk = TokenChunk(token_ids=tuple(self._ids), logprobs=tuple(self._logprobs), version=self._version)
        self._ids, self._logprobs = [], []
        return chunk

    def _take(self, event: Mapping[str, Any]) -> None:
        if "choices" not in event:
            self._fail_as_told(event)
        if event["choices"]:
            self._take_choice(event["choices"][0], event.get("usage"))

    def _take_choice(self, choice: Any, usage: Any) -> None:
        try:
            ids, finish = _token_ids(choice), choice.get("finish_reason")
            num_told = None if usage is None else usage["completion_tokens"]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._fail(f"an event has a malformed field ({error!r}); it needs token ids (return_token_ids)", error)
        if num_told is not None and self._is_repeated(num_told, len(ids)):
            return
        if self.finish_reason is not None and (ids or finish is not None):
            self._fail("there was more after the finish reason")
        prompt_ids = choice.get("prompt_token_ids")
        if prompt_ids is not None and tuple(prompt_ids) != self._prompt_ids:
            self._fail("the server took other prompt ids than were sent; does it cut prompts or add tokens of its own?")
        self._check_count(self.num_tokens + len(ids))
        if self._has_logprobs and ids:
            self._logprobs.extend(self._checked_logprobs(choice.get("logprobs"), ids))
        self._ids.extend(ids)
        self.num_tokens += len(ids)
        if finish is not None:
            self.finish_reason = own_ending(choice.get("stop_reason"), "the request") or self._finish_reason(finish)

    def _is_repeated(self, num_told: int, num_new: int) -> bool:
        """Return whether the server's count says that these tokens were handed out before."""
        if num_told == self.num_tokens + num_new:
            return False
        if num_told > self.num_tokens:
            self._fail(f"tokens were lost: the server counts {num_told}, here came {self.num_tokens + num_new}")
        return True

    def _checked_logprobs(self, found: Any, ids: Sequence[int]) -> list[float]:
        try:
            values = found.get("token_logprobs")
            values = [
                _of_sampled(value, token)
                for value, token in zip(found["top_logprobs"] if values is None else values, ids, strict=True)
            ]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            self._fail(f"{len(ids)} tokens came without one log-prob each ({error!r})", error)
        self._check_logprobs(values)
        return values

    def _fail_as_told(self, event: Mapping[str, Any]) -> NoReturn:
        """Raise what an event without choices says."""
        told = event.get("error")
        if isinstance(told, Mapping):
            text, code = str(told.get("message") or told), told.get("code")
            if isinstance(code, int) and code in _BAD_REQUEST:
                raise RequestRefusedError(text)
            self._fail(f"the server says: {text}")
        self._fail(f"an event has no choices: {str(event)[:200]}")


def _token_ids(choice: Mapping[str, Any]) -> Sequence[int]:
    """Return the new ids of a choice: as such, or from log-probs whose tokens are written as ids."""
    ids: Any = choice.get("token_ids")
    if ids is None:
        logprobs = choice.get("logprobs")
        if logprobs is None:
            if choice.get("text"):
                message = "there is text without token ids"
                raise ValueError(message)
            return []
        ids = [int(token.removeprefix(_TOKEN_PREFIX)) for token in logprobs["tokens"]]
    if not are_ids(ids):
        message = f"token ids {ids!r:.60}"
        raise ValueError(message)
    found: Sequence[int] = ids
    return found


def _of_sampled(value: Any, token: int) -> Any:
    """Return the log-prob of the sampled token where several tokens' are given: the order of a table says nothing."""
    if not isinstance(value, Mapping):
        return value
    return value[str(token)] if str(token) in value else value[f"{_TOKEN_PREFIX}{token}"]
