"""A study: one scenario, several strategies and seeds, and maybe a sweep of one setting, over all cores.

Invariants: the outcomes of a study do not depend on the number of processes or on which case ended first; a finished
case is on disk before the next progress is told, so an interrupt loses only the cases that were running; a case that
fails loses no other.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import attrs

from rose.errors import ConfigError
from rose.simulation import cases
from rose.simulation.axes import Sweep, Value
from rose.simulation.cases import SERVING_ALONE, AnyOutcome, Case, CaseMaker
from rose.simulation.outcome import Outcome, ServingOutcome
from rose.simulation.processes import ProcessDied, run_parallel
from rose.simulation.scenario import Scenario

FIXED = "fixed"
"""The strategy that every other one is compared with."""

Simulate = Callable[[Scenario, str, int], Outcome]
SimulateServing = Callable[[Scenario, int], ServingOutcome]


@attrs.frozen(kw_only=True)
class Point:
    """One scenario of a study: the base, or the base at one value of the swept axis."""

    label: str
    value: Value
    scenario: Scenario


def _with_fixed(names: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys((FIXED, *names)))


@attrs.frozen(kw_only=True)
class Study:
    """What to run.

    Attributes:
        scenario: The base.
        strategies: By name, in the order to show them; ``fixed`` is added at the front where it is missing.
        seeds: Each strategy runs once with each; strategies meet the same arrivals and trajectories under one seed.
        sweep: One axis, run beside the base.
    """

    scenario: Scenario
    strategies: tuple[str, ...] = attrs.field(converter=_with_fixed)
    seeds: tuple[int, ...]
    sweep: Sweep | None = None

    def base(self) -> Point:
        """Return the base scenario."""
        return Point(label=self.scenario.name, value=None, scenario=self.scenario)

    def swept(self) -> tuple[Point, ...]:
        """Return the points of the sweep, none without one.

        Raises:
            ConfigError: The axis is unknown, or a value is refused.
        """
        sweep = self.sweep
        if sweep is None:
            return ()
        return tuple(
            Point(
                label=f"{self.scenario.name}, {sweep.axis}={value}",
                value=value,
                scenario=sweep.apply(self.scenario, value),
            )
            for value in sweep.values
        )

    def cases(self, maker: CaseMaker) -> dict[Point, tuple[Case, ...]]:
        """Return the cases of each point, the base first. Points that have the same scenario share cases.

        Raises:
            ConfigError: As ``swept``; or a file that a scenario names cannot be read.
        """
        return {point: self._point_cases(point, maker) for point in (self.base(), *self.swept())}

    def _point_cases(self, point: Point, maker: CaseMaker) -> tuple[Case, ...]:
        return tuple(
            maker.make(point.scenario, strategy, seed, point.label)
            for strategy in (*self.strategies, SERVING_ALONE)
            for seed in self.seeds
        )


@attrs.frozen(kw_only=True)
class CaseFailure:
    """A case that has no outcome.

    Attributes:
        case: Which.
        message: What happened, one line.
        trace: The traceback of a bug; empty for something that the user can put right.
    """

    case: Case
    message: str
    trace: str = ""

    @property
    def is_bug(self) -> bool:
        """Whether the simulator is to blame."""
        return bool(self.trace)

    def __str__(self) -> str:
        """Return the failure as one line."""
        return f"{self.case}: {self.message}"


@attrs.frozen(kw_only=True)
class StudyProgress:
    """How far a study is.

    Attributes:
        num_done: Cases that have an outcome or have failed, reused ones too.
        num_total: All cases.
        num_reused: Of those done, read from files of an earlier run.
        num_failed: Of those done, without an outcome.
        last: The case that ended last.
    """

    num_done: int
    num_total: int
    num_reused: int
    num_failed: int = 0
    last: Case | None = None


@attrs.frozen(kw_only=True)
class StudyRun:
    """What a study found.

    Attributes:
        study: What was run.
        cases: Of each point, the base first.
        outcomes: By key of the case; failed cases are missing.
        failures: In the order of the cases.
    """

    study: Study
    cases: Mapping[Point, tuple[Case, ...]]
    outcomes: Mapping[str, AnyOutcome]
    failures: tuple[CaseFailure, ...]


def failure_lines(failures: Sequence[CaseFailure]) -> list[str]:
    """Return one line for each thing that went wrong, with the first case that met it and how many more did."""
    by_message: dict[str, list[CaseFailure]] = {}
    for failure in failures:
        by_message.setdefault(failure.message, []).append(failure)
    lines = []
    for message, same in by_message.items():
        others = f" (and {len(same) - 1} more {'case' if len(same) == 2 else 'cases'})" if len(same) > 1 else ""  # noqa: PLR2004
        lines.append(f"{same[0].case}{others}: {message}")
    return lines


def default_jobs() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def run_study(
    study: Study,
    *,
    jobs: int | None = None,
    out: Path | None = None,
    on_progress: Callable[[StudyProgress], None] | None = None,
    simulate: Simulate | None = None,
    simulate_serving: SimulateServing | None = None,
) -> StudyRun:
    """Run every case of a study that has no stored outcome.

    Args:
        study: What to run.
        jobs: Processes at a time; all cores by default.
        out: Folder whose ``cases/`` keeps outcomes; without it nothing is kept.
        on_progress: Called once at the start and after each case.
        simulate: Instead of ``rose.simulation.run.simulate``; importable by name.
        simulate_serving: Instead of ``rose.simulation.run.simulate_serving``; likewise.

    Raises:
        ConfigError: The study cannot be listed, see ``Study.cases``, or the folder cannot be written to. What goes
            wrong in a case is in the result instead.
    """
    listed = study.cases(CaseMaker())
    unique = {case.key: case for point_cases in listed.values() for case in point_cases}
    folder = None if out is None else _case_folder(out)
    outcomes = {} if folder is None else _stored(folder, unique)
    waiting = [case for key, case in unique.items() if key not in outcomes]
    failures: dict[str, CaseFailure] = {}
    progress = StudyProgress(num_done=len(outcomes), num_total=len(unique), num_reused=len(outcomes))
    tell = on_progress or _tell_nobody
    tell(progress)
    function = partial(_run_case, *_functions(simulate, simulate_serving))
    with contextlib.closing(run_parallel(function, waiting, jobs or default_jobs())) as results:
        for index, result in results:
            case = waiting[index]
            if isinstance(result, str):
                outcomes[case.key] = _keep(folder, case, result)
            else:
                failures[case.key] = _failure(case, result)
            done = len(outcomes) + len(failures)
            progress = attrs.evolve(progress, num_done=done, num_failed=len(failures), last=case)
            tell(progress)
    in_order = tuple(failures[key] for key in unique if key in failures)
    return StudyRun(study=study, cases=listed, outcomes=outcomes, failures=in_order)


def _tell_nobody(_progress: StudyProgress) -> None:
    pass


def _keep(folder: Path | None, case: Case, text: str) -> AnyOutcome:
    if folder is not None:
        cases.save(folder, case, text)
    return cases.decode(case.strategy, text)


def _functions(simulate: Simulate | None, serving: SimulateServing | None) -> tuple[Simulate, SimulateServing]:
    if simulate is not None and serving is not None:
        return simulate, serving
    from rose.simulation import run  # noqa: PLC0415 - loads the pool and the engines' models

    return simulate or run.simulate, serving or run.simulate_serving


def _case_folder(out: Path) -> Path:
    folder = out / "cases"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        message = f"cannot write into {out}: {error.strerror or error}; choose a folder that you may write to"
        raise ConfigError(message) from error
    return folder


def _stored(folder: Path, unique: Mapping[str, Case]) -> dict[str, AnyOutcome]:
    found = ((key, cases.load(folder, case)) for key, case in unique.items())
    return {key: outcome for key, outcome in found if outcome is not None}


def _failure(case: Case, result: CaseFailure | ProcessDied) -> CaseFailure:
    if isinstance(result, CaseFailure):
        return result
    return CaseFailure(case=case, message=str(result), trace="" if result.is_killed else f"{case}: {result}\n")


def _run_case(simulate: Simulate, simulate_serving: SimulateServing, case: Case) -> str | CaseFailure:
    """Run one case and return its outcome's text. The root of a task: whatever goes wrong becomes data."""
    try:
        if case.strategy == SERVING_ALONE:
            return cases.encode(simulate_serving(case.scenario, case.seed))
        return cases.encode(simulate(case.scenario, case.strategy, case.seed))
    except Exception as error:  # noqa: BLE001 - see above
        problems = _config_errors(error)
        if problems:
            lines = [line for problem in problems for line in str(problem).splitlines()]
            return CaseFailure(case=case, message="; ".join(dict.fromkeys(lines)))
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return CaseFailure(case=case, message=line, trace="".join(traceback.format_exception(error)))


def _config_errors(error: BaseException) -> list[ConfigError]:
    """Return the errors of the configuration, where ``error`` is nothing else; task groups wrap them."""
    if isinstance(error, ConfigError):
        return [error]
    if not isinstance(error, BaseExceptionGroup):
        return []
    inner = [_config_errors(each) for each in error.exceptions]
    return [problem for problems in inner for problem in problems] if all(inner) else []
