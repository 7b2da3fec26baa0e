"""The tables that ``rose demo`` prints at its end, made from the summary alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from rose.observe.summary import Row, comparison_rows, is_over_slo, serving_rows, sync_rows

_SYNC_HEADS = ("sync", "lr", "versions", "changed", "codec", "dense", "sent", "share", "stage", "pause")


def demo_table(summary: Mapping[str, Any]) -> RenderableType:
    """Return what the run showed: the verdict, fixed against rose, serving latency, weight sync, borrowing.

    Args:
        summary: The object of ``summary.json``.
    """
    return Group(
        _verdict(summary),
        Text(""),
        _table(("", "fixed", "rose", "rose/fixed"), comparison_rows(summary), strong=3),
        Text(""),
        _table(("serving", "alone", "shared", "shared/alone", "ungated", "SLO"), serving_rows(summary), strong=2),
        Text(""),
        _table(_SYNC_HEADS, sync_rows(summary), strong=7),
        Text(""),
        _closing(summary),
    )


def _table(heads: Sequence[str], rows: Sequence[Row], *, strong: int) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        table.add_column(
            head, justify="left" if index == 0 else "right", style="bold" if index == strong else "", no_wrap=True
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    return table


def _verdict(summary: Mapping[str, Any]) -> Text:
    taken = f" ({summary['device']}, k={summary['k']:g}; times are modelled seconds)"
    if summary["valid"]:
        return Text.assemble(("valid run", "bold green"), taken)
    reasons = "; ".join(summary.get("invalid_reasons") or ["pacing was disturbed"])
    return Text.assemble(("invalid, repeat: ", "bold red"), reasons, taken)


def _closing(summary: Mapping[str, Any]) -> Text:
    gain, borrowed = summary["gain"], summary["borrowed"]
    over_uncapped = gain.get("rollout_throughput_over_uncapped")
    beside = f" ({over_uncapped:.2f}x over fixed without its slot cap)" if over_uncapped is not None else ""
    slo = ("broken", "bold red") if is_over_slo(summary, "shared") else ("kept", "bold green")
    exact = ("bit-exact", "bold green") if summary["sync"]["bit_exact"] else ("NOT bit-exact", "bold red")
    return Text.assemble(
        f"rollout throughput {gain['rollout_throughput']:.2f}x{beside}, steps {gain['step_time']:.2f}x as fast; serving SLO ",
        slo,
        "; weights ",
        exact,
        f"; borrowed: {borrowed['turns']:,} turns, {borrowed['evicted']:,} evicted, {borrowed['rerouted']:,} rerouted, "
        f"{borrowed['device_seconds']:,.0f} device seconds",
    )
