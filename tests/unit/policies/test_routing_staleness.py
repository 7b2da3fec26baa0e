from __future__ import annotations

import pytest

from rose.policies.staleness import is_admissible, is_out_of_reach
from rose.types import AnyVersion, AtLeast, Exactly, WeightVersion

V3 = WeightVersion("run", 3)


@pytest.mark.parametrize(
    ("constraint", "version", "expected"),
    [
        (AnyVersion(), None, True),
        (AnyVersion(), WeightVersion("other", 0), True),
        (AtLeast(3), V3, True),
        (AtLeast(2), V3, True),
        (AtLeast(4), V3, False),
        (AtLeast(0), None, False),
        (AtLeast(0), WeightVersion("other", 9), False),
        (Exactly(3), V3, True),
        (Exactly(2), V3, False),
        (Exactly(4), V3, False),
        (Exactly(3), WeightVersion("other", 3), False),
    ],
)
def test_admissible(constraint, version, expected):
    assert is_admissible(constraint, version, "run") is expected


def test_numbers_of_a_run_nobody_named_are_not_admissible():
    assert not is_admissible(AtLeast(0), V3, None)


def test_only_an_exact_version_can_be_out_of_reach():
    assert is_out_of_reach(Exactly(2), [V3], "run")
    assert not is_out_of_reach(Exactly(3), [V3], "run")
    assert not is_out_of_reach(Exactly(4), [V3], "run")
    assert not is_out_of_reach(AtLeast(9), [V3], "run")
    assert not is_out_of_reach(AnyVersion(), [V3], "run")


def test_an_engine_without_a_label_or_no_engine_leaves_hope():
    assert not is_out_of_reach(Exactly(2), [V3, None], "run")
    assert not is_out_of_reach(Exactly(2), [], "run")
    assert not is_out_of_reach(Exactly(2), [V3, WeightVersion("older", 9)], "run")
