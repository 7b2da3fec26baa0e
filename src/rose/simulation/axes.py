"""Changing a scenario by dotted keys: single settings, and the axis of a sweep. Strict, pure.

A key names one field of the configuration, ``serving.max_seqs`` for instance; a few axes have short names, and ``scale``
multiplies the whole job. Every refusal is a ``ConfigError`` of one line that begins with the key.
"""

from __future__ import annotations

import enum
import math
import types
import typing
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any

import attrs

from rose import config
from rose.checks import shown
from rose.errors import ConfigError
from rose.simulation.presets import FITS, with_tail
from rose.simulation.scenario import ClusterConfig, Scenario, Tail

Value = int | float | str | None

SCALE = "scale"
SHORT_NAMES: Mapping[str, str] = {
    "borrowed": "cluster.borrowed_gpus",
    "link": "link.gbps",
    "load": "serving.load_fraction",
    "layout": "serving.layout",
}
# A key that has no effect while the other one is set.
_OVERRULED_BY = {
    "serving.load_fraction": "serving.rate_rps",
    "rollout.workload": "rollout.logs",
    "loop.rollout_share": "loop.train_s",
}
_WHOLE = 1e-9


@attrs.frozen(kw_only=True)
class Sweep:
    """One axis and the values it takes, in order.

    Attributes:
        axis: A short name, ``scale`` or a dotted key.
        values: As the configuration holds them; enums by their value.
    """

    axis: str
    values: tuple[Value, ...]

    def apply(self, scenario: Scenario, value: Value) -> Scenario:
        """Return the scenario at one value of the axis.

        Raises:
            ConfigError: The axis is unknown or the value is refused.
        """
        if self.axis == SCALE:
            return scaled(scenario, value)
        return evolve(scenario, SHORT_NAMES.get(self.axis, self.axis), value)


def parse_sweep(text: str) -> Sweep:
    """Read ``AXIS=V1,V2,...``.

    Raises:
        ConfigError: It is not of that form, or the axis or a value is wrong.
    """
    axis, values = split_setting(text, "AXIS=V1,V2,...")
    key = SHORT_NAMES.get(axis, axis)
    if key != SCALE:
        _check_key(key, axis, [SCALE, *SHORT_NAMES])
    parsed = tuple(_number(axis, part) if key == SCALE else parse_value(key, part) for part in values.split(","))
    for index, value in enumerate(parsed):
        if value in parsed[:index]:
            message = f"{axis}: the value {value} is there twice; give each value once"
            raise ConfigError(message)
    return Sweep(axis=axis, values=parsed)


def split_setting(text: str, form: str) -> tuple[str, str]:
    """Return what is on either side of the equals sign.

    Raises:
        ConfigError: One of them is missing.
    """
    name, sign, value = (part.strip() for part in text.partition("="))
    if not (name and sign and value):
        message = f"{text!r} is not of the form {form}"
        raise ConfigError(message)
    return name, value


def parse_value(key: str, text: str) -> Value:
    """Return the value that ``text`` means for ``key``; ``none`` unsets what may be unset.

    Raises:
        ConfigError: The key is unknown, or the text is no value of its type.
    """
    kind, is_optional = _kind(key)
    text = text.strip()
    if is_optional and text.lower() == "none":
        return None
    if kind is int:
        return _integer(key, text)
    if kind is float:
        return _number(key, text)
    if not text:
        message = f"{key}: a value is empty; leave out the comma or give a value"
        raise ConfigError(message)
    return text


def evolve(scenario: Scenario, key: str, value: object) -> Scenario:
    """Return the scenario with one setting changed; see ``evolve_all``."""
    return evolve_all(scenario, {key: value})


def evolve_all(scenario: Scenario, settings: Mapping[str, object]) -> Scenario:
    """Return the scenario with settings changed, checked together.

    Args:
        scenario: Where to start.
        settings: Values by dotted key, typed as the configuration holds them; enums also by their value. Where lengths are
            a preset's fit to one reading of ``rollout.tail``, setting the other brings its own, and setting
            ``rollout.logs`` takes them away.

    Raises:
        ConfigError: A key is unknown, a value is of the wrong type or out of range, or a setting has no effect beside
            another one.
    """
    scenario = _refitted(scenario, settings)
    by_section: dict[str, dict[str, object]] = {}
    for key, value in settings.items():
        _check_key(key, key, [])
        section, _, name = key.rpartition(".")
        by_section.setdefault(section, {})[name] = value
    for section, values in by_section.items():
        scenario = _evolve_section(scenario, section, values)
    for key in settings:
        _check_effect(scenario, key)
    return scenario


