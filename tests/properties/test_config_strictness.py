"""Whatever a document holds, a value is read as exactly what it is, or refused."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.config import load
from rose.errors import ConfigError


@attrs.frozen(kw_only=True)
class Flag:
    x: bool


@attrs.frozen(kw_only=True)
class Count:
    x: int


@attrs.frozen(kw_only=True)
class Rate:
    x: float


@attrs.frozen(kw_only=True)
class Text:
    x: str


@attrs.frozen(kw_only=True)
class Many:
    x: tuple[int, ...]


plain = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text())
values = st.recursive(plain, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3))
ALLOWED = {Flag: (bool,), Count: (int,), Rate: (float, int), Text: (str,), Many: (list,)}


def outcome(cls, document):
    """Return the value that was read, or the lines of the refusal."""
    try:
        return load(cls, document).x, []
    except ConfigError as error:
        return None, str(error).split("\n")


@pytest.mark.parametrize("cls", ALLOWED)
@given(value=values)
def test_nothing_is_coerced(cls, value):
    got, problems = outcome(cls, {"x": value})
    if problems:
        assert all(line.startswith("x") for line in problems)
        return
    assert type(value) in ALLOWED[cls]
    assert got == (tuple(value) if cls is Many else value)
    assert cls is not Many or all(type(item) is int for item in value)


@given(keys=st.dictionaries(st.text(), values, max_size=5))
def test_unknown_keys_never_pass(keys):
    keys.pop("x", None)
    _, problems = outcome(Text, {"x": "", **keys})
    assert len(problems) == len(keys)
    assert all("unknown key" in line for line in problems)
