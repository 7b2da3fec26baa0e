from __future__ import annotations

import gzip
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from run_standins import TURNS, alone_run, small_record, step_row

from rose.errors import ConfigError
from rose.simulation.profile_fit import StepScale
from rose.simulation.run_tables import STEP_COLUMNS, TURN_COLUMNS, read_steps, read_turns, write_steps, write_turns

RUN, ROWS = alone_run(small_record(), scale=StepScale(), overhead_s=0.0)
STEPS, TURN_FILE = "steps-alone-1.1.csv.gz", "turns-alone-1.1.csv.gz"


def test_steps_are_read_back_by_engine(tmp_path: Path) -> None:
    write_steps(tmp_path, RUN, {"serving0": ROWS, "borrowed0": [step_row(0.5, 0.25, 3, 4)]})

    logs = read_steps(tmp_path, RUN)

    assert logs["borrowed0"] == [(0.5, 0.25, 0.0, 0.0, 0.0, 3.0, 4.0)]
    assert logs["serving0"] == [pytest.approx(tuple(row), rel=1e-8) for row in ROWS]


def test_a_lateness_that_nobody_waited_for_survives(tmp_path: Path) -> None:
    row = step_row(0.0, 1.0, 1, 0)
    row[2] = math.nan

    write_steps(tmp_path, RUN, {"serving0": [row]})

    assert math.isnan(read_steps(tmp_path, RUN)["serving0"][0][2])


def test_a_turn_that_was_moved_ran_on_no_one_engine(tmp_path: Path) -> None:
    write_turns(tmp_path, RUN, TURNS)

    whole, moved = read_turns(tmp_path, RUN)

    assert (whole.trajectory_id, whole.turn, whole.asked_s, whole.ended_s) == ("g0/t0", 0, 0.5, 20.5)
    assert (whole.num_prompt_tokens, whole.num_tokens, whole.engine_id) == (100, 20, "dedicated0")
    assert moved.engine_id is None


def packed(text: str) -> bytes:
    return gzip.compress(text.encode(), mtime=0)


STEP_HEADER, TURN_HEADER = ",".join(STEP_COLUMNS) + "\n", ",".join(TURN_COLUMNS) + "\n"


@pytest.mark.parametrize(
    ("name", "read", "content", "said"),
    [
        (STEPS, read_steps, None, "cannot be read"),
        (STEPS, read_steps, b"plain", "cannot be read"),
        (STEPS, read_steps, packed(STEP_HEADER)[:-12], "cannot be read"),
        (STEPS, read_steps, packed(STEP_HEADER)[:20] + b"\xff" * 20, "cannot be read"),
        (STEPS, read_steps, packed(""), "the header line is not engine_id,start_s"),
        (STEPS, read_steps, packed(TURN_HEADER), "the header line is not engine_id,start_s"),
        (STEPS, read_steps, packed(STEP_HEADER + "serving0,1,2,3\n"), "line 2: 4 fields where the header has 8"),
        (STEPS, read_steps, packed(STEP_HEADER + "serving0,1,2,3,4,5,6,x\n"), "line 2: could not convert"),
        (TURN_FILE, read_turns, packed(TURN_HEADER + "g0/t0,0,a,1,1,1,e:1:finished\n"), "line 2: could not convert"),
        (TURN_FILE, read_turns, packed(TURN_HEADER + "g0/t0\n"), "line 2: 1 fields where the header has 7"),
    ],
)
def test_refuses_a_damaged_table(
    tmp_path: Path, name: str, read: Callable[..., Any], content: bytes | None, said: str
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError) as caught:
        read(tmp_path, RUN)

    assert said in str(caught.value)
    assert str(tmp_path / name) in str(caught.value)
