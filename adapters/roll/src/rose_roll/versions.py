"""Which weights turns may be made by, and which step of ROLL made them.

ROSE counts a launch's pushes from 0. ROLL counts global steps, and says them only where results are made; so whoever makes results
notes at each new step which version the pool then has.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import attrs

from rose.types import AnyVersion, AtLeast, TurnResult, VersionConstraint, WeightVersion

_REFRESH_S = 2.0


@attrs.define
class Versions:
    """The newest version known, and the step that each was first seen in. Any thread may ask.

    Attributes:
        newest: The pool's newest version when it was asked; ``None``: it had none yet.
        refresh_s: For how long that is believed where no step is announced.
    """

    refresh_s: float = _REFRESH_S
    clock: Callable[[], float] = time.monotonic
    newest: WeightVersion | None = None
    _read_at_s: float | None = attrs.field(default=None, init=False)
    _owed_step: int | None = attrs.field(default=None, init=False)
    _steps: dict[WeightVersion, int] = attrs.field(factory=dict, init=False)
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def is_old(self) -> bool:
        """Tell whether the pool should be asked again."""
        with self._lock:
            is_old = self._read_at_s is None or self.clock() - self._read_at_s >= self.refresh_s
            return is_old or self._owed_step is not None

    def note(self, version: WeightVersion | None, step: int | None = None) -> None:
        """Note what the pool has now, and in which step of ROLL that was seen. One that lost its weights has not made older ones good."""
        with self._lock:
            self._read_at_s = self.clock()
            step, self._owed_step = self._owed_step if step is None else step, None
            if version is None:
                return
            self.newest = version
            if step is not None:
                self._steps.setdefault(version, step)

    def owe(self, step: int) -> None:
        """Note that a step began while the pool could not be asked: no turn goes out before it was."""
        with self._lock:
            self._owed_step = step

    def constraint(self) -> VersionConstraint:
        """Return what a turn that begins now asks for: the newest weights known, or later ones."""
        newest = self.newest
        return AnyVersion() if newest is None else AtLeast(newest.n)

    def step_of(self, version: WeightVersion) -> int | None:
        """Return the step of ROLL that a version was first seen in."""
        return self._steps.get(version)


def spans_of(result: TurnResult, versions: Versions, *, offset: int = 0) -> list[dict[str, Any]]:
    """Return which weights made which tokens, as plain data: ``start``, ``end`` (moved by ``offset``), ``version``, ``step``."""
    return [
        {
            "start": span.start + offset,
            "end": span.end + offset,
            "version": str(span.version),
            "step": versions.step_of(span.version),
        }
        for span in result.versions
    ]


def ends_of(spans: list[dict[str, Any]]) -> tuple[str | None, str | None]:
    """Return the oldest and the newest version of spans, of one run; by their numbers."""
    found = sorted({span["version"] for span in spans}, key=lambda text: WeightVersion.parse(text).n)
    return (found[0], found[-1]) if found else (None, None)
