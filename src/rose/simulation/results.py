"""From the outcomes of a study to its result: one JSON document, the same bytes for the same inputs. Pure.

Keys of the document, in this order:

* ``scenario`` (``name`` and full ``config``), ``seeds``, ``assumptions``, ``strategies`` (names in the order to show them);
* one key a strategy, ``fixed`` first, see below;
* ``serving_alone`` (``None`` where all its cases failed), then the bounds: ``floor_s`` (longest trajectory alone on an idle engine),
  ``floor_gain`` (end-to-end gain of a rollout as short as that, ``None`` for a loop that does not wait for it), ``amdahl_gain`` (of rollouts that are faster by the ratio
  of all GPUs to the job's own); ``simulated_turns`` (of all cases together);
* ``sweep``, where there is one: ``axis``, ``unit`` and ``points``, each with ``value`` and the keys of the two lines above;
* ``published``, where the paper has figures for the scenario: its own policy's, or ``strategy.figure``;
* ``failures``: the cases without an outcome, one line each; figures are over the seeds that are left.

A strategy's table has ``kind``, ``summary``, the figures (``FIGURES`` and those of the outcome, each a mean over the seeds,
``None`` where there is nothing to measure), ``completion`` (of the first seed), ``sync_by_version_s`` (by step, mean) and
``spread``: ``min``, ``max`` and ``sd`` (sample standard deviation) of every figure. Gains are taken seed by seed. Numbers
have six significant digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import attrs

from rose.simulation.axes import SHORT_NAMES
from rose.simulation.cases import SERVING_ALONE, AnyOutcome, plain
from rose.simulation.outcome import Outcome, ServingOutcome, StepOutcome
from rose.simulation.scenario import Algorithm, Scenario, Tail
from rose.simulation.study import FIXED, Point, StudyRun

_SPOT = "spot"
_ALONE_PREFIX = "alone_"
_DIGITS = 6
_UNITS = {"gpus": "GPUs", "gbps": "Gbps", "rps": "req/s", "tokens": "tokens", "s": "s"}


class Described(Protocol):
    """What a table says of its strategy beside the figures."""

    @property
    def kind(self) -> str:
        """``policy`` or ``baseline``."""

    @property
    def summary(self) -> str:
        """One line."""


@attrs.frozen(kw_only=True)
class _Pair:
    """An outcome and those that it is compared with, of the same seed."""

    scenario: Scenario
    own: Outcome
    fixed: Outcome | None
    spot: Outcome | None


_Figure = Callable[[_Pair], float | None]


def _of_step(figure: Callable[[StepOutcome], float]) -> _Figure:
    return lambda pair: _mean([figure(step) for step in pair.own.steps])


def _of_own(name: str) -> _Figure:
    def read(pair: _Pair) -> float | None:
        value: float | None = getattr(pair.own, name)
        return value

    return read


def _of_serving(name: str) -> _Figure:
    def read(pair: _Pair) -> float | None:
        value: float | None = None if pair.own.serving is None else getattr(pair.own.serving, name)
        return value

    return read


def _gain(name: str, over: str = FIXED) -> _Figure:
    def ratio(pair: _Pair) -> float | None:
        other: Outcome | None = getattr(pair, over)
        return None if other is None else _ratio(getattr(other, name), getattr(pair.own, name))

    return ratio


def _p75_fraction(pair: _Pair) -> float | None:
    by_reading = {Tail.OWN_DURATION: "own_p75_fraction", Tail.END_TIME: "end_p75_fraction"}
    name = by_reading[pair.scenario.rollout.tail]
    return _mean([getattr(step, name) for step in pair.own.steps])


def _tokens_per_s(pair: _Pair) -> float | None:
    return _ratio(pair.own.num_tokens, pair.own.step_s * len(pair.own.steps))


def _serving_names() -> list[str]:
    return [field.name for field in attrs.fields(ServingOutcome)]


def _plain_names() -> list[str]:
    left_out = {"strategy", "seed", "steps", "completion", "serving"}
    return [field.name for field in attrs.fields(Outcome) if field.name not in left_out]


FIGURES: Mapping[str, _Figure] = {
    "step_s": _of_own("step_s"),
    "rollout_s": _of_own("rollout_s"),
    "rollout_share": lambda pair: _ratio(pair.own.rollout_s, pair.own.step_s),
    "p75_fraction": _p75_fraction,
    "end_to_end_gain": _gain("step_s"),
    "rollout_gain": _gain("rollout_s"),
    "over_spot_rollout_gain": _gain("rollout_s", over=_SPOT),
    "ttft_p99_ms": _of_serving("ttft_p99_ms"),
    "tpot_p99_ms": _of_serving("tpot_p99_ms"),
    "violations_fraction": _of_serving("violations_fraction"),
    "train_s": _of_step(lambda step: step.train_s),
    "sync_s": _of_step(lambda step: step.sync_s),
    "demand": _of_step(lambda step: step.demand),
    "own_p75_fraction": _of_step(lambda step: step.own_p75_fraction),
    "end_p75_fraction": _of_step(lambda step: step.end_p75_fraction),
    "tokens_per_s": _tokens_per_s,
    "borrowed_fraction": lambda pair: _ratio(pair.own.borrowed_tokens, pair.own.made_tokens),
    **{name: _of_own(name) for name in _plain_names() if name not in {"step_s", "rollout_s"}},
    **{
        name: _of_serving(name)
        for name in _serving_names()
        if name not in {"ttft_p99_ms", "tpot_p99_ms", "violations_fraction"}
    },
}
"""Every figure of a strategy's table by its name, in the order of the table."""


