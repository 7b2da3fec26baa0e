"""How long a token takes at an engine, learned from turns that ended. Pure: times are the caller's.

A turn that made ``n`` tokens in ``t`` seconds on an engine that held ``x`` tokens of context for all its turns says that a token
takes ``t / n`` seconds at load ``x``. Per kind of engine a straight line through such points is kept (a step reads the weights
once and every context), per engine the factor by which it differs from its kind; a factor is forgotten with time, so that an engine
that was slow once is tried again.

Invariants: without an observation of any kind there is no pace; estimates are positive and never fall with load; an
engine's own factor weighs half after ``half_life_s`` without a turn of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs

from rose import checks
from rose.types import EngineId, EngineKind

_LEAST_SHARE = 0.2  # of the mean pace that the line may have at load 0, however steep it looks
_PRIOR_PREFILL_TOKENS = 20_000.0  # the weight of what is expected of prefill


@attrs.frozen(kw_only=True)
class PaceConfig:
    """How fast paces are learned and forgotten.

    Attributes:
        memory_turns: A kind's line is drawn through about this many turns.
        half_life_s: What an engine's own turns said counts half after this time.
        doubt_s: Turns of so many seconds in all say as much of an engine as its kind does.
        prefill_share: What computing a prompt token takes at least, as a share of making a token; turns that moved may show that it takes more.
    """

    memory_turns: int = attrs.field(default=256, validator=checks.integer(2))
    half_life_s: float = attrs.field(default=10.0, validator=checks.number(above=0))
    doubt_s: float = attrs.field(default=5.0, validator=checks.number(above=0))
    prefill_share: float = attrs.field(default=0.005, validator=checks.number(at_least=0, at_most=1))


@attrs.define(eq=False)
class _Line:
    """A weighted straight line of seconds a token over load, with its sums."""

    weight: float = 0.0
    x: float = 0.0
    y: float = 0.0
    xx: float = 0.0
    xy: float = 0.0
    intercept: float = 0.0
    slope: float = 0.0

    def add(self, x: float, y: float, weight: float, keep: float) -> None:
        self.weight = keep * self.weight + weight
        self.x = keep * self.x + weight * x
        self.y = keep * self.y + weight * y
        self.xx = keep * self.xx + weight * x * x
        self.xy = keep * self.xy + weight * x * y
        mean_x, mean_y = self.x / self.weight, self.y / self.weight
        spread = self.xx / self.weight - mean_x * mean_x
        slope = (self.xy / self.weight - mean_x * mean_y) / spread if spread > 1e-6 * mean_x * mean_x else 0.0
        most = (1 - _LEAST_SHARE) * mean_y / mean_x if mean_x > 0 else 0.0
        self.slope = min(max(slope, 0.0), most)
        self.intercept = mean_y - self.slope * mean_x

    def at(self, x: float) -> float:
        return self.intercept + self.slope * x


class Estimate(NamedTuple):
    """Seconds a token, what one more token of context adds, how many times what a dedicated engine takes at that load, seconds without load."""

    pace_s: float
    slope_s: float
    slowdown: float
    idle_s: float


@attrs.define(eq=False)
class _Own:
    """What one engine's turns took beside what its kind's line says, both fading; as of ``seen_s``."""

    taken_s: float = 0.0
    expected_s: float = 0.0
    seen_s: float = 0.0


class PaceModel:
    """Seconds a token by kind, engine and load.

    Attributes:
        now_s: The latest time that the model heard of.
        prefill_s: Seconds to compute a prompt token, what is expected and what was seen weighed together, and never less than expected: what turns
            that moved seem to gain on a crowded engine is not the speed of its prefill. 0 before any turn ended.
    """

    def __init__(self, config: PaceConfig) -> None:
        """Know nothing."""
        self.now_s = self.prefill_s = 0.0
        self._config = config
        self._keep = 1 - 1 / config.memory_turns
        self._dedicated: _Line | None = None  # two fields, since an enum member is slow to hash
        self._borrowed: _Line | None = None
        self._own: dict[EngineId, _Own] = {}
        self._prefill_tokens = 0.0
        self._prefill_sum_s = 0.0

    def observe(
        self, engine_id: EngineId, kind: EngineKind, *, load_tokens: float, num_tokens: int, duration_s: float
    ) -> None:
        """Take a turn that ended: ``num_tokens`` in ``duration_s`` while the engine held ``load_tokens`` of context."""
        if num_tokens <= 0 or duration_s <= 0:
            return
        pace_s = duration_s / num_tokens
        line = self._line_to_teach(kind)
        line.add(load_tokens, pace_s, float(num_tokens), self._keep)
        own = self._own.get(engine_id)
        if own is None:
            own = self._own[engine_id] = _Own(seen_s=self.now_s)
        keep = self._fading(own)
        own.taken_s = keep * own.taken_s + duration_s
        own.expected_s = keep * own.expected_s + num_tokens * line.at(load_tokens)
        own.seen_s = self.now_s
        self._weigh_prefill()

    def observe_prefill(self, *, num_prompt_tokens: int, extra_s: float) -> None:
        """Take a turn that computed its whole prompt anew and took ``extra_s`` longer than its tokens account for."""
        self._prefill_tokens = self._keep * self._prefill_tokens + num_prompt_tokens
        self._prefill_sum_s = self._keep * self._prefill_sum_s + extra_s
        self._weigh_prefill()

    def _weigh_prefill(self) -> None:
        line = self._dedicated or self._borrowed
        if line is not None:
            expected_s = self._config.prefill_share * line.intercept
            seen_s = self._prefill_sum_s + expected_s * _PRIOR_PREFILL_TOKENS
            self.prefill_s = max(expected_s, seen_s / (self._prefill_tokens + _PRIOR_PREFILL_TOKENS))

    def forget(self, engine_id: EngineId) -> None:
        """Forget what is known of one engine by itself."""
        self._own.pop(engine_id, None)

    def _fading(self, own: _Own) -> float:
        age_s = self.now_s - own.seen_s
        return math.pow(0.5, age_s / self._config.half_life_s) if age_s > 0 else 1.0

    def _line_to_teach(self, kind: EngineKind) -> _Line:
        if kind is EngineKind.DEDICATED:
            self._dedicated = self._dedicated or _Line()
            return self._dedicated
        self._borrowed = self._borrowed or _Line()
        return self._borrowed

    def estimate(self, engine_id: EngineId, kind: EngineKind, load_tokens: float) -> Estimate | None:
        """Return what a token takes on an engine at a load; ``None`` before any turn ended anywhere.

        A kind without turns of its own is taken for the other. An engine's own turns say by which factor it differs from its kind, whose pace weighs as much as ``doubt_s`` of them.
        """
        dedicated, borrowed, factor, slowdown = self._dedicated, self._borrowed, 1.0, 1.0
        line = dedicated or borrowed if kind is EngineKind.DEDICATED else borrowed or dedicated
        if line is None:
            return None
        own = self._own.get(engine_id)
        if own is not None:
            keep, doubt_s = self._fading(own), self._config.doubt_s
            factor = (keep * own.taken_s + doubt_s) / (keep * own.expected_s + doubt_s)
        pace_s = factor * line.at(load_tokens)
        if kind is EngineKind.BORROWED and dedicated is not None:
            slowdown = pace_s / dedicated.at(load_tokens)
        return Estimate(pace_s, factor * line.slope, slowdown, factor * line.intercept)
