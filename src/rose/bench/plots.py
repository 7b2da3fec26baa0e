"""Three figures of one result: bytes against density, time against link rate, time line of one sync."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from rose.bench.figure_files import save_figure

_PEERS = {
    "coo32_bytes": "COO32",
    "xor_zstd1_bytes": "XOR + zstd-1",
    "gap_value_zstd1_bytes": "gap + value + zstd-1",
    "blocks_bytes": "changed blocks",
}


def draw_plots(out: Path, result: Mapping[str, Any]) -> tuple[Path, ...]:
    """Draw what the result has the figures for; returns the files (SVG)."""
    drawn = []
    for name, draw, has in (
        ("bytes", _draw_bytes, bool(result.get("density"))),
        ("links", _draw_links, bool(result.get("links"))),
        ("timeline", _draw_timeline, any(row["spans"] for row in result.get("links", {}).values())),
    ):
        if has:
            drawn.append(save_figure(out / f"transfer-{name}.svg", partial(draw, result=result)))
    return tuple(drawn)


def _draw_bytes(axes: Axes, result: Mapping[str, Any]) -> None:
    rows = result["density"]
    shares = [row["changed_fraction"] for row in rows]
    changed = [row["num_changed"] for row in rows]
    axes.plot(
        shares, [row["rose_bytes"] / n for row, n in zip(rows, changed, strict=True)], "o-", label="rose", linewidth=2.5
    )
    axes.plot(shares, [row["entropy_bytes_per_changed"] for row in rows], "k--", label="entropy bound")
    for key, label in _PEERS.items():
        axes.plot(shares, [row[key] / n for row, n in zip(rows, changed, strict=True)], ".-", label=label, alpha=0.8)
    axes.set(xscale="log", yscale="log", xlabel="share of changed elements", ylabel="bytes a changed element")
    axes.set_title(f"{result['model']}: bytes against density")
    axes.legend()


def _draw_links(axes: Axes, result: Mapping[str, Any]) -> None:
    rows = [(float(rate), row) for rate, row in result["links"].items()]
    for how, marker in (("measured", "o"), ("computed", "x")):
        chosen = [(rate, row) for rate, row in rows if row["how"] == how]
        axes.plot(
            [rate for rate, _ in chosen], [row["sync_s"] for _, row in chosen], f"C0{marker}", label=f"rose, {how}"
        )
        paper = [(rate, row["paper_sync_s"]) for rate, row in chosen if row["paper_sync_s"] is not None]
        axes.plot(
            [rate for rate, _ in paper], [time_s for _, time_s in paper], f"C1{marker}", label=f"COO32 buckets, {how}"
        )
    axes.plot(
        [rate for rate, _ in rows],
        [max(row["codec_s"], row["wire_s"]) for _, row in rows],
        "k:",
        label="longer of codec and wire",
    )
    axes.set(xscale="log", yscale="log", xlabel="link, Gbps", ylabel="sync, s")
    axes.set_title(f"{result['model']} ({result['sampled_fraction']:.1%} of it): time against link rate")
    axes.legend()


def _draw_timeline(axes: Axes, result: Mapping[str, Any]) -> None:
    rate, row = next((rate, row) for rate, row in result["links"].items() if row["spans"])
    names = list(dict.fromkeys(name for name, _, _ in row["spans"]))
    for name, begin_s, end_s in row["spans"]:
        at = names.index(name)
        axes.barh(at, end_s - begin_s, left=begin_s, height=0.6, color=f"C{at}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set(xlabel="s since the publish began")
    axes.set_title(f"{result['model']}: one sync at {rate} Gbps ({row['how']})")
