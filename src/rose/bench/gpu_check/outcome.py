"""What became of a part, as it is handed from the process that ran it to the one that writes it down. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"


@attrs.frozen(kw_only=True)
class Figure:
    """A number, and beside it what it should be.

    Attributes:
        name: What was measured.
        value: The number.
        unit: Its unit.
        aim: What it should be, in words; empty where nothing is asked.
        is_met: Whether it is; ``None`` where nothing is asked.
    """

    name: str
    value: float
    unit: str
    aim: str = ""
    is_met: bool | None = None

    @classmethod
    def at_least(cls, name: str, value: float, unit: str, aim: float) -> Figure:
        """Return a figure that should not be below a number."""
        return cls(name=name, value=value, unit=unit, aim=f"at least {aim:g}", is_met=bool(value >= aim))

    @classmethod
    def at_most(cls, name: str, value: float, unit: str, aim: float) -> Figure:
        """Return a figure that should not be above a number."""
        return cls(name=name, value=value, unit=unit, aim=f"at most {aim:g}", is_met=bool(value <= aim))


@attrs.frozen(kw_only=True)
class Outcome:
    """What became of one part.

    Attributes:
        name: The part.
        shows: What it shows.
        status: ``passed``, ``failed`` or ``not run``.
        reason: Why it was not run, or how it failed.
        seconds: How long it took.
        figures: What it measured.
    """

    name: str
    shows: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    figures: Sequence[Figure] = ()

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {**attrs.asdict(self, recurse=False), "figures": [attrs.asdict(one) for one in self.figures]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Outcome:
        """Read what ``to_json`` wrote."""
        return cls(**{**data, "figures": [Figure(**one) for one in data["figures"]]})
