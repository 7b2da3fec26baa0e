"""The report of a study: one self-contained HTML file of figures and tables, the same bytes for the same result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from rose.errors import BackendUnavailableError, ConfigError
from rose.simulation.report.data import join, read_study
from rose.simulation.report.looks import assign_looks
from rose.simulation.report.page import render_reproduction, render_study

__all__ = ["write_reproduction_report", "write_study_report"]


def write_study_report(path: Path, result: Mapping[str, object]) -> None:
    """Write one result as a page.

    Raises:
        BackendUnavailableError: matplotlib, which draws the figures, is not installed.
        ConfigError: The result is malformed or the file cannot be written.
    """
    study = read_study(result)
    _write(path, render_study(study, _figures().draw_study(study, assign_looks([study]))))


def write_reproduction_report(path: Path, results: Sequence[Mapping[str, object]]) -> None:
    """Write several results as one page: an overview and a chapter a scenario.

    Results of the same scenario become one chapter, with the sweeps of all.

    Raises:
        BackendUnavailableError: matplotlib, which draws the figures, is not installed.
        ConfigError: There is no result, one is malformed, or the file cannot be written.
    """
    studies = join(read_study(result) for result in results)
    if not studies:
        message = f"no result to write to {path}; give at least one"
        raise ConfigError(message)
    styles = assign_looks(studies)
    drawing = _figures()
    drawn = [drawing.draw_study(study, styles, prefix=f"s{index}f") for index, study in enumerate(studies)]
    _write(path, render_reproduction(studies, drawn, drawing.draw_overview(studies, styles)))


def _figures() -> ModuleType:
    try:
        from rose.simulation.report import figures  # noqa: PLC0415 - matplotlib is an extra
    except ImportError as error:
        message = f"the report's figures need matplotlib ({error}); install it with: pip install 'rose-rl[demo]'"
        raise BackendUnavailableError(message) from error
    return figures


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}; choose a folder that you may write to"
        raise ConfigError(message) from error
