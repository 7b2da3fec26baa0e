from __future__ import annotations

import json

import pytest

from rose.errors import ConfigError
from rose.observe.metrics import MetricsLog, plain


def test_each_line_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write("step", step=1, reward=0.5)
        log.write("note", text="two\nlines")
        lines = path.read_text().splitlines()
    assert [json.loads(line) for line in lines] == [
        {"event": "step", "step": 1, "reward": 0.5},
        {"event": "note", "text": "two\nlines"},
    ]


def test_numbers_that_json_cannot_write_become_null(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsLog(path) as log:
        log.write("step", loss=float("nan"), nested={"a": [float("inf"), 1.5]})
    assert json.loads(path.read_text()) == {"event": "step", "loss": None, "nested": {"a": [None, 1.5]}}


def test_plain_keeps_what_json_can_write():
    assert plain({"a": (1, True, None, "x", 0.5)}) == {"a": [1, True, None, "x", 0.5]}


def test_a_file_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot write .*missing/metrics\.jsonl"):
        MetricsLog(tmp_path / "missing" / "metrics.jsonl")
