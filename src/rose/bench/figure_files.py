"""Figures of a measurement's result as files. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

_SIZE = (7.0, 4.2)


def save_figure(path: Path, draw: Callable[[Any], object], *, title: str | None = None) -> Path:
    """Let ``draw`` fill the axes of a new figure, write it (SVG); returns ``path``."""
    figure = Figure(figsize=_SIZE, layout="constrained")
    draw(figure.subplots())
    if title is not None:
        figure.suptitle(title)
    figure.savefig(path)
    return path
