"""ALFWorld's own text games as an environment, where its package and its data are present.

Needs ``pip install alfworld`` and the data of ``alfworld-download`` in the folder that ``ALFWORLD_DATA`` names. The words are those of the
household game and what ALFWorld's scenes have beside them; a word that is in neither reads as unknown.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rose.errors import ConfigError
from rose.reference.environment import Step
from rose.reference.household import Household

_END, _PROMPT = ".", ">"
_MOST_SEEN, _MOST_FIRST = 60, 160
_DATA = "ALFWORLD_DATA"
_SEEN_ONLY = re.findall(
    r"\S+",
    "armchair basketball bathtub bathtubbasin baseballbat boots box butterknife cart creditcard dresser faucet floorlamp fork glassbottle "
    "handtowel handtowelholder hanger kettle knife ladle laptop lettuce lightswitch newspaper ottoman painting pan papertowelroll pencil "
    "peppershaker plunger poster pot remotecontrol safe saltshaker scrubbrush showerdoor showerglass sink soapbottle spatula spoon "
    "spraybottle statue stoveburner stoveknob teddybear television tennisracket tissuebox toaster toiletpaper toiletpaperhanger towel "
    "towelholder tvstand vase window winebottle coffeemachine coffeepot blinds curtains dishsponge wateringcan "
    "welcome textworld alfred middle room looking quickly see you some and two put find them cool hot clean under facing next carrying "
    "turn on empty full there arrive at loc an - = !",
)
_NUMBERS = tuple(str(number) for number in range(1, 31))


class AlfWorld:
    """One of ALFWorld's training games at a time (implements ``Environment``)."""

    words: Sequence[str] = tuple(dict.fromkeys((*Household.words, *_SEEN_ONLY, *_NUMBERS)))
    action_words: Sequence[str] = (_END,)
    max_turns = 49
    max_tokens_per_turn = 12
    max_episode_words = _MOST_FIRST + max_turns * (_MOST_SEEN + max_tokens_per_turn)

    def __init__(self) -> None:
        self._game: Any = None
        self._num_turns = 0

    def reset(self, seed: int) -> str:
        """Start the game that ``seed`` names among those that are there."""
        games = _games()
        self._game = _open_game(games[seed % len(games)])
        self._num_turns = 0
        return f"{' '.join(_words(self._game.reset().feedback)[: _MOST_FIRST - 1])} {_PROMPT}"

    def step(self, text: str | None) -> Step:
        """Do the action that ``text`` is; a turn without its end looks around."""
        if self._game is None:
            message = "AlfWorld.step before reset"
            raise RuntimeError(message)
        self._num_turns += 1
        words = (text or "").split()
        state, _, is_over = self._game.step(" ".join(words[:-1]) if words and words[-1] == _END else "look")
        is_won = bool(state.won)
        is_done = is_over or is_won or self._num_turns >= self.max_turns
        observation = "" if is_done else f"{' '.join(_words(state.feedback)[: _MOST_SEEN - 1])} {_PROMPT}"
        return Step(observation=observation, reward=float(is_won), is_done=is_done)


def check_alfworld() -> None:
    """Check that ALFWorld's package and data are present.

    Raises:
        ConfigError: They are not; says what to do.
    """
    _games()
    _textworld()


def _games() -> list[Path]:
    folder = os.environ.get(_DATA)
    found = sorted(Path(folder).glob("json_2.1.1/train/**/game.tw-pddl")) if folder else []
    if not found:
        where = f"in {folder}" if folder else f"since {_DATA} is not set"
        message = f"env alfworld: there are no games {where}; run alfworld-download and set {_DATA} to its folder, or use env household"
        raise ConfigError(message)
    return found


def _textworld() -> Any:
    try:
        import textworld  # noqa: PLC0415 - loaded by environment workers only
        from alfworld.agents.environment.alfred_tw_env import AlfredDemangler  # noqa: PLC0415
    except ImportError as error:
        message = f"env alfworld needs {error.name}: pip install alfworld, or use env household"
        raise ConfigError(message) from error
    return textworld, AlfredDemangler


def _open_game(path: Path) -> Any:
    textworld, demangler = _textworld()
    infos = textworld.EnvInfos(won=True, feedback=True)
    return textworld.start(str(path), infos, [demangler()])


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9/]+|[.,:!]", text.lower())
