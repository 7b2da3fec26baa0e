"""The policy's words as token ids: one id a word, saved as a local Hugging Face tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from rose.errors import ConfigError
from rose.reference.environment import RESERVED_WORDS, Environment

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
VOCABULARY_MULTIPLE = 32


class WordTokenizer:
    """Words to ids and back. Ids 0 to 3 are padding, begin, end and unknown.

    Attributes:
        num_ids: Size of the vocabulary, rounded up to a multiple of 32 (the last ids may name no word).
    """

    def __init__(self, words: Sequence[str]) -> None:
        self._words = (*RESERVED_WORDS, *words)
        self._ids = {word: i for i, word in enumerate(self._words)}
        if len(self._ids) != len(self._words):
            message = f"the vocabulary has a word twice or one of {RESERVED_WORDS}: {list(words)!r}"
            raise ConfigError(message)
        self.num_ids = -(-len(self._words) // VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE

    @classmethod
    def for_environment(cls, environment: type[Environment] | Environment) -> WordTokenizer:
        """Return the tokenizer of an environment's words."""
        return cls(tuple(environment.words))

    def encode(self, text: str | Iterable[str]) -> tuple[int, ...]:
        """Return one id a word; words outside the vocabulary become the unknown id."""
        words = text.split() if isinstance(text, str) else text
        return tuple(self._ids.get(word, UNK_ID) for word in words)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the words of ``ids``; an id that names no word reads as ``<unk>``."""
        known = len(self._words)
        return " ".join(self._words[i] if 0 <= i < known else RESERVED_WORDS[UNK_ID] for i in ids)

    def save(self, folder: Path) -> None:
        """Write ``tokenizer.json`` and ``tokenizer_config.json`` as Hugging Face's fast tokenizers read them."""
        folder.mkdir(parents=True, exist_ok=True)
        special = [
            {"id": i, "content": word, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for i, word in enumerate(RESERVED_WORDS)
        ]
        model = {"type": "WordLevel", "vocab": self._ids, "unk_token": RESERVED_WORDS[UNK_ID]}
        empty = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
        document = {"version": "1.0", **empty, "added_tokens": special} | {
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": model,
        }
        (folder / "tokenizer.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), RESERVED_WORDS, strict=True))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
