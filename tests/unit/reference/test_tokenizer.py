from __future__ import annotations

from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.reference.lake import FrozenLake
from rose.reference.tokenizer import UNK_ID, WordTokenizer


def test_ids_follow_the_reserved_ones_and_come_back():
    tokenizer = WordTokenizer(("left", "go"))
    assert tokenizer.encode("go left go") == (5, 4, 5)
    assert tokenizer.decode((5, 4, 1)) == "go left <bos>"
    assert tokenizer.encode(("go", "nowhere")) == (5, UNK_ID)
    assert tokenizer.decode((31, -1)) == "<unk> <unk>"


@pytest.mark.parametrize(("num_words", "num_ids"), [(1, 32), (28, 32), (29, 64)])
def test_the_vocabulary_is_padded_to_a_multiple_of_32(num_words: int, num_ids: int):
    assert WordTokenizer([f"w{i}" for i in range(num_words)]).num_ids == num_ids


@pytest.mark.parametrize("words", [("a", "a"), ("a", "<eos>")])
def test_doubled_and_reserved_words_are_refused(words: tuple[str, ...]):
    with pytest.raises(ConfigError, match="twice or one of"):
        WordTokenizer(words)


@pytest.mark.filterwarnings("ignore")
def test_the_saved_tokenizer_gives_the_same_ids_as_ours(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    ours = WordTokenizer.for_environment(FrozenLake)
    ours.save(tmp_path)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "obs P F F F / right? hole down"
    assert tuple(theirs(text)["input_ids"]) == ours.encode(text)
    assert theirs.decode(list(ours.encode(text))) == text
    assert (theirs.pad_token_id, theirs.bos_token_id, theirs.eos_token_id, theirs.unk_token_id) == (0, 1, 2, 3)
