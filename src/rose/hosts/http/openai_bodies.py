"""What OpenAI's clients send, as turns; and results as they read them. Pure."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rose.errors import RequestRefusedError
from rose.hosts.http.tokenizers import Tokenizer
from rose.pool.wire import constraint_from_plain, to_plain
from rose.types import FinishReason, Sampling, Turn, TurnResult, VersionConstraint

TRAJECTORY_HEADER = "X-Rose-Trajectory"
GROUP_HEADER = "X-Rose-Group"
_DEFAULT_MAX_TOKENS = {"completion": 16, "chat": 1024}
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "min_tokens": (0,),
    "echo": (False,),
    "suffix": ("",),
    "logit_bias": ({},),
    "top_logprobs": (0, 1),
    "tools": ([],),
    "skip_special_tokens": (True,),
    "response_format": ({"type": "text"},),
}
"""Fields that are taken at values that ask for nothing."""

_IGNORED = frozenset({"model", "user", "store", "service_tier", "stream_options", "tool_choice", "parallel_tool_calls"})
_USED = frozenset(
    {
        "prompt", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "stop", "stop_token_ids",
        "ignore_eos", "logprobs", "seed", "stream", "metadata", "return_token_ids", "versions", "deadline_s",
    }
)  # fmt: skip
_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


@attrs.frozen(kw_only=True)
class Ask:
    """What a request of either OpenAI route asks for, its prompt apart.

    ``has_logprobs``: the answer shows them; the trajectory keeps them in any case.
    """

    trajectory_id: str
    group_id: str
    is_named: bool
    has_examples: bool
    is_streamed: bool
    has_logprobs: bool
    has_token_ids: bool
    sampling: Sampling
    versions: VersionConstraint
    deadline_s: float | None

    def turn(self, prompt_ids: Sequence[int]) -> Turn:
        """Return the turn.

        Raises:
            RequestRefusedError: The prompt is empty, or no ids.
        """
        try:
            return Turn(
                trajectory_id=self.trajectory_id,
                group_id=self.group_id,
                prompt_ids=tuple(prompt_ids),
                sampling=self.sampling,
                versions=self.versions,
                deadline_s=self.deadline_s,
            )
        except (TypeError, ValueError) as error:
            raise RequestRefusedError(str(error)) from error


def read_ask(kind: str, body: Any, headers: Mapping[str, str], tokenizer: Tokenizer | None) -> Ask:
    """Read what both routes have in common.

    Args:
        kind: ``completion`` or ``chat``.
        body: The decoded body.
        headers: Of the request; ``X-Rose-Trajectory`` and ``X-Rose-Group`` name trajectory and group, as ``metadata`` may.
        tokenizer: For stop texts.

    Raises:
        RequestRefusedError: A field is unknown, or asks for what engines of a pool do not do.
    """
    if not isinstance(body, Mapping):
        message = "the body is a JSON object"
        raise RequestRefusedError(message)
    _refuse_unusable(body)
    metadata = body.get("metadata") or {}
    try:
        named = headers.get(TRAJECTORY_HEADER) or _name(metadata, "trajectory_id") or _name(body, "user")
        trajectory_id = named or f"anonymous-{uuid.uuid4().hex}"
        return Ask(
            trajectory_id=trajectory_id,
            group_id=headers.get(GROUP_HEADER) or _name(metadata, "group_id") or trajectory_id,
            is_named=bool(named),
            has_examples=str(metadata.get("has_examples", "")).lower() == "true",
            is_streamed=_flag(body, "stream"),
            has_logprobs=_has_logprobs(body.get("logprobs")),
            has_token_ids=_flag(body, "return_token_ids"),
            sampling=_sampling(kind, body, tokenizer),
            versions=constraint_from_plain(body.get("versions")),
            deadline_s=body.get("deadline_s"),
        )
    except (TypeError, ValueError) as error:
        raise RequestRefusedError(str(error)) from error


def read_prompt(body: Mapping[str, Any], tokenizer: Tokenizer | None) -> list[int]:
    """Return the ids of a completion's prompt: a text, ids, or a list of one of these.

    Raises:
        RequestRefusedError: It is none, or a text where no tokenizer is configured.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list | str):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return list(need(tokenizer, "a prompt of text").encode(prompt))
    if isinstance(prompt, list) and prompt and all(type(token) is int for token in prompt):
        return prompt
    message = "prompt is one text or one list of token ids, not empty; send several prompts as several requests"
    raise RequestRefusedError(message)


