"""A Hugging Face tokenizer as the codec of ``sampling`` and ``answers``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs


@attrs.frozen
class HfCodec:
    """Encode and decode with a tokenizer, or with the tokenizer inside a processor."""

    tokenizer: Any

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens around it."""
        return list(self.tokenizer(text=text, add_special_tokens=False)["input_ids"])

    def decode(self, ids: Sequence[int], skips_special: bool) -> str:  # noqa: FBT001 - as the protocol has it
        """Return the text of ids, as it is: nothing is tidied up."""
        return str(
            self.tokenizer.decode(list(ids), skip_special_tokens=skips_special, clean_up_tokenization_spaces=False)
        )