def _refitted(scenario: Scenario, settings: Mapping[str, object]) -> Scenario:
    """Return a scenario whose lengths are a preset's fit with those that the settings ask for."""
    rollout = scenario.rollout
    fit = FITS.get((rollout.workload, rollout.tail))
    if fit is None or attrs.astuple(fit) != (rollout.median_tokens, rollout.sigma, scenario.loop.train_s):
        return scenario
    if settings.get("rollout.logs") is not None:
        return attrs.evolve(scenario, rollout=attrs.evolve(rollout, median_tokens=None, sigma=None))
    wanted = [reading for reading in Tail if settings.get("rollout.tail") in (reading, reading.value)]
    return with_tail(scenario, wanted[0]) if wanted else scenario


def scaled(scenario: Scenario, factor: object) -> Scenario:
    """Return the scenario with all GPU counts and the trajectories of a step multiplied.

    Raises:
        ConfigError: The factor is no positive number, or a count would not be whole.
    """
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        message = f"{SCALE} must be a finite number > 0, got {shown(factor)}"
        raise ConfigError(message)
    counts = {f"cluster.{field.name}": getattr(scenario.cluster, field.name) for field in _gpu_counts()}
    counts["rollout.num_trajectories"] = scenario.rollout.num_trajectories
    settings = {}
    for key, count in counts.items():
        wanted = count * factor
        if abs(wanted - round(wanted)) > _WHOLE:
            message = f"{SCALE} = {factor:g} makes {key} = {wanted:g}; choose a factor that leaves whole numbers"
            raise ConfigError(message)
        settings[key] = round(wanted)
    try:
        return evolve_all(scenario, settings)
    except ConfigError as error:
        message = f"{SCALE} = {factor:g}: {error}"
        raise ConfigError(message) from error


def setting_keys() -> tuple[str, ...]:
    """Return every dotted key that can be set, in the order of the configuration."""
    return tuple(_fields())


def nearest(name: str, known: Sequence[str]) -> str:
    """Return ``did you mean 'x'? `` for the nearest of the known names, or nothing where none is near."""
    close = get_close_matches(name, known, n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _gpu_counts() -> list[attrs.Attribute[Any]]:
    return [field for field in attrs.fields(ClusterConfig) if field.name.endswith("_gpus")]


@cache
def _fields() -> Mapping[str, Any]:
    """Return the type of every key; lists cannot be set."""
    found = {}
    for section, kind in typing.get_type_hints(Scenario).items():
        if attrs.has(kind):
            found.update({f"{section}.{name}": hint for name, hint in typing.get_type_hints(kind).items()})
        elif kind is str:
            found[section] = kind
    return found


def _kind(key: str) -> tuple[type, bool]:
    """Return the type of a key, and whether it may be ``None``."""
    _check_key(key, key, [])
    hint = _fields()[key]
    if not isinstance(hint, types.UnionType):
        return hint, False
    members = [member for member in typing.get_args(hint) if member is not type(None)]
    return members[0], True


def _check_key(key: str, called: str, others: Sequence[str]) -> None:
    known = setting_keys()
    if key in known:
        return
    last_parts = {name.rpartition(".")[2]: name for name in reversed(known)}
    close = next(filter(None, (get_close_matches(called, names, n=1) for names in (others, known, last_parts))), [])
    suggested = [name if name in others else last_parts.get(name, name) for name in close]
    hint = f"did you mean {suggested[0]!r}? " if suggested else ""
    allowed = f"{', '.join(others)}, or any key" if others else "any key"
    message = f"{called}: unknown key; {hint}allowed: {allowed} that rose simulate --list shows"
    raise ConfigError(message)


def _evolve_section(scenario: Scenario, section: str, values: Mapping[str, object]) -> Scenario:
    part: Any = getattr(scenario, section) if section else scenario
    try:
        changed = config.load(type(part), {**_shallow(part), **values})
    except ConfigError as error:
        problems = (_with_section(section, problem) for problem in str(error).splitlines())
        raise ConfigError("\n".join(problems)) from error
    return attrs.evolve(scenario, **{section: changed}) if section else typing.cast("Scenario", changed)


def _shallow(part: Any) -> dict[str, Any]:
    return attrs.asdict(part, recurse=False)


def _with_section(section: str, problem: str) -> str:
    return problem if not section or problem.startswith(f"{section}.") else f"{section}.{problem}"


def _check_effect(scenario: Scenario, key: str) -> None:
    other = _OVERRULED_BY.get(key)
    if other is not None and get(scenario, other) is not None:
        message = f"{key} has no effect while {other} is {get(scenario, other)}; set {other}=none too"
        raise ConfigError(message)


def get(scenario: Scenario, key: str) -> Value:
    """Return the value of a dotted key, an enum by its value.

    Raises:
        ConfigError: The key is unknown.
    """
    _check_key(key, key, [])
    found: Any = scenario
    for name in key.split("."):
        found = getattr(found, name)
    value: Value = found.value if isinstance(found, enum.Enum) else found
    return value


def _integer(key: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        message = f"{key}: {text!r} is not a whole number"
        raise ConfigError(message) from None


def _number(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        message = f"{key}: {text!r} is not a number"
        raise ConfigError(message) from None