def need(tokenizer: Tokenizer | None, what: str) -> Tokenizer:
    """Return the tokenizer.

    Raises:
        RequestRefusedError: None is configured.
    """
    if tokenizer is None:
        message = f"{what} needs a tokenizer, and this pool has none; send token ids, or start the pool with one"
        raise RequestRefusedError(message)
    return tokenizer


def text_of(token_ids: Sequence[int], ask: Ask, tokenizer: Tokenizer | None) -> str:
    """Return the text of an answer; empty without a tokenizer."""
    if tokenizer is None:
        return ""
    stops = {*tokenizer.stop_token_ids, *ask.sampling.stop_token_ids}
    has_stop = bool(token_ids) and token_ids[-1] in stops
    return tokenizer.decode(token_ids[:-1] if has_stop else token_ids)


def answer(kind: str, name: str, ask: Ask, prompt_ids: Sequence[int], result: TurnResult, text: str) -> dict[str, Any]:
    """Return the body of a whole answer, with what OpenAI's has no place for under ``rose``."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": finish_name(result.finish_reason)}
    choice |= _said("message" if kind == "chat" else "text", text)
    if ask.has_logprobs:
        choice["logprobs"] = _logprobs(kind, result.token_ids, result.logprobs)
    data = head(kind, name) | {"choices": [choice], "usage": usage(prompt_ids, result), "rose": provenance(ask, result)}
    if ask.has_token_ids:
        choice["token_ids"] = list(result.token_ids)
        data["prompt_token_ids"] = list(prompt_ids)
    return data


def piece(
    kind: str, base: Mapping[str, Any], ask: Ask, text: str, token_ids: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any]:
    """Return one item of a streamed answer."""
    choice: dict[str, Any] = {"index": 0, "finish_reason": None}
    choice |= _said("delta" if kind == "chat" else "text", text)
    if ask.has_logprobs:
        choice["logprobs"] = _logprobs(kind, token_ids, logprobs)
    if ask.has_token_ids:
        choice["token_ids"] = list(token_ids)
    return {**base, "choices": [choice]}


def head(kind: str, name: str, *, is_streamed: bool = False) -> dict[str, Any]:
    """Return what every answer begins with."""
    short, long = {"chat": ("chatcmpl", "chat.completion"), "completion": ("cmpl", "text_completion")}[kind]
    made = f"{long}.chunk" if is_streamed and kind == "chat" else long
    return {"id": f"{short}-{uuid.uuid4().hex}", "object": made, "created": int(time.time()), "model": name}


def usage(prompt_ids: Sequence[int], result: TurnResult) -> dict[str, int]:
    """Return the counts of tokens."""
    num_prompt, num_new = len(prompt_ids), len(result.token_ids)
    return {"prompt_tokens": num_prompt, "completion_tokens": num_new, "total_tokens": num_prompt + num_new}


def provenance(ask: Ask, result: TurnResult) -> dict[str, Any]:
    """Return where a turn ran and which weights made it."""
    return {
        "trajectory_id": ask.trajectory_id,
        "finish_reason": result.finish_reason.value,
        "versions": to_plain(result.versions),
        "hops": to_plain(result.hops),
    }


def finish_name(reason: FinishReason) -> str:
    """Return OpenAI's word for why an answer ended, ROSE's own where there is none."""
    return _REASONS.get(reason, reason.value)


def _refuse_unusable(body: Mapping[str, Any]) -> None:
    unknown = set(body) - _USED - _IGNORED - set(_NEUTRAL)
    asked = [name for name, values in _NEUTRAL.items() if body.get(name) is not None and body[name] not in values]
    if unknown or asked:
        names = ", ".join(sorted([*unknown, *asked]))
        message = f"not supported: {names}; leave it out" + (f" (or {_NEUTRAL[asked[0]][0]!r})" if asked else "")
        raise RequestRefusedError(message)
    if not isinstance(body.get("metadata") or {}, Mapping):
        message = "metadata is an object"
        raise RequestRefusedError(message)


def _has_logprobs(given: Any) -> bool:
    """Tell whether log-probs are asked for: a completion's ``0`` asks for those of the sampled tokens alone."""
    if not isinstance(given, bool | int | None):
        message = f"logprobs is true, false or a number, not {given!r:.80}"
        raise TypeError(message)
    return given is not None and given is not False


