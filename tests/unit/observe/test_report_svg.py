from __future__ import annotations

import re

from matplotlib.figure import Figure

from rose.observe.report.svg import embed, new_figure, with_variables


def plot() -> Figure:
    figure = new_figure(2.0)
    figure.subplots().plot([0, 1, 2, 3], [3, 1, 2, 0], marker="o", color="#123456")
    return figure


def test_names_keep_figures_apart_and_the_same_figure_is_the_same_bytes():
    first, again, other = embed("a", plot()), embed("a", plot()), embed("b", plot())
    assert first == again
    ids = [set(re.findall(r'\sid="([^"]*)"', svg)) for svg in (first, other)]
    assert ids[0]
    assert not ids[0] & ids[1]
    assert set(re.findall(r'(?:href="|url\()#([^")]*)', first)) <= ids[0]


def test_styles_that_come_again_are_classes_and_every_class_is_defined():
    svg = embed("a", plot())
    used = set(re.findall(r' class="([^"]*)"', svg))
    assert used
    assert used == set(re.findall(r"\.(a-c\d+)\{", svg))
    left = re.findall(r' style="([^"]*)"', svg)
    assert len(left) == len(set(left))
    assert "#123456" in svg


def points_of(path: str) -> list[tuple[float, float]]:
    """Follow a path of straight lines."""
    points, x, y = [], 0.0, 0.0
    for letter, numbers in re.findall(r"([MLHV])([^MLHVz]*)", path):
        at = [float(number) for number in numbers.split()]
        x, y = (at[0], y) if letter == "H" else (x, at[0]) if letter == "V" else tuple(at)
        points.append((x, y))
    return points


def test_a_line_keeps_its_points():
    path = next(d for d in re.findall(r' d="([^"]*)"', embed("a", plot())) if d.count("L") == 3)
    points = points_of(path)
    assert [x for x, _ in points] == sorted(x for x, _ in points)
    heights = [y for _, y in points]
    assert heights[1] > heights[2] > heights[0]
    assert heights[3] == max(heights)


def test_steps_and_whiskers_say_only_what_changes():
    figure = new_figure(2.0)
    axis = figure.subplots()
    axis.set(xlim=(0, 10), ylim=(0, 10))
    axis.step([0, 2, 4, 8], [1, 5, 5, 9], where="post", color="#123456")
    (line,) = re.findall(r'<path d="([^"]*)"[^>]*#123456', embed("a", figure))
    assert re.fullmatch(r"M[\d.]+ [\d.]+(?:[HV][\d.]+)+", line)
    points = points_of(line)
    width, height = points[-1][0] - points[0][0], points[0][1] - points[-1][1]
    shape = [(round((x - points[0][0]) / width * 8), round((points[0][1] - y) / height * 8)) for x, y in points]
    assert [at for index, at in enumerate(shape) if index == 0 or at != shape[index - 1]] == [
        (0, 0), (2, 0), (2, 4), (4, 4), (8, 4), (8, 8),
    ]  # fmt: skip


def test_nothing_is_dated_or_blank_between_elements():
    svg = embed("a", plot())
    assert not re.search(r"20\d\d-", svg)
    assert not re.search(r">\s+<", svg)
    assert svg.startswith('<svg aria-hidden="true" ')


def test_colours_become_variables_and_only_whole_ones():
    svg = '<path style="fill: #1f2933; stroke: #1f29334"/>'
    assert with_variables(svg, {"#1f2933": "--ink"}) == '<path style="fill: var(--ink, #1f2933); stroke: #1f29334"/>'
