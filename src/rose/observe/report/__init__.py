"""The report of a run: one self-contained HTML file, readable without a network and on paper."""

from __future__ import annotations

from pathlib import Path

from rose.errors import BackendUnavailableError, ConfigError
from rose.observe.report.data import BusyShare, DeviceStrip, LatencySeries, ReportData, StepFigures
from rose.observe.report.page import render

__all__ = ["BusyShare", "DeviceStrip", "LatencySeries", "ReportData", "StepFigures", "write_report"]


def write_report(path: Path, data: ReportData) -> None:
    """Write the report: one HTML file with its style and its figures inside; nothing is loaded from elsewhere.

    Raises:
        BackendUnavailableError: matplotlib, which draws the figures, is not installed.
        ConfigError: The file cannot be written.
    """
    try:
        from rose.observe.report.figures import draw_all  # noqa: PLC0415 - matplotlib is an extra
    except ImportError as error:
        message = f"the report's figures need matplotlib ({error}); install it with: pip install 'rose-rl[demo]'"
        raise BackendUnavailableError(message) from error
    page = render(data, draw_all(data))
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}; choose a folder that you may write to"
        raise ConfigError(message) from error
