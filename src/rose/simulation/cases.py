"""One case of a study, what identifies it, and the file that keeps its outcome.

Invariants: a case's key covers everything that its outcome depends on (scenario, strategy, seed, the contents of the files
that the scenario names, the version and the sources of the simulated code), so a stored outcome is never stale. A file is
whole or not there; one that is damaged counts as not there. An outcome travels as JSON text always, so that one read
back is the one that was run.
"""

from __future__ import annotations

import contextlib
import enum
import json
import os
from collections.abc import Iterator, Mapping
from functools import lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import attrs
import xxhash

from rose import config
from rose.errors import ConfigError
from rose.simulation import axes
from rose.simulation.outcome import Outcome, ServingOutcome
from rose.simulation.scenario import Scenario

SERVING_ALONE = "serving_alone"
"""In the place of a strategy: serving's load without any rollout beside it."""

AnyOutcome = Outcome | ServingOutcome

_INPUT_KEYS = ("serving.trace", "serving.operators", "rollout.logs")
_ROSE = Path(__file__).parents[1]
_SOURCES = (
    *("*.py", "interfaces/**/*", "policies/**/*", "observe/*.py", "transfer/**/*", "coserving/**/*"),
    *("backends/paced/**/*", "pool/**/*", "simulation/**/*"),
)
# These list cases or show outcomes; no outcome depends on them.
_NOT_SOURCES = tuple(
    _ROSE / "simulation" / name
    for name in (
        *("report", "calibrate.py", "presets.py", "preflight.py"),
        *("axes.py", "processes.py", "results.py", "study.py"),
    )
)


@attrs.frozen(kw_only=True)
class Case:
    """One run of the simulator.

    Attributes:
        key: Names what its outcome depends on; equal cases have equal keys.
        label: The scenario in a few words, for people.
        scenario: What is simulated.
        strategy: By which strategy, or ``SERVING_ALONE``.
        seed: Of everything random.
    """

    key: str
    label: str
    scenario: Scenario
    strategy: str
    seed: int

    def __str__(self) -> str:
        """Return the case in a few words."""
        what = "serving alone" if self.strategy == SERVING_ALONE else f"strategy {self.strategy}"
        return f"{self.label}, {what}, seed {self.seed}"


class CaseMaker:
    """Makes cases; reads each input file once.

    Args:
        sources: Digest of the simulated code.
    """

    def __init__(self, sources: str | None = None) -> None:
        self._code = {
            "rose": version("rose-rl"),
            "numpy": version("numpy"),
            "sources": sources or sources_digest(),
        }
        self._inputs: dict[str, str] = {}

    def make(self, scenario: Scenario, strategy: str, seed: int, label: str | None = None) -> Case:
        """Return a case with its key.

        Raises:
            ConfigError: A file that the scenario names cannot be read.
        """
        identity = {
            "code": self._code,
            "scenario": plain(scenario),
            "inputs": self._digests(scenario),
            "strategy": strategy,
            "seed": seed,
        }
        key = xxhash.xxh3_128_hexdigest(_text(identity).encode())
        return Case(key=key, label=label or scenario.name, scenario=scenario, strategy=strategy, seed=seed)

    def _digests(self, scenario: Scenario) -> dict[str, str]:
        digests = {}
        for key in _INPUT_KEYS:
            path = axes.get(scenario, key)
            if isinstance(path, str):
                if path not in self._inputs:
                    self._inputs[path] = _file_digest(key, Path(path))
                digests[key] = self._inputs[path]
        return digests


@lru_cache(maxsize=1)
def sources_digest() -> str:
    """Return a digest of the code that decides what a simulation finds."""
    files = sorted({path for pattern in _SOURCES for path in _ROSE.glob(pattern) if _is_source(path)})
    state = xxhash.xxh3_128()
    for path in files:
        content = path.read_bytes()
        state.update(f"{path.relative_to(_ROSE).as_posix()} {len(content)}\n".encode())
        state.update(content)
    return str(state.hexdigest())


def _is_source(path: Path) -> bool:
    is_left_out = any(path.is_relative_to(other) for other in _NOT_SOURCES)
    return path.is_file() and "__pycache__" not in path.parts and not is_left_out


def _file_digest(key: str, path: Path) -> str:
    state = xxhash.xxh3_128()
    try:
        with path.open("rb") as file:
            while chunk := file.read(1 << 20):
                state.update(chunk)
    except OSError as error:
        message = f"{key}: cannot read {path}: {error.strerror or error}; give the path of a file that you may read"
        raise ConfigError(message) from error
    return str(state.hexdigest())


def plain(value: Any) -> dict[str, Any]:
    """Return an attrs value as plain data, enums by their values."""
    return attrs.asdict(
        value, value_serializer=lambda _instance, _field, item: item.value if isinstance(item, enum.Enum) else item
    )


def encode(outcome: AnyOutcome) -> str:
    """Return an outcome as JSON text.

    Raises:
        ValueError: It holds a number that is not finite.
    """
    return _text(plain(outcome))


def decode(strategy: str, text: str) -> AnyOutcome:
    """Return the outcome that ``encode`` made into ``text``.

    Raises:
        ValueError: The text is none.
    """
    kind: type[AnyOutcome] = ServingOutcome if strategy == SERVING_ALONE else Outcome
    return config.load(kind, json.loads(text))


def save(folder: Path, case: Case, text: str) -> None:
    """Keep an outcome's text, all of it or nothing.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    record = {
        "scenario": plain(case.scenario),
        "strategy": case.strategy,
        "seed": case.seed,
        "check": _check(case, text),
        "outcome": json.loads(text),
    }
    path = _path(folder, case)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        with _removed_on_error(part):
            part.write_text(json.dumps(record) + "\n", encoding="utf-8")
            part.replace(path)
    except OSError as error:
        message = f"cannot write {path}: {error.strerror or error}; free some space or choose another folder"
        raise ConfigError(message) from error


@contextlib.contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def load(folder: Path, case: Case) -> AnyOutcome | None:
    """Return the kept outcome of a case; ``None`` where there is none or its file is damaged."""
    try:
        record = json.loads(_path(folder, case).read_text(encoding="utf-8"))
        text = _text(record["outcome"])
        return decode(case.strategy, text) if record["check"] == _check(case, text) else None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None


def _path(folder: Path, case: Case) -> Path:
    return folder / f"{case.key}.json"


def _check(case: Case, text: str) -> str:
    """Return what an undamaged file of this case with this outcome says."""
    return str(xxhash.xxh3_128_hexdigest(f"{case.key} {text}".encode()))


def _text(data: Mapping[str, Any]) -> str:
    return json.dumps(data, allow_nan=False, separators=(",", ":"))
