"""From the arguments of ``rose simulate`` to the study that they describe; every complaint names the option."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import attrs

from rose.errors import ConfigError

if TYPE_CHECKING:
    from rose.simulation.results import Described
    from rose.simulation.scenario import Scenario
    from rose.simulation.study import Simulate, SimulateServing, Study

T = TypeVar("T")

POLICY, BASELINE = "policy", "baseline"


@attrs.frozen(kw_only=True)
class Simulator:
    """What the command needs of the simulator."""

    presets: Mapping[str, Scenario]
    published: Mapping[str, Mapping[str, float]]
    strategies: Mapping[str, Described]
    check: Callable[[Iterable[Scenario]], None]
    simulate: Simulate
    simulate_serving: SimulateServing


def load_simulator() -> Simulator:
    """Return the real one."""
    from rose.simulation import preflight, presets, run, strategies  # noqa: PLC0415 - loads the pool and numpy

    return Simulator(
        presets=presets.PRESETS,
        published=presets.PUBLISHED,
        strategies=strategies.STRATEGIES,
        check=preflight.check_scenarios,
        simulate=run.simulate,
        simulate_serving=run.simulate_serving,
    )


def make_study(arguments: argparse.Namespace, simulator: Simulator) -> Study:
    """Return the study that the arguments describe.

    Raises:
        ConfigError: One of them is wrong, or the scenario cannot be; says what, and the nearest name where one is unknown.
    """
    from rose.simulation.axes import parse_sweep  # noqa: PLC0415 - see load_simulator
    from rose.simulation.study import Study  # noqa: PLC0415

    strategies = _strategies(arguments, simulator)
    scenario = _changed(_scenario(arguments, simulator.presets), arguments)
    sweep = None if arguments.sweep is None else _called("--sweep", lambda: parse_sweep(arguments.sweep))
    seeds = tuple(range(arguments.seed, arguments.seed + arguments.seeds))
    study = Study(scenario=scenario, strategies=strategies, seeds=seeds, sweep=sweep)
    swept = _called("--sweep", study.swept)
    simulator.check([scenario, *(point.scenario for point in swept)])
    return study


def _scenario(arguments: argparse.Namespace, presets: Mapping[str, Scenario]) -> Scenario:
    from rose import config  # noqa: PLC0415 - see load_simulator
    from rose.simulation.scenario import Scenario  # noqa: PLC0415

    if (arguments.preset is None) == (arguments.config is None):
        both = "not both" if arguments.preset is not None else "one of them"
        message = f"give the name of a preset or --config FILE, {both}; rose simulate --list shows the presets"
        raise ConfigError(message)
    if arguments.config is not None:
        return config.load(Scenario, Path(arguments.config))
    if arguments.preset not in presets:
        raise ConfigError(_unknown("preset", arguments.preset, presets))
    return presets[arguments.preset]


def _changed(scenario: Scenario, arguments: argparse.Namespace) -> Scenario:
    from rose.simulation.axes import evolve_all, parse_value, split_setting  # noqa: PLC0415 - see load_simulator

    def settings() -> dict[str, object]:
        pairs = [split_setting(text, "KEY=VALUE") for text in arguments.set]
        return {key: parse_value(key, text) for key, text in pairs}

    given = list(arguments.set)
    if arguments.trace is not None:
        scenario = evolve_all(scenario, {"serving.trace": arguments.trace})
        given.insert(0, f"serving.trace={arguments.trace}")
    changed = _called("--set", lambda: evolve_all(scenario, settings()))
    if not given or not scenario.assumptions:
        return changed
    note = f"changed by hand, whatever the other lines say: {', '.join(given)}"
    return attrs.evolve(changed, assumptions=(*changed.assumptions, note))


def _called(flag: str, call: Callable[[], T]) -> T:
    """Return what ``call`` gives; its complaints name the option."""
    try:
        return call()
    except ConfigError as error:
        raise ConfigError("\n".join(f"{flag}: {line}" for line in str(error).splitlines())) from error


def _strategies(arguments: argparse.Namespace, simulator: Simulator) -> tuple[str, ...]:
    known = simulator.strategies
    if arguments.policy is None and arguments.baseline is None:
        return tuple(known)
    named: list[str] = []
    for kind in (POLICY, BASELINE):
        for name in getattr(arguments, kind) or ():
            _check_strategy(kind, name, simulator)
            named.append(name)
    return tuple(named)


def _check_strategy(kind: str, name: str, simulator: Simulator) -> None:
    strategy = simulator.strategies.get(name)
    if strategy is not None and strategy.kind == kind:
        return
    if strategy is not None:
        message = f"--{kind} {name}: that is a {strategy.kind}; write --{strategy.kind} {name}"
    elif name in simulator.presets:
        message = f"--{kind} {name}: that is a preset; write it first: rose simulate {name} --{kind} NAME"
    else:
        names = [other for other, strategy in simulator.strategies.items() if strategy.kind == kind]
        message = f"--{kind}: {_unknown(kind, name, names)}"
    raise ConfigError(message)


def _unknown(what: str, name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    from rose.simulation.axes import nearest  # noqa: PLC0415 - see load_simulator

    return f"unknown {what} {name!r}; {nearest(name, list(known))}known are {', '.join(known)}"
