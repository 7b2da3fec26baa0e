from __future__ import annotations

from itertools import combinations

import pytest
from synthetic_study import study_result

from rose.simulation.report import looks
from rose.simulation.report.data import read_study

# How a linear colour looks without one kind of cone (Vienot, Brettel and Mollon 1999), red and green.
WITHOUT_RED = ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0))
WITHOUT_GREEN = ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0))
WHITE, DARK = "#ffffff", "#1c2229"


def linear(colour):
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def contrast(first, second):
    high, low = sorted(
        (sum(map(float.__mul__, (0.2126, 0.7152, 0.0722), linear(c))) for c in (first, second)), reverse=True
    )
    return (high + 0.05) / (low + 0.05)


def seen(colour, cones):
    light = linear(colour)
    kept = [max(0.0, sum(a * b for a, b in zip(row, light, strict=True))) for row in cones]
    return [part ** (1 / 2.4) for part in kept]


@pytest.mark.parametrize("colour", looks.PALETTE)
def test_every_colour_is_seen_on_white_and_on_the_dark_page(colour):
    assert contrast(colour, WHITE) >= 2.7
    assert contrast(colour, DARK) >= 2.7


@pytest.mark.parametrize("cones", [WITHOUT_RED, WITHOUT_GREEN])
def test_colours_differ_without_red_or_green_cones(cones):
    for first, second in combinations(looks.PALETTE, 2):
        distance = sum((a - b) ** 2 for a, b in zip(seen(first, cones), seen(second, cones), strict=True)) ** 0.5
        assert distance > 0.2, (first, second)


def test_strategies_differ_by_colour_and_marker_and_look_the_same_in_every_study():
    first, second = (read_study(study_result(names)) for names in (["paper", "spot"], ["default", "spot", "paper"]))
    found = looks.assign_looks([first, second])
    assert list(found) == ["fixed", "paper", "spot", "default"]
    assert len({(look.colour, look.marker) for look in found.values()}) == 4


def test_as_many_strategies_as_ever_differ():
    names = [f"policy-{index}" for index in range(42)]
    result = {**study_result([]), "strategies": names, **{name: {"kind": "policy"} for name in names}}
    found = looks.assign_looks([read_study(result)])
    own = [found[name] for name in names]
    assert len({(look.colour, look.marker) for look in own}) == 42


def test_policies_are_solid_and_baselines_dashed():
    found = looks.assign_looks([read_study(study_result(["paper", "default", "spot"]))])
    assert found["paper"].dashes == looks.SOLID
    assert found["spot"].dashes != looks.SOLID
    assert found["paper"].width > found["spot"].width
