"""What can be refused before anything is simulated: unknown names, files of no use, clusters that make no whole engines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from rose.backends.paced.profiles import Profile, profile_named
from rose.errors import ConfigError
from rose.interfaces.device import StepWork
from rose.policies.admission import AdmissionConfig, Slo, arrival_reserve_s
from rose.simulation.model_shapes import model_shape
from rose.simulation.scenario import RolloutConfig, Scenario, ServingConfig, check_engines
from rose.simulation.serving_load import ServingPlan, serving_profile
from rose.simulation.trajectories import TrajectorySource

_SOME_DURATION_S = 60.0


def check_scenarios(scenarios: Iterable[Scenario]) -> None:
    """Check everything that needs no run. What several scenarios share is checked once.

    Raises:
        ConfigError: Something is wrong; one line a problem, each with the key and what to do.
    """
    checks = dict.fromkeys(check for scenario in scenarios for check in _checks(scenario))
    problems = [problem for check, subject in checks for problem in _problems(check, subject)]
    if problems:
        raise ConfigError("\n".join(dict.fromkeys(problems)))


def _checks(scenario: Scenario) -> Iterable[tuple[Callable[[Any], object], object]]:
    """Yield checks and what they are of; equal ones are the same check."""
    yield _check_serving, scenario.serving
    yield _check_rollout_profile, scenario.rollout.profile
    yield _check_trajectories, scenario.rollout
    yield _check_model, scenario.link.model
    own, theirs = _gpus_per_engine(scenario.rollout.profile), _gpus_per_engine(scenario.serving.profile)
    counts = {"rollout_gpus": (own,), "borrowed_gpus": (own, theirs)}
    for name, sizes in counts.items():
        for size in sizes:
            yield _check_count, (f"cluster.{name}", getattr(scenario.cluster, name), size)


def _problems(check: Callable[[Any], object], subject: object) -> list[str]:
    try:
        check(subject)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def _check_serving(serving: ServingConfig) -> None:
    profile, chunk = serving_profile(serving), serving.chunk_tokens
    chunk_s = profile.step_s(StepWork(num_prefill_tokens=chunk, prefill_positions=chunk**2 / 2))
    slo = Slo(ttft_s=serving.ttft_slo_s, tpot_s=serving.tpot_slo_s)
    try:
        arrival_reserve_s(AdmissionConfig(slo=slo), chunk_s, chunk, "serving")
    except ConfigError as error:
        message = (
            f"serving.tpot_slo_s = {serving.tpot_slo_s:g} leaves no room for one prefill chunk of serving.chunk_tokens = {chunk} "
            f"({chunk_s:.3f} s) and a rollout step; lower serving.chunk_tokens or raise the SLO"
        )
        raise ConfigError(message) from error
    if serving.trace is not None:
        ServingPlan.of(serving, duration_s=_SOME_DURATION_S, seed=0)


def _check_rollout_profile(name: str) -> None:
    _named("rollout.profile", profile_named, name)


def _check_trajectories(rollout: RolloutConfig) -> None:
    TrajectorySource(rollout, seed=0)


def _check_model(name: str | None) -> None:
    if name is not None:
        _named("link.model", model_shape, name)


def _check_count(count: tuple[str, int, int | None]) -> None:
    key, num_gpus, gpus_per_engine = count
    if gpus_per_engine is not None:
        check_engines(key, num_gpus, gpus_per_engine)


def _gpus_per_engine(profile: str) -> int | None:
    """Return the size of an engine; ``None`` for a profile of an unknown name, which another check refuses."""
    try:
        found: Profile = profile_named(profile)
    except ConfigError:
        return None
    return found.num_gpus


def _named(key: str, find: Callable[[str], object], name: str) -> None:
    try:
        find(name)
    except ConfigError as error:
        message = f"{key}: {error}"
        raise ConfigError(message) from error
