"""The house of the household game: rooms, receptacles, objects, what can be done and what is seen. No I/O.

Invariants: a house is a function of its seed; every house can be solved; an object is in one receptacle or in the hand, which holds one;
what is in a closed receptacle is neither seen nor taken; an action that cannot be done changes nothing.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Mapping, Sequence

import attrs

ROOMS: Mapping[str, tuple[str, ...]] = {
    "kitchen": ("cabinet", "countertop", "fridge", "microwave", "sinkbasin", "diningtable", "garbagecan"),
    "bedroom": ("bed", "desk", "drawer"),
    "livingroom": ("sofa", "coffeetable", "sidetable"),
    "bathroom": ("shelf", "toilet"),
}
MOST_OF_A_KIND: Mapping[str, int] = {"cabinet": 3, "countertop": 2, "drawer": 3, "shelf": 2}
OPENABLE = frozenset({"cabinet", "drawer", "fridge", "microwave"})
FOOD = ("apple", "bread", "egg", "potato", "tomato")
DISHES = ("bowl", "cup", "mug", "plate")
THINGS = ("book", "candle", "cd", "cellphone", "keychain", "pen", "pillow", "soapbar", "watch")
LAMP = "desklamp"
NUMBERS = ("1", "2", "3", "4")
MOST_IN_ONE = 4
NOTHING_HAPPENS = "nothing happens ."

_REQUIRED = ("fridge", "microwave", "sinkbasin", "desk")
_LAMP_PLACES = ("desk", "sidetable")
_NUM_OBJECTS = (6, 9)
_NUM_OPTIONAL = (6, 9)


class Task(enum.Enum):
    """What is asked for, by the word that the task's sentence has for it."""

    PUT = "put"
    CLEAN = "clean"
    HEAT = "hot"
    COOL = "cool"
    EXAMINE = "examine"


APPLIANCES: Mapping[Task, tuple[str, str]] = {
    Task.CLEAN: ("clean", "sinkbasin"),
    Task.HEAT: ("heat", "microwave"),
    Task.COOL: ("cool", "fridge"),
}
_OBJECTS_OF: Mapping[Task, tuple[str, ...]] = {
    Task.PUT: (*FOOD, *DISHES, *THINGS),
    Task.CLEAN: (*DISHES, "apple", "potato", "tomato", "soapbar"),
    Task.HEAT: (*FOOD, "cup", "mug", "plate"),
    Task.COOL: (*FOOD, *DISHES),
    Task.EXAMINE: THINGS,
}


@attrs.frozen
class Goal:
    """The task of a house: an object of the kind ``thing``, to be put into a receptacle of the kind ``place`` (none to examine)."""

    task: Task
    thing: str
    place: str = ""

    @property
    def sentence(self) -> str:
        """Return it in words."""
        if self.task is Task.EXAMINE:
            return f"examine a {self.thing} with {LAMP} ."
        state = "" if self.task is Task.PUT else f"{self.task.value} "
        return f"put a {state}{self.thing} in/on {self.place} ."


@attrs.define
class Receptacle:
    """A place for objects, by its name (``cabinet 1``)."""

    name: str
    room: str
    is_open: bool
    contents: list[str] = attrs.field(factory=list)

    @property
    def kind(self) -> str:
        """Return the name without its number."""
        return kind_of(self.name)


def kind_of(name: str) -> str:
    """Return a name without its number."""
    return name.split(" ")[0]


