from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from run_standins import alone_run, policy_run, small_record

from rose.errors import ConfigError
from rose.simulation.profile_fit import StepScale
from rose.simulation.run_record import (
    FILE_NAME,
    read_run,
    write_run,
)

RECORD = small_record()
ALONE, _ = alone_run(RECORD, scale=StepScale(), overhead_s=0.001)
SLO = policy_run(RECORD, "slo", ttft_s=0.05, rollout_s=20.0)
WHOLE = attrs.evolve(RECORD, runs=(ALONE, SLO))


def changed(folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Write a good record, then change its JSON."""
    write_run(WHOLE, folder)
    data = json.loads((folder / FILE_NAME).read_text())
    change(data)
    (folder / FILE_NAME).write_text(json.dumps(data))
    return folder


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    write_run(WHOLE, tmp_path)

    assert read_run(tmp_path) == WHOLE
    assert not list(tmp_path.glob("*.part"))


def test_arms_come_in_order_and_only_valid_runs_count() -> None:
    bad = attrs.evolve(ALONE, problems=("pacing disturbed",))
    again = attrs.evolve(ALONE, attempt=2)
    record = attrs.evolve(RECORD, runs=(bad, again, SLO))

    assert record.arms == ("alone", "slo")
    assert record.valid_runs("alone") == (again,)
    assert not bad.is_valid
    assert (bad.label, again.label) == ("alone-1.1", "alone-1.2")


def test_borrowed_engines_are_those_beside_serving() -> None:
    assert RECORD.borrowed_engines == {"borrowed0"}


def test_an_invalid_run_may_lack_trajectories() -> None:
    assert (
        attrs.evolve(RECORD, runs=(attrs.evolve(SLO, trajectories=(), problems=("cut short",)),)).valid_runs("slo")
        == ()
    )


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (
            (attrs.evolve(SLO, trajectories=SLO.trajectories * 2),),
            "run slo-1.1: has 2 trajectories where 1 were planned",
        ),
        ((attrs.evolve(SLO, rollout_s=None),), "run slo-1.1: rollout_s belongs to runs with trajectories"),
        ((attrs.evolve(ALONE, requests=ALONE.requests[:1] * 2),), "run alone-1.1: a request is there twice"),
        (
            (attrs.evolve(ALONE, requests=(attrs.evolve(ALONE.requests[0], index=60),)),),
            "run alone-1.1: request 60 of 'shared0' never arrived",
        ),
        (
            (attrs.evolve(ALONE, requests=(attrs.evolve(ALONE.requests[0], device="own0"),)),),
            "request 0 of 'own0' never arrived",
        ),
    ],
)
def test_refuses_runs_that_are_not_of_this_record(runs: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        attrs.evolve(RECORD, runs=runs)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.update(schema=2), "schema must be 1, the only known one, got 2"),
        (lambda data: data.pop("k"), "k: this key is required and missing"),
        (lambda data: data.update(kk=1), "kk: unknown key; did you mean 'k'"),
        (lambda data: data.update(k="2"), "k: expected a number, got a string"),
        (lambda data: data.update(arrivals={}), "arrivals are for none, the devices with a serving engine are shared0"),
        (
            lambda data: data["runs"][0]["requests"][3].update(ttft_s=-1),
            "runs[0].requests[3]: ttft_s must be a finite number >= 0, got -1",
        ),
        (
            lambda data: data["trajectories"][0]["turns"].clear(),
            "trajectories[0]: turns must be at least one turn",
        ),
        (lambda data: data["runs"][1].update(mode="free"), "runs[1].mode: expected one of 'slo'"),
    ],
)
def test_refuses_a_malformed_record_in_one_line(tmp_path: Path, change: Any, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_run(changed(tmp_path, change))

    [line] = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path / FILE_NAME}: ")
    assert said in line


@pytest.mark.parametrize(
    ("text", "said"),
    [(None, "has no readable run.json"), ("{", "is not valid JSON"), ("[]", "holds no JSON object"), ("\xff", "JSON")],
)
def test_refuses_what_is_no_record_at_all(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / FILE_NAME).write_bytes(text.encode("latin-1"))

    with pytest.raises(ConfigError, match=said) as caught:
        read_run(tmp_path)

    assert "benchmarks/fidelity.py" in str(caught.value)


def test_a_record_has_no_json_that_others_cannot_read() -> None:
    with pytest.raises(ValueError, match="JSON"):
        write_run(attrs.evolve(WHOLE, runs=(attrs.evolve(ALONE, engines=(_with_nan(),)),)), Path("/nonexistent"))


def _with_nan() -> Any:
    engine = ALONE.engines[0]
    return attrs.evolve(engine, pacing=attrs.evolve(engine.pacing, late_p99_s=float("nan")))