def build_result(
    run: StudyRun, about: Mapping[str, Described] | None = None, published: Mapping[str, float] | None = None
) -> dict[str, Any]:
    """Return a study's result, see the module's text for its keys.

    Args:
        run: What the study found.
        about: Kind and summary of strategies by name.
        published: The paper's figures for this scenario.
    """
    study, scenario = run.study, run.study.scenario
    config = {name: value for name, value in plain(scenario).items() if name not in {"name", "assumptions"}}
    result: dict[str, Any] = {
        "scenario": {"name": scenario.name, "config": config},
        "seeds": list(study.seeds),
        "assumptions": list(scenario.assumptions),
        "strategies": list(study.strategies),
        **_tables(run, study.base(), about or {}),
    }
    if study.sweep is not None:
        points = [{"value": point.value, **_tables(run, point, about or {})} for point in study.swept()]
        result["sweep"] = {"axis": study.sweep.axis, "unit": _unit(study.sweep.axis), "points": points}
    if published:
        result["published"] = {_published_name(name): value for name, value in published.items()}
    result["failures"] = [str(failure) for failure in run.failures]
    return result


def _published_name(name: str) -> str:
    """Return a figure of serving alone under the name of its table, as ``serving_alone.ttft_p99_ms``."""
    is_alone = name.startswith(_ALONE_PREFIX)
    return f"{SERVING_ALONE}.{name.removeprefix(_ALONE_PREFIX)}" if is_alone else name


def _unit(axis: str) -> str:
    name = SHORT_NAMES.get(axis, axis).rpartition(".")[2]
    return _UNITS.get(name.rpartition("_")[2], "")


def _tables(run: StudyRun, point: Point, about: Mapping[str, Described]) -> dict[str, Any]:
    found = _by_strategy(run, point)
    fixed, spot = ({each.seed: each for each in found.get(name, [])} for name in (FIXED, _SPOT))
    tables: dict[str, Any] = {}
    for name in run.study.strategies:
        pairs = [
            _Pair(scenario=point.scenario, own=own, fixed=fixed.get(own.seed), spot=spot.get(own.seed))
            for own in found[name]
        ]
        tables[name] = _strategy_table(pairs, about.get(name))
    tables[SERVING_ALONE] = _serving_table(run, point)
    tables.update(_bounds(point.scenario, found[FIXED]))
    tables["simulated_turns"] = sum(outcome.num_turns for outcomes in found.values() for outcome in outcomes)
    return tables


