"""ROLL's generation settings as a turn's sampling. Pure.

Two dialects come in: ``GeneratingArguments.to_dict()`` (agentic, RLVR) and the dictionaries that ROLL's router makes of it for
vLLM and SGLang. What would change what is drawn and a pool does not have is refused by its name, never dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rose.errors import ConfigError
from rose.frameworks import is_neutral
from rose.types import Sampling

Encode = Callable[[str], list[int]]

_MAX_TOKENS = ("max_new_tokens", "max_tokens")
_STOP_IDS = ("stop_token_ids", "eos_token_id")
_STOPS = ("stop_strings", "stop")
_COUNT = ("num_return_sequences", "n")
_READ = {
    *_MAX_TOKENS, *_STOP_IDS, *_STOPS, *_COUNT,
    "temperature", "top_p", "do_sample", "logprobs", "seed",
    "include_stop_str_in_output", "no_stop_trim", "length_penalty", "max_length", "ignore_eos",
}  # fmt: skip
_WITHOUT_EFFECT = {"pad_token_id", "use_cache"}  # padding is done behind us, and caches are the engine's affair
_NO_BEAMS = "there is no beam search; set num_beams: 1"
_HINTS = {
    "top_k": "there is no top_k; set top_k: -1 (ROLL's own default is 50)",
    "repetition_penalty": "there are no penalties; set repetition_penalty: 1.0",
    "num_beams": _NO_BEAMS,
    "use_beam_search": _NO_BEAMS,
}


def to_sampling(config: Mapping[str, Any], *, encode: Encode | None = None) -> Sampling:
    """Return how to draw one sequence.

    Args:
        config: ROLL's settings, either dialect. ``num_return_sequences`` is the caller's to expand, see ``count_sequences``.
        encode: Text to token ids, for stop strings.

    Raises:
        ConfigError: A setting cannot be kept; names all of them, and what to write instead.
    """
    problems = list(_refusals(config))
    stops, more = _stop_ids(config, encode)
    problems += more
    max_tokens = _first(config, _MAX_TOKENS)
    if max_tokens is None or int(max_tokens) < 1:
        problems.append(f"max_new_tokens must be at least 1; got {max_tokens!r}")
    if problems:
        message = "these generating_args cannot be kept by a ROSE pool:\n" + "\n".join(f"  {one}" for one in problems)
        raise ConfigError(message)
    return Sampling(
        max_tokens=int(max_tokens),
        temperature=float(_or(config.get("temperature"), 1.0)),
        top_p=float(_or(config.get("top_p"), 1.0)),
        stop_token_ids=stops,
        ignore_eos=bool(config.get("ignore_eos", False)),
        logprobs=config.get("logprobs", 0) is not None,
        seed=config.get("seed"),
    )


def count_sequences(config: Mapping[str, Any]) -> int:
    """Return how many sequences one request asks for."""
    return int(_or(_first(config, _COUNT), 1))


def _refusals(config: Mapping[str, Any]) -> Iterable[str]:
    if config.get("do_sample") is False and _or(config.get("temperature"), 1.0) != 0:
        yield f"do_sample: false with temperature: {config.get('temperature')}: say which; set temperature: 0 for greedy"
    for name in ("include_stop_str_in_output", "no_stop_trim"):
        if config.get(name) is False:
            yield f"{name}: false: the token that stopped a sequence is part of it; set {name}: true, or leave it out"
    for name in sorted(config.keys() - _READ - _WITHOUT_EFFECT):
        value = config[name]
        if value is not None and not is_neutral(name, value):
            yield f"{name}: {value!r}: {_HINTS.get(name, 'not known here; leave it out')}"


def _stop_ids(config: Mapping[str, Any], encode: Encode | None) -> tuple[tuple[int, ...], list[str]]:
    ids: list[Any] = []
    problems = []
    for name in _STOP_IDS:
        given = config.get(name)
        ids += [given] if isinstance(given, int) else list(given or ())
    for text in _or(_first(config, _STOPS), ()):
        tokens = encode(text) if encode is not None else []
        if len(tokens) == 1:
            ids += tokens
        else:
            problems.append(
                f"stop_strings: {text!r}: a stop string must be one token of the tokenizer; it is {len(tokens)}"
            )
    return tuple(dict.fromkeys(int(one) for one in ids if one is not None)), problems


def _first(config: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((config[name] for name in names if config.get(name) is not None), None)


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value
