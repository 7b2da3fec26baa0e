"""The adapter against a stand-in of the two packages that it calls."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from rose.errors import ConfigError
from rose.reference.alfworld import AlfWorld, check_alfworld
from rose.reference.environment import load_environment, longest_episode
from rose.reference.household import Household


class Game:
    """Won by taking the mug."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.actions: list[str] = []

    def reset(self):
        return SimpleNamespace(feedback="-= Welcome =-\n\nYou see a mug 1.\n\nYour task is to: take it.", won=False)

    def step(self, action: str):
        self.actions.append(action)
        is_won = action == "take mug 1 from desk 1"
        return SimpleNamespace(feedback="Nothing happens.", won=is_won), float(is_won), is_won


@pytest.fixture
def games(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Game]:
    started: list[Game] = []
    for name in ("a", "b"):
        (tmp_path / "json_2.1.1" / "train" / name).mkdir(parents=True)
        (tmp_path / "json_2.1.1" / "train" / name / "game.tw-pddl").write_text("{}")
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path))
    textworld = ModuleType("textworld")
    textworld.EnvInfos = SimpleNamespace
    textworld.start = lambda path, infos, wrappers: started.append(Game(path)) or started[-1]
    monkeypatch.setitem(sys.modules, "textworld", textworld)
    parts = ["alfworld", "agents", "environment", "alfred_tw_env"]
    for end in range(1, len(parts) + 1):
        module = ModuleType(".".join(parts[:end]))
        module.AlfredDemangler = SimpleNamespace
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return started


def test_it_is_an_environment_with_the_words_of_the_household():
    assert load_environment("rose.reference.alfworld:AlfWorld") is AlfWorld
    assert set(Household.words) <= set(AlfWorld.words)
    assert longest_episode(AlfWorld) <= 4096


def test_a_game_is_played_by_its_seed(games: list[Game]):
    check_alfworld()
    world = AlfWorld()
    first = world.reset(3)
    assert first == "welcome you see a mug 1 . your task is to : take it . >"
    assert games[0].path.endswith("train/b/game.tw-pddl")
    assert world.step("look around").observation == "nothing happens . >"
    step = world.step("take mug 1 from desk 1 .")
    assert (step.reward, step.is_done, step.observation) == (1.0, True, "")
    assert games[0].actions == ["look", "take mug 1 from desk 1"]


def test_missing_data_and_packages_are_told(games: list[Game], monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setitem(sys.modules, "textworld", None)
    with pytest.raises(ConfigError, match="env alfworld needs textworld: pip install alfworld"):
        check_alfworld()
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "none"))
    with pytest.raises(ConfigError, match=r"there are no games in .*none; run alfworld-download"):
        check_alfworld()
    assert games == []
