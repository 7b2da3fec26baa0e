"""Trajectories with the shape of recorded ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose.bench.faults.shapes import TurnShape, new_tokens, read_shapes
from rose.errors import ConfigError


def recorded(path: Path, *turns: list[object]) -> Path:
    path = path / "turns.json"
    path.write_text(json.dumps([{"task": i, "reward": 0.0, "turns": one} for i, one in enumerate(turns)]))
    return path


def test_what_comes_in_between_two_answers_is_one_prompt(tmp_path: Path):
    path = recorded(tmp_path, [["s", 100], ["u", 20], ["a", 30], ["t", 40], ["u", 4], ["a", 8], ["u", 16]])
    assert read_shapes(path, scale=1.0, longest=1000) == [(TurnShape(120, 30), TurnShape(44, 8))]


def test_numbers_are_scaled_and_keep_a_token(tmp_path: Path):
    path = recorded(tmp_path, [["s", 100], ["a", 3], ["t", 0], ["a", 40], ["a", 40]])
    (shape,) = read_shapes(path, scale=0.1, longest=1000)
    assert shape == (TurnShape(10, 1), TurnShape(1, 4), TurnShape(1, 4))


def test_turns_beyond_the_context_are_left_out(tmp_path: Path):
    path = recorded(tmp_path, [["u", 10], ["a", 10], ["u", 10], ["a", 10]])
    assert read_shapes(path, scale=1.0, longest=39) == [(TurnShape(10, 10),)]
    assert len(read_shapes(path, scale=1.0, longest=40)[0]) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "cannot be read"),
        ("3", 'trajectory 0: expected {"turns"'),
        ('[{"turns": [["x", 1]]}]', "with roles s, u, t and a"),
        ('[{"turns": [["u", true]]}]', "with roles s, u, t and a"),
        ('[{"turns": [["u", 5]]}]', "no turn fits into 50 tokens"),
        ('[{"turns": [["u", 50], ["a", 1]]}]', "no turn fits into 50 tokens"),
    ],
)
def test_what_is_no_such_file_is_refused_in_one_line(tmp_path: Path, text: str, message: str):
    path = tmp_path / "turns.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_shapes(path, scale=1.0, longest=50)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"absent\.json"):
        read_shapes(tmp_path / "absent.json", scale=1.0, longest=50)


def test_what_comes_in_is_the_same_for_the_same_turn_only():
    first = new_tokens(1, 2, 20, vocab=64, seed=3)
    assert first == new_tokens(1, 2, 20, vocab=64, seed=3)
    assert all(3 <= token < 64 for token in first)
    others = [new_tokens(*where, 20, vocab=64, seed=seed) for where, seed in [((2, 2), 3), ((1, 3), 3), ((1, 2), 4)]]
    assert first not in others
