"""How many turns one engine may have in flight, learned from its KV memory. Pure: readings and evictions in, a limit out.

Additive increase, multiplicative decrease. A reading with full KV memory, or an eviction, leaves ``cut_fraction`` of what was in
flight; while an engine makes tokens, has KV memory left and uses all of its slots, the limit grows by one at a time.

Invariants:

* ``min_slots <= num_slots <= cap``; without pressure the limit is the cap.
* Between two changes ``settle_s`` pass, so that one moment of pressure, told by many turns, cuts once.
* A reading older than ``reading_max_age_s`` moves nothing, and pressure is forgotten after ``forget_s``: an engine that was not used
  since says nothing about what it can take now.
"""

from __future__ import annotations

import math

import attrs

from rose import checks


@attrs.frozen(kw_only=True)
class ConcurrencyConfig:
    """How the limit moves.

    Attributes:
        is_adaptive: Follow the KV pressure; otherwise the cap alone counts.
        min_slots: The lowest limit.
        cut_fraction: What is left of the turns in flight after a cut.
        high_kv_fraction: KV use from which a reading is pressure.
        low_kv_fraction: KV use up to which the limit may grow.
        settle_s: Time between two changes.
        reading_max_age_s: A reading older than this says nothing.
        forget_s: The limit is the cap again when the last pressure is this long ago.
    """

    is_adaptive: bool = attrs.field(default=True, validator=checks.boolean())
    min_slots: int = attrs.field(default=1, validator=checks.integer(1))
    cut_fraction: float = attrs.field(default=0.75, validator=checks.number(above=0, at_most=1))
    high_kv_fraction: float = attrs.field(default=0.97, validator=checks.number(above=0, at_most=1))
    low_kv_fraction: float = attrs.field(default=0.85, validator=checks.number(above=0, at_most=1))
    settle_s: float = attrs.field(default=1.0, validator=checks.number(at_least=0))
    reading_max_age_s: float = attrs.field(default=5.0, validator=checks.number(above=0))
    forget_s: float = attrs.field(default=60.0, validator=checks.number(above=0))

    def __attrs_post_init__(self) -> None:
        if self.low_kv_fraction > self.high_kv_fraction:
            message = (
                f"low_kv_fraction must be at most high_kv_fraction, which is {self.high_kv_fraction}, "
                f"got {self.low_kv_fraction}"
            )
            raise ValueError(message)


@attrs.frozen(kw_only=True)
class KvReading:
    """One look at an engine.

    Attributes:
        kv_used_fraction: Share of the KV memory in use.
        age_s: How old the reading is; a negative age is that of another clock and says nothing.
        num_in_flight: Turns of the pool on the engine.
        has_progress: It made tokens for the pool since the last reading.
    """

    kv_used_fraction: float
    age_s: float
    num_in_flight: int
    has_progress: bool


@attrs.define
class SlotLimit:
    """The limit of one engine. Every method says whether it moved.

    Attributes:
        num_slots: How many turns the engine may have in flight now.
    """

    config: ConcurrencyConfig
    cap: int
    num_slots: int = attrs.field(init=False)
    _changed_s: float = attrs.field(default=-math.inf, init=False)
    _pressed_s: float = attrs.field(default=-math.inf, init=False)

    def __attrs_post_init__(self) -> None:
        self.num_slots = self.cap

    def evicted(self, num_in_flight: int, now_s: float) -> bool:
        """Note that the engine took KV memory back from a turn; ``num_in_flight`` counted that turn."""
        return self.config.is_adaptive and self._press(num_in_flight, now_s)

    def read(self, reading: KvReading, now_s: float) -> bool:
        """Note a reading."""
        config = self.config
        if not config.is_adaptive:
            return False
        if self.num_slots < self.cap and now_s - self._pressed_s >= config.forget_s:
            return self._change(self.cap, now_s)
        if not 0 <= reading.age_s <= config.reading_max_age_s:
            return False
        if reading.kv_used_fraction >= config.high_kv_fraction and reading.num_in_flight > 1:
            return self._press(reading.num_in_flight, now_s)
        is_wanted = reading.has_progress and reading.num_in_flight >= self.num_slots
        if is_wanted and reading.kv_used_fraction <= config.low_kv_fraction:
            return self._change(min(self.cap, self.num_slots + 1), now_s)
        return False

    def _press(self, num_in_flight: int, now_s: float) -> bool:
        self._pressed_s = now_s
        left = math.floor(min(self.num_slots, num_in_flight) * self.config.cut_fraction)
        return self._change(min(self.num_slots, max(left, self.config.min_slots)), now_s)

    def _change(self, num_slots: int, now_s: float) -> bool:
        if num_slots == self.num_slots or now_s - self._changed_s < self.config.settle_s:
            return False
        self.num_slots, self._changed_s = num_slots, now_s
        return True
