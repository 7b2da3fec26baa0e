"""vLLM's ``SamplingParams``, as OpenRLHF and its executors fill them in, to a turn's ``Sampling``. Pure; needs neither library.

Invariants:

* A setting that changes what is drawn is honoured exactly or refused by its name; none is dropped.
* Settings that only change the text or how vLLM hands it out are kept aside (``TextRules``) or ignored.
* Whatever attribute is not known here must have the value that its class gives it by default.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import attrs

from rose.errors import ConfigError
from rose.frameworks import NEUTRAL, is_neutral
from rose.types import Sampling

_MAPPED = {
    "max_tokens",
    "temperature",
    "top_p",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "seed",
    "min_tokens",
    "stop",
}
_HANDED_OUT = {
    "skip_clone",
    "stream_interval",
    "flat_logprobs",
    "output_text_buffer_length",
}  # vLLM's own ways with its outputs
_EMPTY: tuple[Any, ...] = (None, (), [], {}, set(), False)
_GREEDY_BELOW = 1e-5  # vLLM draws greedily below this temperature


class Codec(Protocol):
    """A tokenizer, as far as it is needed."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""

    def decode(self, ids: Sequence[int], skips_special: bool) -> str:  # noqa: FBT001 - positional in both directions
        """Return the text of ids."""


@attrs.frozen(kw_only=True)
class TextRules:
    """What decides where an answer's text ends, and how it is decoded.

    Attributes:
        stop: Texts that end the answer.
        includes_stop: Whether the text that ended it stays in the text.
        skips_special: Leave special tokens out of the text.
        min_tokens: 0 or 1: with 1 the first token must not end the answer.
        stop_ids: Stop token ids that are there only because they are a whole text of ``stop``. After the first token of an answer with
            ``min_tokens`` 1 they end nothing.
    """

    stop: tuple[str, ...] = ()
    stop_ids: frozenset[int] = frozenset()
    includes_stop: bool = False
    skips_special: bool = True
    min_tokens: int = 0


@attrs.frozen(kw_only=True)
class Request:
    """What one call of ``generate`` asks for."""

    sampling: Sampling
    text: TextRules


def read_request(params: Any, *, num_prompt_tokens: int, max_model_len: int, codec: Codec) -> Request:
    """Return the request of a ``SamplingParams``.

    Args:
        params: vLLM's object, or one with its attributes.
        num_prompt_tokens: Length of the prompt; the answer may fill the rest of the context at most.
        max_model_len: ``--data.max_len`` of the job.
        codec: The tokenizer.

    Raises:
        ConfigError: A setting changes the draw and a pool does not have it; the message names it.
    """
    _refuse_others(params)
    logprobs, min_tokens = getattr(params, "logprobs", None), getattr(params, "min_tokens", 0) or 0
    if logprobs not in {None, 0, 1}:
        raise ConfigError(
            _refusal("logprobs", logprobs, "a pool gives the log-prob of the token that was drawn; use 1 or None")
        )
    if min_tokens not in {0, 1}:
        raise ConfigError(_refusal("min_tokens", min_tokens, "use 0 or 1"))
    stop = _texts(getattr(params, "stop", None))
    given_ids = tuple(dict.fromkeys(getattr(params, "stop_token_ids", None) or ()))
    text_ids = _text_ids(params, stop, codec) - set(given_ids)
    temperature = float(getattr(params, "temperature", 1.0))
    sampling = Sampling(
        max_tokens=_max_tokens(params, num_prompt_tokens, max_model_len),
        temperature=0.0 if temperature < _GREEDY_BELOW else temperature,
        top_p=float(getattr(params, "top_p", 1.0)),
        stop_token_ids=(*given_ids, *sorted(text_ids)),
        ignore_eos=bool(getattr(params, "ignore_eos", False)),
        logprobs=logprobs is not None,
        seed=getattr(params, "seed", None),
    )
    text = TextRules(
        stop=stop,
        stop_ids=text_ids,
        includes_stop=bool(getattr(params, "include_stop_str_in_output", False)),
        skips_special=bool(getattr(params, "skip_special_tokens", True)),
        min_tokens=min_tokens,
    )
    return Request(sampling=sampling, text=text)


def _max_tokens(params: Any, num_prompt_tokens: int, max_model_len: int) -> int:
    """As vLLM with ``max_model_len``: no answer goes beyond it."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        message = f"a prompt of {num_prompt_tokens} tokens leaves no room in --data.max_len {max_model_len}"
        raise ConfigError(message)
    asked = getattr(params, "max_tokens", None)
    return room if asked is None else min(int(asked), room)


def _texts(stop: str | Iterable[str] | None) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(texts):
        raise ConfigError(_refusal("stop", stop, "give texts that are not empty"))
    return texts


def _text_ids(params: Any, stop: Sequence[str], codec: Codec) -> frozenset[int]:
    """Return the tokens that are a whole stop text, at which an engine may end; other matches are cut off afterwards."""
    skips_special = bool(getattr(params, "skip_special_tokens", True))
    encoded = ((text, codec.encode(text)) for text in stop)
    return frozenset(ids[0] for text, ids in encoded if len(ids) == 1 and codec.decode(ids, skips_special) == text)


def _refuse_others(params: Any) -> None:
    for name in _names(params):
        value = getattr(params, name, None)
        if name.startswith("_") or name in _MAPPED or name in _HANDED_OUT or is_neutral(name, value):
            continue
        if name in NEUTRAL:
            raise ConfigError(_refusal(name, value, _hint(name)))
        if not _is_empty(value) and value != _default(type(params), name):
            raise ConfigError(_refusal(name, value, "leave it out"))


def _hint(name: str) -> str:
    numbers = [value for value in NEUTRAL[name] if type(value) is int]
    return f"leave it at {numbers[0]}" if numbers else "leave it out"


def _is_empty(value: Any) -> bool:
    return any(value is empty or (type(value) is type(empty) and value == empty) for empty in _EMPTY)


def _names(params: Any) -> tuple[str, ...]:
    declared = getattr(type(params), "__struct_fields__", None)
    return tuple(declared) if declared is not None else tuple(vars(params))


def _default(kind: type, name: str) -> Any:
    with contextlib.suppress(Exception):
        return getattr(kind(), name, None)
    return None


def _refusal(name: str, value: object, hint: str) -> str:
    return f"SamplingParams.{name}={value!r:.80} changes what is drawn and a pool does not have it: {hint}"
