"""A tokenizer from a model's folder, and the exact tokens of chats by it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")
pytest.importorskip("tokenizers", reason="tokenizers is not installed: pip install 'rose-rl[text]'")
pytest.importorskip("jinja2", reason="jinja2 is not installed: pip install 'rose-rl[text]'")

from rose.errors import ConfigError, RequestRefusedError
from rose.hosts.http.chat_history import Histories, HistoryError, normal
from rose.hosts.http.tokenizers import FolderTokenizer
from rose.reference.tokenizer import EOS_ID, WordTokenizer
from rose.types import FinishReason, TurnResult, VersionSpan, WeightVersion

TEMPLATE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}{{ raise_exception('late system') }}"
    "{% endif %}{{ message.role }} {{ message.content }} {{ eos_token }} {% endfor %}{% if add_generation_prompt %}assistant {% endif %}"
)
WORDS = ["user", "assistant", "system", "go", "left", "right", "you", "fell", "\u2042rose-answer\u2042"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    WordTokenizer(WORDS).save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"chat_template": TEMPLATE}
    path.write_text(json.dumps(config))
    return tmp_path


def ids(text: str) -> list[int]:
    return list(WordTokenizer(WORDS).encode(text))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def test_text_to_ids_and_back(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    assert list(tokenizer.encode("go left")) == ids("go left")
    assert tokenizer.decode([*ids("go left"), EOS_ID]) == "go left"
    assert tokenizer.stop_token_ids == (EOS_ID,)


def test_a_chat_is_begun_and_gone_on_with(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    assert list(tokenizer.begin([user("go")])) == [*ids("user go"), EOS_ID, *ids("assistant")]
    assert list(tokenizer.go_on([user("you fell")])) == [EOS_ID, *ids("user you fell"), EOS_ID, *ids("assistant")]


def test_the_end_of_an_answer_comes_once(folder: Path) -> None:
    histories = Histories(FolderTokenizer(folder), 4)
    step = histories.begin(("", "t"), [user("go")])
    histories.finish(step, result([*ids("left"), EOS_ID]), "left")
    answered = [user("go"), {"role": "assistant", "content": "left"}]
    again = histories.begin(("", "t"), [*answered, user("you fell")])
    assert again.prompt_ids == [
        *step.prompt_ids,
        *ids("left"),
        EOS_ID,
        *ids("user you fell"),
        EOS_ID,
        *ids("assistant"),
    ]


def test_what_a_template_refuses_is_said(folder: Path) -> None:
    tokenizer = FolderTokenizer(folder)
    with pytest.raises(RequestRefusedError, match="late system"):
        tokenizer.begin([user("go"), {"role": "system", "content": "go"}])
    (folder / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    with pytest.raises(RequestRefusedError, match="does not keep earlier answers"):
        FolderTokenizer(folder).go_on([user("go")])
    (folder / "chat_template.jinja").write_text("{{ ''.__class__.__mro__ }}")
    with pytest.raises(RequestRefusedError):
        FolderTokenizer(folder).begin([user("go")])


def test_a_folder_without_what_it_needs(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a tokenizer"):
        FolderTokenizer(tmp_path / "nowhere")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(RequestRefusedError, match="no chat template"):
        FolderTokenizer(folder).begin([user("go")])
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json cannot be read"):
        FolderTokenizer(folder)


def test_histories_are_bounded_and_forgotten_ones_refused(folder: Path) -> None:
    histories = Histories(FolderTokenizer(folder), 2)
    for name in ("a", "b", "c"):
        histories.finish(histories.begin(("", name), [user("go")]), result(ids("left")), "left")
    assert histories.get(("", "a")) is None
    with pytest.raises(HistoryError, match="'a' is not known"):
        histories.begin(("", "a"), [user("go"), {"role": "assistant", "content": "left"}, user("you fell")])
    assert histories.forget(("", "b"))
    assert not histories.forget(("", "b"))


def test_spans_and_log_probs_stand_at_their_tokens(folder: Path) -> None:
    histories = Histories(FolderTokenizer(folder), 2)
    step = histories.begin(("", "t"), [user("go")])
    histories.finish(step, result(ids("left"), version=1), "left")
    step = histories.begin(("", "t"), [user("go"), {"role": "assistant", "content": "left"}, user("go")])
    histories.finish(step, result(ids("right"), version=2), "right")
    known = histories.get(("", "t"))
    assert known is not None
    marked = [place for place, bit in enumerate(known.mask) if bit]
    assert [(span.version.n, span.start, span.end) for span in known.versions] == [
        (n, place, place + 1) for n, place in zip((1, 2), marked, strict=True)
    ]
    assert len(known.logprobs) == 2
    assert len(known.mask) == len(known.token_ids)


@pytest.mark.parametrize("message", ["text", {}, {"role": 1}, {"role": "user", "content": 5}])
def test_what_is_no_message(message: object) -> None:
    with pytest.raises(RequestRefusedError, match="message"):
        normal(message)


def test_text_parts_are_one_text() -> None:
    parts = [{"type": "text", "text": "go "}, {"type": "text", "text": "left"}]
    assert normal({"role": "user", "content": parts, "name": None}) == user("go left")


def result(token_ids: list[int], version: int | None = None) -> TurnResult:
    spans = () if version is None else (VersionSpan(version=WeightVersion("r", version), start=0, end=len(token_ids)),)
    reason = FinishReason.STOP if token_ids[-1] == EOS_ID else FinishReason.LENGTH
    return TurnResult(
        token_ids=tuple(token_ids), logprobs=(-0.5,) * len(token_ids), finish_reason=reason, versions=spans, hops=()
    )
