from __future__ import annotations

import argparse

import pytest

from rose.cli import bench_arguments as given
from rose.errors import ConfigError

KNOWN = ("a", "b", "c")


@pytest.mark.parametrize(
    ("text", "chosen"), [(None, ("b",)), ("all", KNOWN), ("none", ()), ("c, a", ("a", "c")), ("b,b", ("b",))]
)
def test_names_are_chosen_in_the_order_in_which_they_are_known(text, chosen):
    assert given.names(text, KNOWN, option="--x", default=("b",)) == chosen


@pytest.mark.parametrize("text", ["d", "a,d", "all,a"])
def test_an_unknown_name_is_refused_with_all_known_ones(text):
    with pytest.raises(ConfigError, match=r"--x: there is no '(d|all)'; choose of a, b, c, or all or none"):
        given.names(text, KNOWN, option="--x", default=())


@pytest.mark.parametrize("text", ["", "a,,b", " "])
def test_an_empty_part_is_refused(text):
    with pytest.raises(ConfigError, match="--x is empty"):
        given.listed(text, option="--x")


@pytest.mark.parametrize(
    ("read", "good", "bad"),
    [
        (given.share, ("1", "0.5"), ("0", "1.1", "nan", "x")),
        (given.positive, ("1e-9", "3"), ("0", "inf", "-1", "x")),
        (given.count, ("1", "2e3"), ("0", "1.5", "x")),
        (given.seed, ("0", "7"), ("-1", "0.5")),
    ],
)
def test_numbers_out_of_range_are_refused(read, good, bad):
    assert [read(text) for text in good] == [float(text) for text in good]
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="is not a"):
            read(text)
