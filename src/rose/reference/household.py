"""A text game in the manner of ALFWorld: find an object in a house, treat it if asked, put it where it belongs or look at it under a lamp.

An observation ends with ``>``, an answer is one action and ends with ``.``::

    around you : cabinet 1 , fridge 1 , ... . your task : put a hot mug in/on desk . >
    go to cabinet 1 .
    you are at cabinet 1 in the kitchen . it is closed . >

Actions: ``go to``, ``open``, ``close``, ``take ... from``, ``put ... in/on``, ``clean``/``heat``/``cool ... with``, ``use``, ``look``,
``inventory``. What cannot be done is answered by ``nothing happens .``. Reward 1 when the task is done, 0 otherwise; 49 turns at most, as
ALFWorld's agents have. The house is a function of the seed alone, and always solvable.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from rose.reference.environment import DemonstratedTurn, Step
from rose.reference.household_world import (
    APPLIANCES,
    DISHES,
    FOOD,
    LAMP,
    MOST_IN_ONE,
    NOTHING_HAPPENS,
    NUMBERS,
    ROOMS,
    THINGS,
    House,
    Task,
    kind_of,
)

_END, _PROMPT = ".", ">"
_VERBS = (
    "go",
    "to",
    "open",
    "close",
    "take",
    "from",
    "put",
    "in/on",
    "clean",
    "heat",
    "cool",
    "with",
    "use",
    "look",
    "inventory",
)
_OTHER = "around you : , . > your task a hot examine are at in the it is closed nothing happens carry".split()  # noqa: SIM905
_MOST_PLACES = 13
_LONGEST_FIRST = 3 * _MOST_PLACES + 16
_LONGEST_SEEN = 8 + 4 + 3 * MOST_IN_ONE + 2
_TEACHER_BASE = 1 << 31


class Household:
    """One house at a time (implements ``Environment``).

    A demonstration searches the receptacles in the order in which they were told, so that it can be learned from what is seen alone;
    ``noise_fraction`` of its actions are drawn at random from those that are possible.
    """

    words: Sequence[str] = tuple(
        dict.fromkeys(
            (*_OTHER, *_VERBS, *NUMBERS, *ROOMS, *itertools.chain(*ROOMS.values()), *FOOD, *DISHES, *THINGS, LAMP)
        )
    )
    action_words: Sequence[str] = (_END,)
    max_turns = 49
    max_tokens_per_turn = 10
    max_episode_words = _LONGEST_FIRST + max_turns * (_LONGEST_SEEN + max_tokens_per_turn)
    noise_fraction = 0.1

    def __init__(self) -> None:
        self._house: House | None = None
        self._num_turns = 0

    def reset(self, seed: int) -> str:
        """Start in the house of ``seed``."""
        self._house, self._num_turns = House.generate(seed), 0
        return f"{self._house.describe()} {_PROMPT}"

    def step(self, text: str | None) -> Step:
        """Do the action that ``text`` is; nothing without its end."""
        house = self._playing()
        self._num_turns += 1
        words = (text or "").split()
        seen = house.act(words[:-1]) if words and words[-1] == _END else NOTHING_HAPPENS
        is_done = house.is_won or self._num_turns >= self.max_turns
        return Step(observation="" if is_done else f"{seen} {_PROMPT}", reward=float(house.is_won), is_done=is_done)

    def admissible(self) -> list[str]:
        """Return every action that is possible now, with its end."""
        return [f"{action} {_END}" for action in self._playing().admissible()]

    def demonstrate(self, seed: int) -> list[DemonstratedTurn]:
        """Return one episode of a teacher that knows what it has seen and no more."""
        rng = random.Random(seed)
        house = House.generate(_TEACHER_BASE + rng.randrange(1 << 30))
        teacher, seen = Teacher(house), house.describe()
        turns: list[DemonstratedTurn] = []
        while not house.is_won and len(turns) < self.max_turns:
            is_noise = rng.random() < self.noise_fraction
            action = rng.choice(house.admissible()) if is_noise else teacher.choose()
            turns.append(DemonstratedTurn(observation=(*seen.split(), _PROMPT), answer=(*action.split(), _END)))
            seen = house.act(action.split())
            teacher.look()
        return turns

    def _playing(self) -> House:
        if self._house is None:
            message = "Household.step before reset"
            raise RuntimeError(message)
        return self._house


class Teacher:
    """Plays a house to its end by what it has seen: searches place after place, takes, treats, brings."""

    def __init__(self, house: House) -> None:
        self._house = house
        self._searched: set[str] = set()
        self._found: dict[str, str] = {}

    def look(self) -> None:
        """Take in what is to be seen now."""
        here = None if self._house.at is None else self._house.places[self._house.at]
        if here is None or not here.is_open:
            return
        self._searched.add(here.name)
        self._found = {thing: name for thing, name in self._found.items() if name != here.name}
        self._found |= dict.fromkeys(here.contents, here.name)

    def choose(self) -> str:
        """Return the next action."""
        goal, hand = self._house.goal, self._house.hand
        if hand is None:
            return self._fetch(goal.thing)
        if kind_of(hand) != goal.thing:
            return self._bring(hand, next(filter(self._has_room, self._house.places)))
        if goal.task is Task.EXAMINE:
            return self._at(name, f"use {LAMP} 1") if (name := self._found.get(f"{LAMP} 1")) else self._search()
        if goal.task in APPLIANCES and self._house.states.get(hand) != goal.task.value:
            verb, appliance = APPLIANCES[goal.task]
            return self._at(f"{appliance} 1", f"{verb} {hand} with {appliance} 1", needs_open=False)
        return self._bring(hand, next(filter(self._has_room, self._of_kind(goal.place))))

    def _of_kind(self, kind: str) -> list[str]:
        """Return the places of a kind, the one where the player stands first."""
        return sorted(
            (name for name in self._house.places if kind_of(name) == kind), key=lambda name: name != self._house.at
        )

    def _has_room(self, name: str) -> bool:
        return len(self._house.places[name].contents) < MOST_IN_ONE

    def _fetch(self, thing: str) -> str:
        for name, place in self._found.items():
            if kind_of(name) == thing and kind_of(place) != self._house.goal.place:
                return self._at(place, f"take {name} from {place}")
        return self._search()

    def _bring(self, hand: str, name: str) -> str:
        return self._at(name, f"put {hand} in/on {name}")

    def _at(self, name: str, action: str, *, needs_open: bool = True) -> str:
        if self._house.at != name:
            return f"go to {name}"
        return action if self._house.places[name].is_open or not needs_open else f"open {name}"

    def _search(self) -> str:
        left = [name for name in self._house.places if name not in self._searched]
        return self._at(left[0], "look") if left else "look"