def _by_strategy(run: StudyRun, point: Point) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {name: [] for name in run.study.strategies}
    for strategy, outcome in _found(run, point):
        if isinstance(outcome, Outcome):
            found[strategy].append(outcome)
    return found


def _found(run: StudyRun, point: Point) -> Iterable[tuple[str, AnyOutcome]]:
    for case in run.cases[point]:
        if case.key in run.outcomes:
            yield case.strategy, run.outcomes[case.key]


def _strategy_table(pairs: Sequence[_Pair], described: Described | None) -> dict[str, Any]:
    table: dict[str, Any] = {} if described is None else {"kind": described.kind, "summary": described.summary}
    values = {name: [figure(pair) for pair in pairs] for name, figure in FIGURES.items()}
    table.update({name: _rounded(_mean(numbers)) for name, numbers in values.items()})
    table["completion"] = (
        [[_rounded(at_s), _rounded(share)] for at_s, share in pairs[0].own.completion] if pairs else []
    )
    table["sync_by_version_s"] = _by_step(pairs)
    table["spread"] = _spreads(values)
    return table


def _by_step(pairs: Sequence[_Pair]) -> list[float | None]:
    runs = [pair.own.steps for pair in pairs]
    return [_rounded(_mean([step.sync_s for step in same])) for same in zip(*runs, strict=False)]


def _serving_table(run: StudyRun, point: Point) -> dict[str, Any] | None:
    outcomes = [outcome for strategy, outcome in _found(run, point) if strategy == SERVING_ALONE]
    if not outcomes:
        return None
    values = {name: [getattr(outcome, name) for outcome in outcomes] for name in _serving_names()}
    means: dict[str, Any] = {name: _rounded(_mean(numbers)) for name, numbers in values.items()}
    return {**means, "spread": _spreads(values)}


def _bounds(scenario: Scenario, fixed: Sequence[Outcome]) -> dict[str, float | None]:
    cluster = scenario.cluster
    capacity_ratio = (cluster.rollout_gpus + cluster.borrowed_gpus) / cluster.rollout_gpus
    waits_for_longest = scenario.loop.algorithm is not Algorithm.ASYNC
    floor_gains = [
        _ratio(each.step_s, each.step_s - each.rollout_s + each.floor_s) for each in fixed if waits_for_longest
    ]
    shares = [_ratio(each.rollout_s, each.step_s) for each in fixed]
    amdahl_gains = [_ratio(1.0, (1 - share) + share / capacity_ratio) for share in shares if share is not None]
    return {
        "floor_s": _rounded(_mean([each.floor_s for each in fixed])),
        "floor_gain": _rounded(_mean(floor_gains)),
        "amdahl_gain": _rounded(_mean(amdahl_gains)),
    }


def _spreads(values: Mapping[str, Sequence[float | None]]) -> dict[str, Any]:
    known = {name: [number for number in numbers if number is not None] for name, numbers in values.items()}
    return {name: _spread(numbers) for name, numbers in known.items() if numbers}


def _spread(numbers: Sequence[float]) -> dict[str, float | None]:
    return {"min": _rounded(min(numbers)), "max": _rounded(max(numbers)), "sd": _rounded(_deviation(numbers))}


def _deviation(numbers: Sequence[float]) -> float:
    if len(numbers) == 1:
        return 0.0
    mean = math.fsum(numbers) / len(numbers)
    return math.sqrt(math.fsum((number - mean) ** 2 for number in numbers) / (len(numbers) - 1))


def _mean(numbers: Sequence[float | None]) -> float | None:
    known = [number for number in numbers if number is not None]
    return math.fsum(known) / len(known) if known else None


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None


def _rounded(number: float | None) -> float | None:
    """Return a number with six significant digits; zero has no sign."""
    return None if number is None else float(f"{number:.{_DIGITS}g}") + 0.0
