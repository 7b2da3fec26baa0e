from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.errors import ConfigError
from rose.simulation.trajectory_logs import TrajectoryLog, read_log

WHOLE = {
    "turns": [
        {"prompt_tokens": 800, "output_tokens": 50, "env_s": 0.5},
        {"prompt_tokens": 1000, "output_tokens": 60, "env_s": 2},
        {"prompt_tokens": 1010, "output_tokens": 5},
    ]
}
ADDED = {"turns": [{"new_tokens": 800, "output_tokens": 50, "env_s": 0.5}, {"new_tokens": 0, "output_tokens": 60}]}


def write(tmp_path: Path, *lines: object, prefix: str = "") -> Path:
    path = tmp_path / "log.jsonl"
    path.write_text(prefix + "".join(line if isinstance(line, str) else json.dumps(line) + "\n" for line in lines))
    return path


def one_turn(**changes: object) -> dict[str, object]:
    turn = {"prompt_tokens": 5, "output_tokens": 5, "env_s": 1.0} | changes
    return {"turns": [{name: value for name, value in turn.items() if value is not ...}, WHOLE["turns"][0]]}


def test_whole_prompts_become_what_each_turn_adds(tmp_path):
    log = read_log(write(tmp_path, WHOLE))
    # 1000 - 850 are new; the third prompt is shorter than all before it, so the template dropped something.
    assert log == TrajectoryLog(groups=((((800, 50, 0.5), (150, 60, 2.0), (1, 5, 0.0)),),), has_groups=False)


def test_added_tokens_are_taken_as_they_are(tmp_path):
    assert read_log(write(tmp_path, ADDED)).groups == ((((800, 50, 0.5), (1, 60, 0.0)),),)


def test_other_keys_blank_lines_and_a_byte_order_mark_do_no_harm(tmp_path):
    line = WHOLE | {"reward": 1.0, "turns": [turn | {"tool": "ls"} for turn in WHOLE["turns"]]}
    assert read_log(write(tmp_path, "\n", line, "  \n", prefix="\ufeff")) == read_log(write(tmp_path, WHOLE))


def test_groups_keep_the_order_of_the_file_and_may_be_interleaved(tmp_path):
    names = ["b", 1, "b", "1", 1]
    lines = [{"group": name, "turns": [{"new_tokens": i + 1, "output_tokens": 1}]} for i, name in enumerate(names)]
    log = read_log(write(tmp_path, *lines))
    assert log.has_groups
    assert [[turns[0][0] for turns in group] for group in log.groups] == [[1, 3], [2, 5], [4]]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{\n", r"not JSON \(Expecting property name.*, column 2\); correct or remove the line"),
        ("[" * 100_000 + "\n", r"nested too deeply"),
        ("[1]\n", r"not a JSON object"),
        ({}, r"no turns; give a list with at least one turn"),
        ({"turns": []}, r"turns is \[\]; give a list"),
        ({"turns": {"a": 1}}, r"turns is \{'a': 1\}; give a list"),
        ({"turns": [7]}, r"turns\[0\] is 7; give an object with prompt_tokens"),
        ({"turns": WHOLE["turns"], "group": 1.5}, r"group is 1.5; give a string or an integer"),
        ({"turns": WHOLE["turns"], "group": True}, r"group is True; give"),
        (one_turn(prompt_tokens=...), r"turns\[0\] has neither; give exactly one of prompt_tokens and new_tokens"),
        (one_turn(new_tokens=1), r"turns\[0\] has prompt_tokens and new_tokens; give exactly one"),
        (one_turn(prompt_tokens=0), r"turns\[0\].prompt_tokens is 0; give a whole number of tokens, at least 1"),
        (one_turn(prompt_tokens=1.5), r"turns\[0\].prompt_tokens is 1.5"),
        (one_turn(prompt_tokens="5"), r"turns\[0\].prompt_tokens is '5'"),
        (one_turn(output_tokens=0), r"turns\[0\].output_tokens is 0; .* or remove the turn"),
        (one_turn(output_tokens=True), r"turns\[0\].output_tokens is True"),
        (one_turn(output_tokens=...), r"turns\[0\] has no output_tokens; give a whole number"),
        (one_turn(env_s=...), r"turns\[0\] has no env_s; give the seconds"),
        (one_turn(env_s=-1), r"turns\[0\].env_s is -1; give the seconds"),
        (one_turn(env_s=float("nan")), r"turns\[0\].env_s is nan"),
        (one_turn(env_s=float("inf")), r"turns\[0\].env_s is inf"),
        (one_turn(env_s=10**400), r"turns\[0\].env_s is 1000"),
        (one_turn(env_s=None), r"turns\[0\].env_s is None"),
        (one_turn(env_s=False), r"turns\[0\].env_s is False"),
        (one_turn(prompt_tokens=900), r"turns\[1\].prompt_tokens is 800 after a turn of 900.*name them new_tokens"),
        ({"turns": [WHOLE["turns"][0], ADDED["turns"][0]]}, r"turns\[1\] mixes prompt_tokens with new_tokens"),
    ],
)
def test_a_malformed_line_is_refused_with_its_place(tmp_path, line, message: str):
    with pytest.raises(ConfigError, match=rf"^trajectory log .*log.jsonl, line 3: {message}") as caught:
        read_log(write(tmp_path, WHOLE, "\n", line, WHOLE))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("first", "second"), [({}, {"group": "a"}), ({"group": "a"}, {})])
def test_groups_are_named_on_all_lines_or_none(tmp_path, first: dict[str, str], second: dict[str, str]):
    with pytest.raises(ConfigError, match=r"line 2: group is on some lines only"):
        read_log(write(tmp_path, WHOLE | first, WHOLE | second))


def test_files_that_give_nothing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"log.jsonl: no trajectories in it; one JSON object a line"):
        read_log(write(tmp_path, "\n"))
    with pytest.raises(ConfigError, match=r"absent: cannot be read \(No such file"):
        read_log(tmp_path / "absent")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory"):
        read_log(tmp_path)
    binary = tmp_path / "binary"
    binary.write_bytes(b"\x80\x81\n")
    with pytest.raises(ConfigError, match=r"binary: not a text file"):
        read_log(binary)


def numbered(*sizes: int) -> tuple[tuple[tuple[tuple[int, int, float], ...], ...], ...]:
    return tuple(tuple(((100 * g + i + 1, 1, 0.0),) for i in range(size)) for g, size in enumerate(sizes))


@given(seed=st.integers(0, 2**32), size=st.integers(1, 20), sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5))
def test_a_drawn_group_is_of_one_logged_group_and_uses_it_evenly(seed: int, size: int, sizes: list[int]):
    log = TrajectoryLog(groups=numbered(*sizes), has_groups=True)
    drawn = log.draw_group(np.random.default_rng(seed), size)
    assert len(drawn) == size
    (members,) = {group for group in log.groups if drawn[0] in group}
    assert set(drawn) <= set(members)
    assert len(set(drawn)) == min(size, len(members))


def test_every_logged_group_and_trajectory_gets_its_turn():
    rng = np.random.default_rng(1)
    log = TrajectoryLog(groups=numbered(5, 2), has_groups=True)
    assert {turns for _ in range(100) for turns in log.draw_group(rng, 2)} == {t for group in log.groups for t in group}
    single = TrajectoryLog(groups=numbered(7), has_groups=False)
    assert set(single.draw_group(rng, 200)) == set(single.groups[0])
    assert len(set(single.draw_group(rng, 7))) < 7  # with repetition: no claim that the log is one group
