"""Configuration is read strictly, and every problem says what, allowed, got and where."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Literal, NewType

import attrs
import pytest
from attrs import validators as v

from rose.config import load
from rose.errors import ConfigError
from rose.types import Sampling, TransportAddress

Name = NewType("Name", str)


class Colour(enum.Enum):
    RED = "red"
    ONE = 1


@attrs.frozen(kw_only=True)
class Inner:
    size_bytes: int = attrs.field(validator=v.ge(1))
    rate: float = 1.0


@attrs.frozen(kw_only=True)
class Outer:
    inner: Inner
    name: Name = Name("x")
    is_on: bool = False
    path: Path = Path()
    colour: Colour = Colour.RED
    mode: Literal["slo", "quiet"] = "slo"
    limit: int | None = None
    value: int | str = 0
    either: Inner | str = "none"
    many: tuple[Inner, ...] = ()
    pair: tuple[int, str] = (0, "")
    items: list[str] = attrs.field(factory=list)
    table: dict[str, float] = attrs.field(factory=dict)
    _private: int = 0
    made: int = attrs.field(default=7, init=False)


OK = {"inner": {"size_bytes": 1}}


def problems(data, cls=Outer):
    with pytest.raises(ConfigError) as caught:
        load(cls, data)
    return str(caught.value).splitlines()


def test_everything_is_read():
    outer = load(
        Outer,
        {
            "inner": {"size_bytes": 4, "rate": 2},
            "name": "n",
            "is_on": True,
            "path": "some/where",
            "colour": "red",
            "mode": "quiet",
            "limit": 3,
            "value": "v",
            "either": {"size_bytes": 2},
            "many": [{"size_bytes": 5}],
            "pair": [1, "a"],
            "items": ["a"],
            "table": {"a": 1},
            "private": 9,
        },
    )
    assert outer == Outer(
        inner=Inner(size_bytes=4, rate=2.0),
        name=Name("n"),
        is_on=True,
        path=Path("some/where"),
        mode="quiet",
        limit=3,
        value="v",
        either=Inner(size_bytes=2),
        many=(Inner(size_bytes=5),),
        pair=(1, "a"),
        items=["a"],
        table={"a": 1.0},
        private=9,
    )
    assert type(outer.inner.rate) is float


def test_defaults_stay():
    assert load(Outer, OK) == Outer(inner=Inner(size_bytes=1))


def test_ready_objects_are_taken_as_they_are():
    inner = Inner(size_bytes=2)
    assert load(Outer, {"inner": inner, "path": Path("p"), "colour": Colour.ONE}).inner is inner


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("is_on", "false", "is_on: expected a boolean, got a string ('false')"),
        ("is_on", 0, "is_on: expected a boolean, got an integer (0)"),
        ("limit", 1.9, "limit: expected an integer, got a number (1.9)"),
        ("limit", True, "limit: expected an integer, got a boolean (True)"),
        ("name", 3, "name: expected a string, got an integer (3)"),
        ("path", 3, "path: expected a string, got an integer (3)"),
        ("colour", "blue", "colour: expected one of 'red', 1, got a string ('blue')"),
        ("colour", True, "colour: expected one of 'red', 1, got a boolean (True)"),
        ("mode", "fast", "mode: expected one of 'slo', 'quiet', got a string ('fast')"),
        ("value", 1.5, "value: expected an integer or a string, got a number (1.5)"),
        ("value", True, "value: expected an integer or a string, got a boolean (True)"),
        ("many", {"size_bytes": 1}, "many: expected an array, got a table"),
        ("many", [{"size_bytes": 1}, 2], "many[1]: expected a table, got an integer (2)"),
        ("items", "abc", "items: expected an array, got a string ('abc')"),
        ("items", ["a", 1], "items[1]: expected a string, got an integer (1)"),
        ("pair", [1], "pair: expected an array of 2 values, not 1, got an array"),
        ("pair", ["a", "b"], "pair[0]: expected an integer, got a string ('a')"),
        ("table", [1.0], "table: expected a table, got an array"),
        ("table", {"a": "1"}, "table.a: expected a number, got a string ('1')"),
        ("inner", {"size_bytes": 1, "rate": float("nan")}, "inner.rate: must be finite, got nan"),
        ("inner", {"size_bytes": 1, "rate": 2**60 + 1}, f"inner.rate: expected a number, got an integer ({2**60 + 1})"),
        ("inner", {}, "inner.size_bytes: this key is required and missing"),
        ("inner", {"size_bytes": 0}, "inner: 'size_bytes' must be >= 1: 0"),
        ("made", 1, None),
    ],
)
def test_a_wrong_value_is_refused(key, value, line):
    found = problems({**OK, key: value})
    assert len(found) == 1
    if line is not None:
        assert found[0] == line


def test_an_unknown_key_says_what_was_meant_and_what_is_allowed():
    assert problems({"inner": {"size_byte": 1, "size_bytes": 1}}) == [
        "inner.size_byte: unknown key; did you mean 'size_bytes'? allowed: size_bytes, rate"
    ]
    assert problems({"inner": {"zzz": 1, "size_bytes": 1}})[0].startswith("inner.zzz: unknown key; allowed: ")


def test_all_problems_come_together_one_line_each():
    found = problems({"inner": {"rate": "x"}, "is_on": 1, "modus": 2})
    assert [line.split(":")[0] for line in found] == ["modus", "inner.size_bytes", "inner.rate", "is_on"]


def test_no_table_at_all():
    with pytest.raises(ConfigError, match="expected a table, got an array"):
        load(Outer, {"inner": []})


def test_shared_types_can_be_read():
    sampling = load(Sampling, {"max_tokens": 3, "temperature": 0, "stop_token_ids": [5]})
    assert sampling == Sampling(max_tokens=3, temperature=0.0, stop_token_ids=(5,))
    assert load(TransportAddress, {"name": "m", "options": [["port", 1]]}).options == (("port", 1),)


def test_a_file_is_read_and_named_in_problems(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text("is_on = true\n[inner]\nsize_bytes = 8\n")
    assert load(Outer, file) == load(Outer, str(file)) == Outer(inner=Inner(size_bytes=8), is_on=True)
    file.write_text('is_on = "yes"\n[inner]\nsize_bytes = 8\nrates = 1\n')
    found = problems(file)
    assert len(found) == 2
    assert all(line.startswith(f"{file}: ") for line in found)


def test_unreadable_files_are_one_clear_line(tmp_path):
    assert problems(tmp_path / "none.toml") == [
        f"cannot read the configuration file {tmp_path}/none.toml: No such file or directory; give the path of a TOML file"
    ]
    file = tmp_path / "bad.toml"
    file.write_text("a = = 1")
    assert problems(file)[0].startswith(f"{file} is not valid TOML: ")
    file.write_bytes(b"a = '\xff'")
    assert problems(file)[0].startswith(f"{file} is not valid TOML: ")


@pytest.mark.parametrize("source", [3, None, b"a.toml", ["a"]])
def test_a_source_of_a_wrong_kind_is_refused(source):
    with pytest.raises(ConfigError, match="give a mapping or the path of a TOML file"):
        load(Inner, source)


@pytest.mark.parametrize("cls", [int, dict, Inner(size_bytes=1)])
def test_a_class_of_a_wrong_kind_is_refused(cls):
    with pytest.raises(ConfigError, match="read into an attrs class"):
        load(cls, {})


def test_the_refusals_of_several_validators_come_together():
    @attrs.frozen(kw_only=True)
    class Limits:
        low: int = attrs.field(validator=v.ge(0))
        high: int = attrs.field(validator=v.gt(0))
        name: str = attrs.field(default="x", converter=str.strip, validator=v.min_len(1))
        ok: int = attrs.field(default=1, validator=v.ge(0))

    with pytest.raises(ConfigError) as caught:
        load(Limits, {"low": -1, "high": 0, "name": " ", "ok": 2})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["'low'", "'high'", "Length"]
    with pytest.raises(ConfigError) as caught:
        load(Limits, {"low": -1, "high": "1"})
    assert [line.split()[0] for line in str(caught.value).splitlines()] == ["high:", "'low'"]


def test_what_only_the_whole_instance_refuses_is_told():
    @attrs.frozen(kw_only=True)
    class Span:
        high: int = 9
        low: int = attrs.field(validator=v.ge(0))

        @low.validator
        def _check(self, _attribute, value):
            if value > self.high:
                message = f"low = {value} is above high"
                raise ValueError(message)

    with pytest.raises(ConfigError, match="low = 10 is above high"):
        load(Span, {"low": 10})
