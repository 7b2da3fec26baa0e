"""The report's figures as SVG text. Needs matplotlib; draws on its SVG canvas, so no display and no global state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, PercentFormatter

from rose.observe.latency import percentile
from rose.observe.report import style
from rose.observe.report.data import DeviceStrip, ReportData
from rose.observe.report.svg import embed, new_figure
from rose.observe.summary import size

_LABEL_FITS_INSIDE = 0.9


def draw_all(data: ReportData) -> dict[str, str]:
    """Return every figure of the report by name; a figure without data is left out."""
    painters: dict[str, tuple[bool, Callable[[ReportData], Figure]]] = {
        "strips": (bool(data.strips), _strips),
        "busy": (bool(data.busy), _busy),
        "latency": (bool(data.latency), _latency),
        "learning": (any(data.steps.values()), _learning),
        "sync": (bool(data.versions), _sync),
        "completion": (any(data.completion_s.values()), _completion),
    }
    with mpl.rc_context(style.RC_PARAMS):
        return {name: embed(name, paint(data)) for name, (has_data, paint) in painters.items() if has_data}


def _strips(data: ReportData) -> Figure:
    arms = list(dict.fromkeys(strip.arm for strip in data.strips))
    devices = list(dict.fromkeys(strip.device for strip in data.strips))
    by_place = {(strip.device, strip.arm): strip for strip in data.strips}
    figure = new_figure(0.62 * len(devices) + 1.0)
    axes = figure.subplots(len(devices), len(arms), squeeze=False, sharey=True)
    for row, device in enumerate(devices):
        for column, arm in enumerate(arms):
            axis = axes[row][column]
            axis.set(ylim=(0, 1), yticks=[])
            axis.grid(visible=False)
            axis.spines["left"].set_visible(False)
            axis.tick_params(labelbottom=row == len(devices) - 1)
            axis.xaxis.set_major_locator(MaxNLocator(nbins=6, prune="both"))
            if row == 0:
                axis.set_title(arm, color=style.ARM_COLOURS.get(arm, style.INK))
            if (device, arm) in by_place:
                _draw_strip(axis, by_place[device, arm], is_first=column == 0)
    for axis in axes[-1]:
        axis.set_xlabel("modelled seconds into the arm")
    figure.legend(handles=_device_legend(), loc="outside upper right", ncols=3, handlelength=1.0)
    return figure


def _draw_strip(axis: Any, strip: DeviceStrip, *, is_first: bool) -> None:
    edges = [strip.start_s + index * strip.bin_s for index in range(len(strip.serving) + 1)]
    tops = [serving + rollout for serving, rollout in zip(strip.serving, strip.rollout, strict=True)]
    axis.set_facecolor("#f3f5f7")
    axis.stairs(tops, edges, baseline=list(strip.serving), fill=True, color=style.ROLLOUT, linewidth=0)
    axis.stairs(strip.serving, edges, fill=True, color=style.SERVING, linewidth=0)
    axis.set_xlim(edges[0], edges[-1])
    if is_first:
        axis.set_ylabel(strip.device, rotation=0, ha="right", va="center", color=style.INK)


def _device_legend() -> list[Patch]:
    return [
        Patch(color=style.SERVING, label="serving"),
        Patch(color=style.ROLLOUT, label="rollout"),
        Patch(facecolor="#f3f5f7", edgecolor="#cfd6dc", label="idle"),
    ]


def _busy(data: ReportData) -> Figure:
    arms = list(dict.fromkeys(share.arm for share in data.busy))
    figure = new_figure(0.26 * len(data.busy) / len(arms) + 0.95)
    axes = figure.subplots(1, len(arms), squeeze=False, sharey=True)[0]
    for axis, arm in zip(axes, arms, strict=True):
        shares = [share for share in data.busy if share.arm == arm]
        names = [share.device for share in shares]
        serving = [share.serving_fraction for share in shares]
        rollout = [share.rollout_fraction for share in shares]
        axis.barh(names, [1] * len(names), color="#f3f5f7", height=0.72)
        axis.barh(names, serving, color=style.SERVING, height=0.72)
        axis.barh(names, rollout, left=serving, color=style.ROLLOUT, height=0.72)
        for index, busy in enumerate(a + b for a, b in zip(serving, rollout, strict=True)):
            is_inside = busy > _LABEL_FITS_INSIDE
            axis.text(
                busy - 0.012 if is_inside else busy + 0.012,
                index,
                f"{busy:.0%}",
                va="center",
                ha="right" if is_inside else "left",
                color="white" if is_inside else style.INK,
            )
        axis.set(xlim=(0, 1), xlabel="share of the arm's time")
        axis.set_title(arm, color=style.ARM_COLOURS.get(arm, style.INK))
        axis.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axis.grid(visible=False, axis="y")
        axis.tick_params(axis="y", labelcolor=style.INK)
        axis.spines["left"].set_visible(False)
    axes[0].invert_yaxis()
    return figure


def _latency(data: ReportData) -> Figure:
    figure = new_figure(3.3)
    panels = (
        ("TTFT", "time to the first token (ms)", "ttft_ms"),
        ("TPOT", "mean time of a further token (ms)", "tpot_ms"),
    )
    for axis, (name, label, field) in zip(figure.subplots(1, 2, sharey=True), panels, strict=True):
        limit_ms = data.summary["serving"]["slo"][field]
        for arm, series in data.latency.items():
            values = sorted(getattr(series, field))
            if values:
                _draw_ecdf(axis, values, arm)
        axis.axvline(limit_ms, color=style.LIMIT, linestyle=(0, (4, 2)), linewidth=1.2)
        axis.annotate(
            f"SLO {limit_ms:g} ms",
            (limit_ms, 0.03),
            xytext=(-4, 0),
            textcoords="offset points",
            rotation=90,
            ha="right",
            va="bottom",
        )
        axis.set_title(name)
        axis.set(xscale="log", xlabel=label, ylim=(0, 1.02))
        axis.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.xaxis.set_minor_formatter(NullFormatter())
        axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    figure.axes[0].set_ylabel("share of requests at most this slow")
    figure.axes[0].legend(loc="upper left")
    return figure


def _draw_ecdf(axis: Any, values: list[float], arm: str) -> None:
    colour = style.ARM_COLOURS.get(arm, style.INK)
    shares = [(index + 1) / len(values) for index in range(len(values))]
    axis.step(values, shares, where="post", color=colour, label=arm)
    axis.plot([percentile(values, 99)], [0.99], marker="o", markersize=5, color=colour, markeredgecolor="white")


def _learning(data: ReportData) -> Figure:
    figure = new_figure(3.2)
    axes = figure.subplots(1, 2, sharex=True, sharey=True)
    values = [value for steps in data.steps.values() for step in steps for value in (step.reward, step.success)]
    top = min(1.02, max(0.6, max((value for value in values if value is not None), default=0.0) + 0.15))
    panels = (("Mean reward of the rollouts", "reward"), ("Success on held-out maps, temperature 1", "success"))
    for axis, (title, field) in zip(axes, panels, strict=True):
        for arm, steps in data.steps.items():
            points = [(step.step, getattr(step, field)) for step in steps if getattr(step, field) is not None]
            if points:
                xs, ys = zip(*points, strict=True)
                colour = style.ARM_COLOURS.get(arm, style.INK)
                axis.plot(xs, ys, marker="o", markersize=3.8, color=colour, label=arm, markeredgecolor="white")
        if data.reference_success is not None:
            axis.axhline(data.reference_success, color=style.LIMIT, linestyle=(0, (4, 2)), linewidth=1.1)
        axis.set_title(title)
        axis.set(xlabel="step", ylim=(0, top))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        _shade_sparse(axis, [step.step for steps in data.steps.values() for step in steps if step.phase == "sparse"])
    if data.reference_success is not None:
        label = f"best fixed sequence of moves {data.reference_success:.2f}"
        axes[1].annotate(
            label,
            (0.01, data.reference_success),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4),
            textcoords="offset points",
        )
    axes[0].legend(loc="upper left")
    return figure


def _shade_sparse(axis: Any, steps: list[int]) -> None:
    if steps:
        axis.axvspan(min(steps) - 0.5, max(steps) + 0.5, color="#eef4f3", zorder=0, linewidth=0)
        axis.annotate(
            "sparse phase",
            (min(steps) - 0.4, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(2, -4),
            textcoords="offset points",
            va="top",
            color=style.MUTED,
        )


def _sync(data: ReportData) -> Figure:
    figure = new_figure(3.2)
    left, right = figure.subplots(1, 2, sharex=True)
    numbers = [version.n for version in data.versions]
    colours = [style.CODEC_COLOURS.get(version.codec, style.MUTED) for version in data.versions]
    sparse = [version.n for version in data.versions if version.phase == "sparse"]
    dense_bytes = max(version.bytes_dense for version in data.versions)
    left.bar(numbers, [version.bytes_sent for version in data.versions], color=colours, width=0.78)
    left.axhline(dense_bytes, color=style.LIMIT, linestyle=(0, (4, 2)), linewidth=1.1)
    left.set_title("Bytes sent, by codec")
    left.set(xlabel="weight version", ylim=(0, dense_bytes * 1.25))
    left.yaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value) if value else "0"))
    left.annotate(
        f"dense {size(dense_bytes)}",
        (numbers[-1] + 0.4, dense_bytes),
        xytext=(0, 4),
        textcoords="offset points",
        ha="right",
    )
    used = [codec for codec in style.CODEC_COLOURS if any(version.codec == codec for version in data.versions)]
    left.legend(
        handles=[Patch(color=style.CODEC_COLOURS[codec], label=codec) for codec in used],
        loc="upper left",
        ncols=3,
        handlelength=1.0,
    )
    right.bar(numbers, [version.changed_fraction for version in data.versions], color=colours, width=0.78)
    right.set_title("Share of the values whose bits changed")
    right.set(xlabel="weight version", ylim=(0, 1.1))
    right.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    for axis in (left, right):
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.grid(visible=False, axis="x")
    _shade_sparse(right, sparse)
    if sparse:
        left.axvspan(min(sparse) - 0.5, max(sparse) + 0.5, color="#eef4f3", zorder=0, linewidth=0)
    return figure


def _completion(data: ReportData) -> Figure:
    figure = new_figure(2.9)
    axis = figure.subplots()
    longest_s = max((ends[-1] for ends in data.completion_s.values() if ends), default=1.0)
    for arm, ends_s in _with_data(data.completion_s).items():
        shares = [(index + 1) / len(ends_s) for index in range(len(ends_s))]
        colour = style.ARM_COLOURS.get(arm, style.INK)
        axis.step([0.0, *ends_s], [0.0, *shares], where="post", color=colour, label=arm)
        axis.plot([ends_s[-1]], [1.0], marker="o", markersize=5, color=colour, markeredgecolor="white")
        axis.annotate(
            f"{ends_s[-1]:.1f} s",
            (ends_s[-1], 1.0),
            xytext=(0, 6),
            textcoords="offset points",
            ha="center",
            color=colour,
        )
    axis.axhline(0.75, color=style.MUTED, linestyle=(0, (1, 2)), linewidth=1.0)
    axis.set(xlabel="modelled seconds from the start of the rollout", ylabel="trajectories done")
    axis.set(ylim=(0, 1.12), xlim=(0, longest_s * 1.04), yticks=[0, 0.25, 0.5, 0.75, 1.0])
    axis.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axis.legend(loc="lower right")
    return figure


def _with_data(series: Mapping[str, tuple[float, ...]]) -> dict[str, list[float]]:
    return {name: sorted(values) for name, values in series.items() if values}
