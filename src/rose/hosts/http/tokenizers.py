"""What the text routes of a pool need of a tokenizer, and one read from a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from rose.errors import BackendUnavailableError, ConfigError, RequestRefusedError

Message = Mapping[str, Any]
"""A message of a chat, as OpenAI's clients send it: ``role``, ``content`` and so on."""

_MARK = "\u2042rose-answer\u2042"


class Tokenizer(Protocol):
    """Text to token ids and back. A chat is begun once and then only gone on with: what was sampled is never encoded again."""

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Return the ids that end an answer and are no part of its text."""

    def encode(self, text: str) -> Sequence[int]:
        """Return a plain text's ids, nothing added."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def begin(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return a chat's prompt, up to where the assistant speaks."""

    def go_on(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return what stands between an answer's text and the next one: the end of the answer, ``messages``, the next one's beginning."""


class FolderTokenizer:
    """The tokenizer of a model's folder: ``tokenizer.json``, and the chat template beside it.

    Args:
        folder: Where they are.

    Raises:
        BackendUnavailableError: The libraries for it are not installed.
        ConfigError: The folder has no usable tokenizer.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        path = self._folder / "tokenizer.json"
        try:
            import tokenizers  # noqa: PLC0415 - only where text is wanted
        except ModuleNotFoundError as error:
            raise _unavailable(error) from error
        try:
            self._tokenizer: Any = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            message = f"{path} cannot be read as a tokenizer: {error}; give the folder of a model that has one"
            raise ConfigError(message) from error
        self._settings = _read(self._folder / "tokenizer_config.json")
        self._template: Any = None
        self._stop_token_ids = self._find_stops()

    @property
    def stop_token_ids(self) -> Sequence[int]:
        """Return the ids that end an answer: the model's end of text, as its files say."""
        return self._stop_token_ids

    def encode(self, text: str) -> Sequence[int]:
        """Return a text's ids, without special ones around it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, without special tokens."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=True))

    def begin(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return a chat's prompt."""
        return self.encode(self._render(messages))

    def go_on(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return what follows an answer.

        Raises:
            RequestRefusedError: The template changes earlier answers, so a chat cannot be gone on with.
        """
        text = self._render([{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}, *messages])
        _, mark, rest = text.partition(_MARK)
        if not mark:
            message = (
                f"the chat template of {self._folder} does not keep earlier answers; send token ids to /v1/completions"
            )
            raise RequestRefusedError(message)
        return self.encode(rest)

    def _render(self, messages: Sequence[Message]) -> str:
        if self._template is None:
            self._template = self._compile()
        special = {
            name: _text(self._settings.get(name)) for name in ("bos_token", "eos_token", "pad_token", "unk_token")
        }
        try:
            return str(self._template.render(messages=messages, add_generation_prompt=True, **special))
        except Exception as error:  # a template may raise what it likes
            message = f"the chat template of {self._folder} refuses these messages: {error}"
            raise RequestRefusedError(message) from error

    def _compile(self) -> Any:
        try:
            from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415 - only where chat is wanted
        except ModuleNotFoundError as error:
            raise _unavailable(error) from error
        beside = self._folder / "chat_template.jinja"
        source = beside.read_text(encoding="utf-8") if beside.exists() else self._settings.get("chat_template")
        if not isinstance(source, str):
            message = f"{self._folder} has no chat template; use /v1/completions"
            raise RequestRefusedError(message)
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        return environment.from_string(source)

    def _find_stops(self) -> tuple[int, ...]:
        given = _read(self._folder / "generation_config.json").get("eos_token_id")
        ids = [given] if isinstance(given, int) else list(given or ())
        named = self._tokenizer.token_to_id(_text(self._settings.get("eos_token")))
        return tuple(dict.fromkeys([*ids, *([] if named is None else [named])]))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read: {error}"
        raise ConfigError(message) from error
    return data if isinstance(data, dict) else {}


def _text(token: Any) -> str:
    """Return a special token's text; files have it plain or as an object."""
    return str(token.get("content", "")) if isinstance(token, Mapping) else str(token or "")


def _refuse(message: str) -> None:
    raise ValueError(message)


def _unavailable(error: ImportError) -> BackendUnavailableError:
    return BackendUnavailableError(f"text needs a library that is not installed ({error}); pip install 'rose-rl[text]'")
