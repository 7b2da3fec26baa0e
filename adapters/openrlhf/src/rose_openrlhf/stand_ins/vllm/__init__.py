"""A stand-in for vLLM on a trainer's machine: the few names that OpenRLHF imports there. It runs no model.

``rose_openrlhf.workers`` puts it behind all other folders of the import path, and only where no vLLM is installed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

__version__ = "0.29.0+rose"  # the release whose names these are
IS_STAND_IN = True


@dataclass(kw_only=True)
class SamplingParams:
    """How to draw tokens: vLLM's fields and defaults. What a pool cannot do is refused when it is used."""

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: Any = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None


def __getattr__(name: str) -> Any:
    message = f"vllm.{name}: vLLM is not installed here, and rose_openrlhf's stand-in has only what OpenRLHF's trainer imports"
    raise AttributeError(message)
