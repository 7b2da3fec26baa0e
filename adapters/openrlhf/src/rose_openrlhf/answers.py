"""A turn's result as the output object that OpenRLHF's executors read. Pure.

Shapes: ``token_ids`` is a list, ``logprobs`` has one ``{token id: Logprob}`` a token or is ``None``, as in vLLM. The token that ended an
answer (end of sequence, a stop token) is in ``token_ids`` and, unless asked for, not in ``text``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from rose.types import FinishReason, TurnResult
from rose_openrlhf.sampling import Codec, Request, TextRules

_TAIL = 6  # prompt tokens that decide whether the answer's text begins with a space
_INCOMPLETE = "�"


@attrs.frozen
class Logprob:
    """The natural log of the probability with which a token was drawn."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@attrs.frozen(kw_only=True)
class CompletionOutput:
    """One answer; the attributes are those of vLLM's class of this name."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]] | None
    cumulative_logprob: float | None
    finish_reason: str
    stop_reason: int | str | None


@attrs.frozen(kw_only=True)
class RequestOutput:
    """What ``llm_engine.generate`` returns. ``rose`` is the pool's own result: weight versions of the tokens, and the hops."""

    request_id: str
    prompt: None
    prompt_token_ids: list[int]
    prompt_logprobs: None
    outputs: list[CompletionOutput]
    finished: bool
    rose: TurnResult


def to_output(
    request_id: str, prompt_ids: Sequence[int], request: Request, result: TurnResult, codec: Codec
) -> RequestOutput:
    """Return the output of a turn, cut where a stop text ends it."""
    token_ids, text, stop_reason = _text_of(prompt_ids, request, result, codec)
    logprobs = result.logprobs[: len(token_ids)]
    is_stopped = stop_reason is not None
    completion = CompletionOutput(
        index=0,
        text=text,
        token_ids=token_ids,
        logprobs=_as_dicts(token_ids, logprobs) if request.sampling.logprobs else None,
        cumulative_logprob=sum(logprobs) if request.sampling.logprobs else None,
        finish_reason="stop" if is_stopped else _REASONS[result.finish_reason],
        stop_reason=stop_reason,
    )
    return RequestOutput(
        request_id=request_id,
        prompt=None,
        prompt_token_ids=list(prompt_ids),
        prompt_logprobs=None,
        outputs=[completion],
        finished=True,
        rose=result,
    )


_REASONS = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.ABORTED: "abort",
    FinishReason.EVICTED: "abort",
}


def _text_of(
    prompt_ids: Sequence[int], request: Request, result: TurnResult, codec: Codec
) -> tuple[list[int], str, int | str | None]:
    rules, ids = request.text, list(result.token_ids)
    texts = _Texts(prompt_ids, ids, rules, codec)
    is_ended_by_token = result.finish_reason is FinishReason.STOP and bool(ids) and ids[-1] not in rules.stop_ids
    num_shown = len(ids) - 1 if is_ended_by_token and not rules.includes_stop else len(ids)
    found = _find_stop(texts, rules, num_shown) if rules.stop else None
    if found is not None:
        stop, num_tokens, start = found
        text = texts.of(num_tokens)
        return ids[:num_tokens], text[: start + len(stop)] if rules.includes_stop else text[:start], stop
    is_stop_id = is_ended_by_token and ids[-1] in request.sampling.stop_token_ids
    return ids, texts.of(num_shown).rstrip(_INCOMPLETE), ids[-1] if is_stop_id else None


@attrs.frozen
class _Texts:
    """The text of the first tokens of an answer, decoded behind the end of its prompt."""

    prompt_ids: Sequence[int]
    ids: list[int]
    rules: TextRules
    codec: Codec

    def of(self, num_tokens: int) -> str:
        """Return the text of the first ``num_tokens`` tokens."""
        tail, ids = list(self.prompt_ids[-_TAIL:]), self.ids[:num_tokens]
        head, whole = (self.codec.decode(some, self.rules.skips_special) for some in (tail, tail + ids))
        return whole[len(head) :] if whole.startswith(head) else self.codec.decode(ids, self.rules.skips_special)


def _find_stop(texts: _Texts, rules: TextRules, num_shown: int) -> tuple[str, int, int] | None:
    """Return the stop text that is complete first, the number of tokens until then, and where in the text it starts."""
    before = len(texts.of(rules.min_tokens))  # a match must reach beyond the tokens that must come
    whole = texts.of(num_shown)
    ends = []
    for order, stop in enumerate(rules.stop):
        start = whole.find(stop, max(before - len(stop) + 1, 0))
        if start >= 0:
            ends.append((start + len(stop), order, start))
    if not ends:
        return None
    end, order, start = min(ends)
    low, high = 0, num_shown
    while low < high:
        middle = (low + high) // 2
        if len(texts.of(middle).rstrip(_INCOMPLETE)) >= end:
            high = middle
        else:
            low = middle + 1
    return rules.stop[order], low, start


def _as_dicts(token_ids: Sequence[int], logprobs: Sequence[float]) -> list[dict[int, Logprob]]:
    return [{token: Logprob(value)} for token, value in zip(token_ids, logprobs, strict=True)]


def mark(response: Any, notes: dict[str, float]) -> Any:
    """Add ``notes`` to a response's ``extra_logs``, which OpenRLHF averages and logs; every sample of a batch has the same keys.

    A response that is no dict, or whose ``extra_logs`` is none, is left as the executor made it.
    """
    if isinstance(response, dict) and isinstance(logs := response.get("extra_logs", {}), dict):
        return {**response, "extra_logs": {**logs, **notes}}
    return response