def _name(fields: Mapping[str, Any], name: str) -> str:
    given = fields.get(name)
    if isinstance(given, bool) or not isinstance(given, str | int | None):
        message = f"{name} is a text, not {given!r:.80}"
        raise TypeError(message)
    return "" if given is None else str(given)


def _flag(body: Mapping[str, Any], name: str) -> bool:
    given = body.get(name)
    if not isinstance(given, bool | None):
        message = f"{name} is true or false, not {given!r:.80}"
        raise TypeError(message)
    return bool(given)


def _sampling(kind: str, body: Mapping[str, Any], tokenizer: Tokenizer | None) -> Sampling:
    most = next((body[name] for name in ("max_completion_tokens", "max_tokens") if body.get(name) is not None), None)
    given = {name: body[name] for name in ("temperature", "top_p", "ignore_eos", "seed") if body.get(name) is not None}
    return Sampling(
        max_tokens=_DEFAULT_MAX_TOKENS[kind] if most is None else most,
        stop_token_ids=(*_listed(body, "stop_token_ids"), *_stops(body.get("stop"), tokenizer)),
        logprobs=True,
        **given,
    )


def _listed(body: Mapping[str, Any], name: str) -> Sequence[Any]:
    given = body.get(name) or ()
    if not isinstance(given, Sequence) or isinstance(given, str):
        message = f"{name} is a list, not {given!r:.80}"
        raise TypeError(message)
    return given


def _stops(stop: Any, tokenizer: Tokenizer | None) -> list[int]:
    """Return the ids of stop texts, each of which must be one token: a pool sees ids only."""
    texts = stop if isinstance(stop, list) else [] if stop is None else [stop]
    if not all(isinstance(text, str) for text in texts):
        message = f"stop is a text or a list of texts, not {stop!r:.80}"
        raise TypeError(message)
    ids = [list(need(tokenizer, "a stop text").encode(text)) for text in texts]
    wrong = [text for text, one in zip(texts, ids, strict=True) if len(one) != 1]
    if wrong:
        message = f"a stop text must be one token, {wrong[0]!r} is not; give stop_token_ids, or cut the text yourself"
        raise ValueError(message)
    return [one[0] for one in ids]


def _logprobs(kind: str, token_ids: Sequence[int], logprobs: Sequence[float]) -> dict[str, Any]:
    names = [f"token_id:{token}" for token in token_ids]
    if kind == "chat":
        rows = zip(names, logprobs, strict=True)
        return {
            "content": [{"token": name, "logprob": value, "bytes": None, "top_logprobs": []} for name, value in rows]
        }
    return {"tokens": names, "token_logprobs": list(logprobs), "top_logprobs": None, "text_offset": None}


def _said(name: str, text: str) -> dict[str, Any]:
    return {name: text if name == "text" else {"role": "assistant", "content": text}}
