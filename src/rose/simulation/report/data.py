"""A study's result, read into typed values.

What is absent stays absent: a figure that was not measured is in no mapping, and nothing stands in for it. No name of a strategy
is known here but ``fixed``, the baseline that every gain is over.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from rose.errors import ConfigError

FIXED = "fixed"
POLICY = "policy"
BASELINE = "baseline"
_PAIR = 2


@attrs.frozen(kw_only=True)
class Strategy:
    """What one strategy reached, means over the seeds.

    Attributes:
        name: As the study names it.
        kind: ``policy`` or ``baseline``.
        summary: One line on what it does.
        values: Measured figures by name; the names carry the units.
        ranges: Least and greatest value over the seeds, where they differ.
        completion: ``(seconds, share of trajectories done)`` of the first seed; an asynchronous loop has trajectories done
            before the step begins, at negative seconds.
        sync_by_version_s: Seconds that each weight version's sync took, ascending versions.
    """

    name: str
    kind: str = BASELINE
    summary: str = ""
    values: Mapping[str, float] = attrs.field(factory=dict)
    ranges: Mapping[str, tuple[float, float]] = attrs.field(factory=dict)
    completion: tuple[tuple[float, float], ...] = ()
    sync_by_version_s: tuple[float, ...] = ()

    def get(self, figure: str) -> float | None:
        """Return a figure's mean, ``None`` where it was not measured."""
        return self.values.get(figure)


@attrs.frozen(kw_only=True)
class SweepPoint:
    """One value of the swept setting and what each strategy reached there."""

    value: float | str
    strategies: tuple[Strategy, ...]
    serving_alone: Strategy | None
    floor_s: float | None
    floor_gain: float | None
    amdahl_gain: float | None

    def get(self, name: str) -> Strategy | None:
        """Return a strategy by its name."""
        return _by_name(self.strategies, name)


@attrs.frozen(kw_only=True)
class Sweep:
    """A setting and its values, ascending where they are numbers."""

    axis: str
    unit: str
    points: tuple[SweepPoint, ...]

    @property
    def is_numeric(self) -> bool:
        """Whether every value is a number."""
        return all(isinstance(point.value, float) for point in self.points)


@attrs.frozen(kw_only=True)
class Study:
    """One scenario under several strategies.

    Attributes:
        name: Of the scenario.
        config: The whole scenario, as the result tells it.
        num_seeds: Over which the figures are means.
        assumptions: One sentence each.
        strategies: In order of display, ``fixed`` first where the order does not name it.
        serving_alone: Latency of serving without rollouts beside it.
        floor_s: The longest trajectory alone on an idle engine.
        floor_gain: End-to-end gain of a rollout as short as that, where the result tells it.
        amdahl_gain: Greatest end-to-end gain that the GPUs can give.
        num_turns: Turns that were simulated.
        published: The paper's figures by name; ``strategy.figure`` for one that is not of the paper's own policy.
        sweeps: What was varied.
        failures: Cases without an outcome, one line each; the figures are over the rest.
    """

    name: str
    config: Mapping[str, object]
    num_seeds: int
    assumptions: tuple[str, ...]
    strategies: tuple[Strategy, ...]
    serving_alone: Strategy | None
    floor_s: float | None
    floor_gain: float | None
    amdahl_gain: float | None
    num_turns: int | None
    published: Mapping[str, float]
    sweeps: tuple[Sweep, ...]
    failures: tuple[str, ...]

    @property
    def fixed(self) -> Strategy | None:
        """The resource-fixed baseline."""
        return self.get(FIXED)

    def get(self, name: str) -> Strategy | None:
        """Return a strategy by its name."""
        return _by_name(self.strategies, name)

    def setting(self, section: str, key: str) -> float | None:
        """Return a numeric setting of the scenario, ``None`` where it is absent."""
        values = self.config.get(section)
        return _number(values.get(key)) if isinstance(values, Mapping) else None

    def slo_ms(self, figure: str) -> float | None:
        """Return serving's promise for ``ttft_p99_ms`` or ``tpot_p99_ms``, ``None`` for a figure without one."""
        limit_s = self.setting("serving", f"{figure.partition('_')[0]}_slo_s")
        return None if limit_s is None else limit_s * 1e3


def read_study(result: Mapping[str, object]) -> Study:
    """Read a result document.

    Raises:
        ConfigError: It has no scenario or no list of strategies, or one of its parts has another type.
    """
    scenario = _mapping(result.get("scenario"), "scenario")
    names = _names(result)
    sweep = result.get("sweep")
    num_turns = _number(result.get("simulated_turns"))
    return Study(
        name=str(scenario.get("name", "own")),
        config=_mapping(scenario.get("config") or {}, "scenario.config"),
        num_seeds=len(_sequence(result.get("seeds") or (), "seeds")),
        assumptions=tuple(str(line) for line in _sequence(result.get("assumptions") or (), "assumptions")),
        strategies=tuple(_strategy(name, result.get(name)) for name in names),
        serving_alone=_alone(result),
        floor_s=_number(result.get("floor_s")),
        floor_gain=_number(result.get("floor_gain")),
        amdahl_gain=_number(result.get("amdahl_gain")),
        num_turns=None if num_turns is None else int(num_turns),
        published=_numbers(_mapping(result.get("published") or {}, "published")),
        sweeps=(_sweep(_mapping(sweep, "sweep"), names),) if sweep else (),
        failures=tuple(str(line) for line in _sequence(result.get("failures") or (), "failures")),
    )


