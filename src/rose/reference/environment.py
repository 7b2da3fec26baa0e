"""The environment role of the reference job: a multi-turn game in words, loaded from ``module:Class``.

An environment speaks words separated by blanks; the policy has one token a word. A turn of the policy ends at one of the
``action_words`` or after ``max_tokens_per_turn`` words. Nothing here loads torch.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import attrs

from rose.errors import ConfigError

RESERVED_WORDS = ("<pad>", "<bos>", "<eos>", "<unk>")


@attrs.frozen(kw_only=True)
class Step:
    """What one turn led to. ``observation`` is empty once the episode is done."""

    observation: str
    reward: float
    is_done: bool


class Environment(Protocol):
    """One episode at a time; the class is built without arguments, once or more a worker process.

    Attributes:
        words: Every word of observations and answers, fixed for the class.
        action_words: The words that end a turn; a subset of ``words``.
        max_turns: An episode is done after at most this many steps.
        max_tokens_per_turn: Longest answer of a turn, action word included.
    """

    words: Sequence[str]
    action_words: Sequence[str]
    max_turns: int
    max_tokens_per_turn: int

    def reset(self, seed: int) -> str:
        """Start the episode that ``seed`` names and return the first observation."""

    def step(self, text: str | None) -> Step:
        """Take the policy's words of one turn; ``None`` when they hold no action (the turn passes without a move)."""


def longest_episode(environment: type[Environment]) -> int:
    """Return how many tokens the longest episode may take, the begin token included.

    An environment may say so by ``max_episode_words``, observations and answers together; else its observations are taken to be no
    longer than twice that of its first episode.
    """
    stated: int | None = getattr(environment, "max_episode_words", None)
    if stated is not None:
        return 1 + stated
    observation = len(environment().reset(0).split())
    return 1 + environment.max_turns * (2 * observation + environment.max_tokens_per_turn)


@attrs.frozen(kw_only=True)
class DemonstratedTurn:
    """One turn of a demonstration: the words seen and the words to answer."""

    observation: tuple[str, ...]
    answer: tuple[str, ...]


@runtime_checkable
class SupportsDemonstrations(Protocol):
    """The environment can play by itself; enables the policy's warm start."""

    def demonstrate(self, seed: int) -> list[DemonstratedTurn]:
        """Return one whole episode played by a teacher, the same for the same ``seed``."""


def load_environment(spec: str) -> type[Environment]:
    """Import ``module:Class`` and check that it is an environment.

    Raises:
        ConfigError: The spec, the module, the class or one of its members is wrong; one line that says what to do.
    """
    module_name, separator, class_name = spec.partition(":")
    if not separator or not module_name or not class_name.isidentifier():
        message = f"--env {spec!r}: expected module:Class, for example rose.reference.lake:FrozenLake"
        raise ConfigError(message)
    found = getattr(_import(spec, module_name), class_name, None)
    if not inspect.isclass(found):
        message = f"--env {spec!r}: module {module_name} has no class {class_name}; check the part after the colon"
        raise ConfigError(message)
    _check_members(spec, found)
    return cast("type[Environment]", found)


def _import(spec: str, module_name: str) -> Any:
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        message = f"--env {spec!r}: cannot import {module_name} ({error}); install it or put its folder on PYTHONPATH"
        raise ConfigError(message) from error


def _check_members(spec: str, found: type) -> None:
    missing = [name for name in ("reset", "step") if not callable(getattr(found, name, None))]
    missing += [n for n in ("words", "action_words", "max_turns", "max_tokens_per_turn") if not hasattr(found, n)]
    if missing:
        message = (
            f"--env {spec!r}: {found.__name__} lacks {', '.join(missing)}; see rose.reference.environment.Environment"
        )
        raise ConfigError(message)
    for problem in _value_problems(found):
        message = f"--env {spec!r}: {found.__name__}{problem}"
        raise ConfigError(message)


def _value_problems(found: Any) -> list[str]:
    problems = [
        f".{name} must be a whole number of at least 1, got {getattr(found, name)!r}; correct it in the class"
        for name in ("max_turns", "max_tokens_per_turn")
        if not isinstance(getattr(found, name), int) or getattr(found, name) < 1
    ]
    words = list(found.words)
    bad = [word for word in words if not isinstance(word, str) or len(word.split()) != 1 or word in RESERVED_WORDS]
    if bad or len(set(words)) != len(words) or not words:
        problems.append(
            f".words must be distinct words without blanks, none of {RESERVED_WORDS}; wrong: {bad or words!r}"
        )
    strange = [word for word in found.action_words if word not in words]
    if strange or not found.action_words:
        problems.append(f".action_words must be some of .words; wrong: {strange or '(none given)'}")
    return problems
