"""Settings of vLLM and SGLang that a turn of a pool does not have, and the values at which they change nothing.

For adapters: whatever else a framework's sampling settings ask for would change what is drawn, so that it has to be refused by its name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "best_of": (None, 1),
    "num_beams": (None, 1),
    "use_beam_search": (None, False),
    "top_k": (None, 0, -1),
    "min_p": (None, 0),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 0, 1),
    "min_tokens": (None, 0),
    "bad_words": (None, (), []),
    "logit_bias": (None, {}),
    "logits_processors": (None, (), []),
    "prompt_logprobs": (None, False),
    "extra_args": (None, {}),
}
"""Setting -> the values at which it has no effect; numbers compare as numbers, and 0 is not ``False``."""

TEXT_ONLY = frozenset(
    {
        "detokenize",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "no_stop_trim",
        "output_kind",
    }
)
"""Settings that say how tokens become text and are handed out, and change no token."""


def is_neutral(name: str, value: Any) -> bool:
    """Return whether a setting at this value changes nothing of what is drawn; ``False`` for one that is not known."""
    return name in TEXT_ONLY or any(
        value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in NEUTRAL.get(name, ())
    )