def join(studies: Iterable[Study]) -> tuple[Study, ...]:
    """Return the studies with those of the same scenario made one, which has the sweeps of all."""
    joined: list[Study] = []
    for study in studies:
        for index, other in enumerate(joined):
            if (other.name, other.config) == (study.name, study.config):
                joined[index] = _joined(other, study)
                break
        else:
            joined.append(study)
    return tuple(joined)


def _joined(first: Study, second: Study) -> Study:
    known = {strategy.name for strategy in first.strategies}
    more = tuple(strategy for strategy in second.strategies if strategy.name not in known)
    lines = tuple(dict.fromkeys((*first.assumptions, *second.assumptions)))
    return attrs.evolve(
        first,
        strategies=(*first.strategies, *more),
        assumptions=lines,
        published={**second.published, **first.published},
        sweeps=(*first.sweeps, *second.sweeps),
        failures=tuple(dict.fromkeys((*first.failures, *second.failures))),
    )


def _names(result: Mapping[str, object]) -> tuple[str, ...]:
    if "strategies" not in result:
        message = "the result has no 'strategies', the names in order of display; write it with rose simulate --json"
        raise ConfigError(message)
    listed = [str(name) for name in _sequence(result["strategies"], "strategies")]
    first = [FIXED] if FIXED in result and FIXED not in listed else []
    return tuple(dict.fromkeys([*first, *listed]))


def _strategy(name: str, entry: object) -> Strategy:
    figures = _mapping(entry or {}, name)
    spread = _mapping(figures.get("spread") or {}, f"{name}.spread")
    ranges = {
        figure: _range(_mapping(limits, f"{name}.spread.{figure}")) for figure, limits in spread.items() if limits
    }
    return Strategy(
        name=name,
        kind=POLICY if figures.get("kind") == POLICY else BASELINE,
        summary=str(figures.get("summary") or ""),
        values=_numbers(figures),
        ranges={figure: limits for figure, limits in ranges.items() if limits is not None},
        completion=_curve(figures.get("completion") or (), f"{name}.completion"),
        sync_by_version_s=_series(figures.get("sync_by_version_s") or (), f"{name}.sync_by_version_s"),
    )


def _sweep(sweep: Mapping[str, object], names: Sequence[str]) -> Sweep:
    points = [
        _point(_mapping(point, f"sweep.points.{index}"), names)
        for index, point in enumerate(_sequence(sweep.get("points") or (), "sweep.points"))
    ]
    values = [point.value for point in points]
    if all(isinstance(value, float) for value in values):
        points.sort(key=lambda point: float(point.value))
    else:
        points = [attrs.evolve(point, value=_text(point.value)) for point in points]
    return Sweep(axis=str(sweep.get("axis", "setting")), unit=str(sweep.get("unit") or ""), points=tuple(points))


def _point(point: Mapping[str, object], names: Sequence[str]) -> SweepPoint:
    value = _number(point.get("value"))
    told = point.get("value")
    return SweepPoint(
        value=("none" if told is None else str(told)) if value is None else value,
        strategies=tuple(_strategy(name, point[name]) for name in names if point.get(name)),
        serving_alone=_alone(point),
        floor_s=_number(point.get("floor_s")),
        floor_gain=_number(point.get("floor_gain")),
        amdahl_gain=_number(point.get("amdahl_gain")),
    )


def _alone(result: Mapping[str, object]) -> Strategy | None:
    entry = result.get("serving_alone")
    return _strategy("serving_alone", entry) if entry else None


def _by_name(strategies: Iterable[Strategy], name: str) -> Strategy | None:
    return next((strategy for strategy in strategies if strategy.name == name), None)


def _text(value: float | str) -> str:
    return f"{value:g}" if isinstance(value, float) else value


def _range(limits: Mapping[str, object]) -> tuple[float, float] | None:
    low, high = _number(limits.get("min")), _number(limits.get("max"))
    return None if low is None or high is None or low >= high else (low, high)


def _curve(points: object, where: str) -> tuple[tuple[float, float], ...]:
    pairs = [_series(pair, where) for pair in _sequence(points, where)]
    if any(len(pair) != _PAIR for pair in pairs):
        message = f"{where} of the result has a point that is no [seconds, share]; write it with rose simulate --json"
        raise ConfigError(message)
    return tuple((pair[0], pair[1]) for pair in pairs)


def _series(values: object, where: str) -> tuple[float, ...]:
    numbers = [_number(value) for value in _sequence(values, where)]
    return tuple(value for value in numbers if value is not None)


def _numbers(values: Mapping[str, object]) -> dict[str, float]:
    numbers = {str(name): _number(value) for name, value in values.items()}
    return {name: value for name, value in numbers.items() if value is not None}


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def _mapping(value: object, where: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        message = f"{where} of the result is {type(value).__name__}, not an object; write it with rose simulate --json"
        raise ConfigError(message)
    return value


def _sequence(value: object, where: str) -> Sequence[object]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        message = f"{where} of the result is {type(value).__name__}, not a list; write it with rose simulate --json"
        raise ConfigError(message)
    return value
