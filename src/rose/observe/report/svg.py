"""A matplotlib figure as SVG text that can stand inside a page, the same bytes for the same figure. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections import Counter
from collections.abc import Mapping

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

WIDTH_IN = 10.0

_LONE_GROUP = r"<g/>|<g></g>|<g>(<(?:path|use)[^<>]*/>|<text[^<>]*>[^<>]*</text>)</g>"
_GROUP_OF_MARKERS = r"<g( clip-path=[^<>]*)>((?:<use[^<>]*/>){2,})</g>"
_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def new_figure(height_in: float) -> Figure:
    """Return an empty figure as wide as the page."""
    return Figure(figsize=(WIDTH_IN, height_in), layout="constrained")


def embed(name: str, figure: Figure) -> str:
    """Return the figure as an ``<svg>`` element that shares no id with another and names nothing outside itself."""
    buffer = io.StringIO()
    with mpl.rc_context({"svg.hashsalt": name}):
        FigureCanvasSVG(figure).print_svg(buffer, metadata=_METADATA)
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    text = re.sub(r"(\d\d\.\d|\d\.\d\d)\d+", r"\1", text)  # a tenth of a point; parts of markers are smaller
    text = _share_styles(_number_ids(_compact(text), name), name)
    return re.sub(r"<svg ", '<svg aria-hidden="true" ', text, count=1)


def _compact(svg: str) -> str:
    """Return the same picture in fewer bytes: no blanks between elements, no groups around single ones, short paths."""
    svg = re.sub(r">\s+<", "><", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = svg.replace(" xlink:href=", " href=")
    svg = re.sub(r' transform="rotate\(-0 [^"]*"', "", svg)
    svg = re.sub(r'(?<= d=")[^"]*', _short_path, svg)
    while (shorter := re.sub(_LONE_GROUP, r"\1", svg)) != svg:
        svg = shorter
    return svg


def _number_ids(svg: str, name: str) -> str:
    ids = {found: f"{name}-{index}" for index, found in enumerate(re.findall(r'\sid="([^"]*)"', svg))}
    return re.sub(r'(\sid="|url\(#|href="#)([^")]*)', lambda found: found[1] + ids[found[2]], svg)


def _short_path(found: re.Match[str]) -> str:
    """Return a path without blanks; one of straight lines says only what changes: ``H`` along the width, ``V`` the height."""
    path = re.sub(r"\s*([A-Za-z])\s*", r"\1", found[0]).strip()
    if re.search(r"[^MLz\d. -]", path):
        return path
    parts, before = [], ["", ""]
    for letter, numbers in re.findall(r"([MLz])([^MLz]*)", path):
        at = numbers.split()
        is_along = letter == "L" and at[1] == before[1]
        is_up = letter == "L" and at[0] == before[0]
        parts.append(f"H{at[0]}" if is_along else f"V{at[1]}" if is_up else letter + numbers)
        before = at or ["", ""]
    return "".join(parts)


def _share_styles(svg: str, name: str) -> str:
    """Return the picture with styles that come again as classes, which takes half the bytes of a figure with many points."""
    styles = Counter(re.findall(r' style="([^"]*)"', svg))
    classes = {style: f"{name}-c{index}" for index, style in enumerate(styles) if styles[style] > 1}
    rules = "".join(f".{key}{{{style}}}" for style, key in classes.items())
    for style, key in classes.items():
        svg = svg.replace(f' style="{style}"', f' class="{key}"')
    svg = re.sub(_GROUP_OF_MARKERS, _hoist_class, svg)
    return svg.replace("</style>", f"{rules}</style>", 1)


def _hoist_class(group: re.Match[str]) -> str:
    classes = set(re.findall(r' class="[^"]*"', group[2]))
    if len(classes) != 1 or group[2].count(" class=") != group[2].count("<use"):
        return group[0]
    (shared,) = classes
    return f"<g{group[1]}{shared}>{group[2].replace(shared, '')}</g>"


def with_variables(svg: str, variables: Mapping[str, str]) -> str:
    """Return the figure with its colours (``#1f2933``) as variables of the page (``--ink``), so that it follows the page's theme.

    Where the page has no such variable the colour itself shows.
    """
    for colour, variable in variables.items():
        svg = re.sub(rf": {colour}\b", f": var({variable}, {colour})", svg)
    return svg
