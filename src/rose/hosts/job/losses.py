"""Whoever runs a pool hears of engines that take no turns, and of their return."""

from __future__ import annotations

from collections.abc import Callable

import attrs

from rose.policies.routing import EngineState
from rose.pool.events import EngineStateChanged
from rose.types import EngineId


@attrs.frozen
class Losses:
    """A pool's observer that tells in words what somebody may want to mend. The same thing is told once.

    Args:
        say: Takes one line.
    """

    say: Callable[[str], None]
    _out: dict[EngineId, EngineState] = attrs.field(factory=dict, init=False)

    def __call__(self, event: object) -> None:
        """Be the observer."""
        if not isinstance(event, EngineStateChanged):
            return
        engine_id, state = event.engine_id, event.new
        if state in (EngineState.LOST, EngineState.FENCED) and self._out.get(engine_id) is not state:
            self._out[engine_id] = state
            self.say(f"engine {engine_id} is {state.value} and takes no turns: {event.why}")
        elif state is EngineState.READY and engine_id in self._out:
            del self._out[engine_id]
            self.say(f"engine {engine_id} takes turns again")