@attrs.define
class House:
    """One house in play.

    Attributes:
        goal: What is to be done.
        places: Receptacles by name, in the order in which they are told.
        at: The receptacle where the player stands; nowhere at first.
        hand: What the player holds.
        states: What was done to objects last (``clean``, ``hot``, ``cool``).
        is_won: Whether the task is done.
    """

    goal: Goal
    places: dict[str, Receptacle]
    at: str | None = None
    hand: str | None = None
    states: dict[str, str] = attrs.field(factory=dict)
    is_won: bool = False

    @classmethod
    def generate(cls, seed: int) -> House:
        """Build the house that ``seed`` names."""
        rng = random.Random(seed)
        places = _make_places(rng)
        kinds = sorted({place.kind for place in places.values()})
        task = rng.choice(list(Task))
        thing = rng.choice(_OBJECTS_OF[task])
        appliance = APPLIANCES.get(task, ("", ""))[1]
        place = "" if task is Task.EXAMINE else rng.choice([kind for kind in kinds if kind != appliance])
        house = cls(Goal(task, thing, place), places)
        house._fill(rng)
        return house

    def _fill(self, rng: random.Random) -> None:
        lamp_place = rng.choice([each for each in self.places.values() if each.kind in _LAMP_PLACES])
        lamp_place.contents.append(f"{LAMP} 1")
        others = rng.choices((*FOOD, *DISHES, *THINGS), k=rng.randint(*_NUM_OBJECTS) - 1)
        counts: dict[str, int] = {}
        for thing in (self.goal.thing, *others):
            counts[thing] = counts.get(thing, 0) + 1
            room_left = [
                place
                for place in self.places.values()
                if len(place.contents) < MOST_IN_ONE - 1
                and not (thing == self.goal.thing and place.kind == self.goal.place)
            ]
            if counts[thing] <= len(NUMBERS):
                rng.choice(room_left).contents.append(f"{thing} {counts[thing]}")

    def describe(self) -> str:
        """Say what is around, and the task."""
        return f"around you : {' , '.join(self.places)} . your task : {self.goal.sentence}"

    def act(self, words: Sequence[str]) -> str:  # noqa: PLR0911 - one return an action
        """Do what the words of one action say; returns what is seen then."""
        match list(words):
            case ["go", "to", kind, number]:
                return self._go(f"{kind} {number}")
            case ["open" | "close" as verb, kind, number]:
                return self._open(f"{kind} {number}", is_opening=verb == "open")
            case ["take", thing, i, "from", kind, number]:
                return self._take(f"{thing} {i}", f"{kind} {number}")
            case ["put", thing, i, "in/on", kind, number]:
                return self._put(f"{thing} {i}", f"{kind} {number}")
            case ["clean" | "heat" | "cool" as verb, thing, i, "with", kind, number]:
                return self._treat(verb, f"{thing} {i}", f"{kind} {number}")
            case ["use", thing, number]:
                return self._use(f"{thing} {number}")
            case ["look"]:
                return NOTHING_HAPPENS if self.at is None else self._see(self.places[self.at])
            case ["inventory"]:
                return f"you carry {self.hand or 'nothing'} ."
        return NOTHING_HAPPENS

    def admissible(self) -> list[str]:
        """Return every action that can be done now, without its end."""
        return [*self._admissible()]

    def _admissible(self) -> Iterator[str]:
        yield from ("look", "inventory")
        yield from (f"go to {name}" for name in self.places if name != self.at)
        if self.at is None:
            return
        here = self.places[self.at]
        if here.kind in OPENABLE:
            yield f"{'close' if here.is_open else 'open'} {here.name}"
        if here.is_open:
            if self.hand is None:
                yield from (f"take {thing} from {here.name}" for thing in here.contents if kind_of(thing) != LAMP)
            elif len(here.contents) < MOST_IN_ONE:
                yield f"put {self.hand} in/on {here.name}"
            yield from (f"use {thing}" for thing in here.contents if kind_of(thing) == LAMP)
        if self.hand is not None:
            yield from (
                f"{verb} {self.hand} with {here.name}"
                for verb, appliance in APPLIANCES.values()
                if here.kind == appliance
            )

    def _go(self, name: str) -> str:
        if name not in self.places or name == self.at:
            return NOTHING_HAPPENS
        self.at = name
        return self._see(self.places[name])

    def _see(self, place: Receptacle) -> str:
        where = f"you are at {place.name} in the {place.room} ."
        return f"{where} {self._contents(place) if place.is_open else 'it is closed .'}"

    @staticmethod
    def _contents(place: Receptacle) -> str:
        return f"in/on it : {' , '.join(place.contents) or 'nothing'} ."

    def _open(self, name: str, *, is_opening: bool) -> str:
        if name != self.at or kind_of(name) not in OPENABLE or self.places[name].is_open is is_opening:
            return NOTHING_HAPPENS
        place = self.places[name]
        place.is_open = is_opening
        return f"you open {name} . {self._contents(place)}" if is_opening else f"you close {name} ."

    def _take(self, thing: str, name: str) -> str:
        place = self.places.get(name)
        is_there = place is not None and name == self.at and place.is_open and thing in place.contents
        if place is None or not is_there or self.hand is not None or kind_of(thing) == LAMP:
            return NOTHING_HAPPENS
        place.contents.remove(thing)
        self.hand = thing
        return f"you take {thing} from {name} ."

    def _put(self, thing: str, name: str) -> str:
        place = self.places.get(name)
        if place is None or name != self.at or not place.is_open or self.hand != thing:
            return NOTHING_HAPPENS
        if len(place.contents) >= MOST_IN_ONE:
            return NOTHING_HAPPENS
        place.contents.append(thing)
        self.hand = None
        state = self.states.get(thing, Task.PUT.value)
        wanted = self.goal.task
        is_as_wanted = wanted is Task.PUT or state == wanted.value
        self.is_won = kind_of(thing) == self.goal.thing and place.kind == self.goal.place and is_as_wanted
        return f"you put {thing} in/on {name} ."

    def _treat(self, verb: str, thing: str, name: str) -> str:
        if name != self.at or name not in self.places or self.hand != thing:
            return NOTHING_HAPPENS
        for task, (its_verb, appliance) in APPLIANCES.items():
            if its_verb == verb and kind_of(name) == appliance:
                self.states[thing] = task.value
                return f"you {verb} {thing} with {name} ."
        return NOTHING_HAPPENS

    def _use(self, thing: str) -> str:
        if self.at is None or kind_of(thing) != LAMP or thing not in self.places[self.at].contents:
            return NOTHING_HAPPENS
        is_lit = self.hand is not None and kind_of(self.hand) == self.goal.thing
        self.is_won = self.goal.task is Task.EXAMINE and is_lit
        return f"you use {thing} ."


def _make_places(rng: random.Random) -> dict[str, Receptacle]:
    """Return the receptacles: those that tasks need, and some others, room by room."""
    room_of = {kind: room for room, kinds in ROOMS.items() for kind in kinds}
    optional = [kind for kind in room_of if kind not in _REQUIRED for _ in range(MOST_OF_A_KIND.get(kind, 1))]
    chosen = [*_REQUIRED, *rng.sample(optional, rng.randint(*_NUM_OPTIONAL))]
    places = {}
    for kind, room in room_of.items():
        for number in range(1, chosen.count(kind) + 1):
            name = f"{kind} {number}"
            places[name] = Receptacle(name, room, is_open=kind not in OPENABLE)
    return places
