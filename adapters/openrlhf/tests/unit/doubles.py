"""What unit tests use in place of vLLM's settings, a tokenizer, and a pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from rose.errors import RoseError
from rose.types import FinishReason, Turn, TurnResult, VersionSpan, WeightVersion


class Letters:
    """A codec of one token a letter; ids under 32 are special."""

    def encode(self, text: str) -> list[int]:
        return [ord(char) for char in text]

    def decode(self, ids: Sequence[int], skips_special: bool) -> str:
        return "".join(chr(i) if i >= 32 else "" if skips_special else f"<{i}>" for i in ids)

    def __call__(self, *, text: str, add_special_tokens: bool, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": self.encode(text)}


class LettersTokenizer(Letters):
    """The same as a Hugging Face tokenizer."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False, **_: Any) -> str:  # type: ignore[override]
        return super().decode(ids, skip_special_tokens)


def openrlhf_params(**given: Any) -> SimpleNamespace:
    """Return what OpenRLHF's generator asks for, changed by ``given``."""
    asked = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 16, "min_tokens": 1, "skip_special_tokens": False, "logprobs": 1,
        "n": 1, "min_p": 0.0, "seed": None, "stop": None, "stop_token_ids": None, "ignore_eos": False, "presence_penalty": 0.0,
        "frequency_penalty": 0.0, "repetition_penalty": 1.0, "prompt_logprobs": None, "detokenize": True, "logit_bias": None,
        "include_stop_str_in_output": False, "bad_words": [], "structured_outputs": None, "extra_args": None,
    }  # fmt: skip
    return SimpleNamespace(**asked | given)


def result(ids: Sequence[int] | str, finish: FinishReason = FinishReason.STOP, n: int = 0) -> TurnResult:
    """Return a turn's result, with the log-prob -0.5 for the first token, -1.5 for the next and so on."""
    tokens = tuple(map(ord, ids)) if isinstance(ids, str) else tuple(ids)
    span = (VersionSpan(version=WeightVersion("r", n), start=0, end=len(tokens)),) if tokens else ()
    return TurnResult(
        token_ids=tokens,
        logprobs=tuple(-0.5 - i for i in range(len(tokens))),
        finish_reason=finish,
        versions=span,
        hops=(),
    )


class Script:
    """A pool that answers one after another of what it was given: results, or errors to raise."""

    def __init__(self, *answers: TurnResult | RoseError | Callable[[Turn], TurnResult]) -> None:
        self.answers, self.turns = list(answers), []

    async def generate(self, turn: Turn) -> TurnResult:
        self.turns.append(turn)
        answer = self.answers.pop(0)
        if isinstance(answer, RoseError):
            raise answer
        return answer if isinstance(answer, TurnResult) else answer(turn)


def failing(error: RoseError, partial: TurnResult | None = None) -> RoseError:
    """Return the error with tokens that were made before."""
    error.partial = partial
    return error
