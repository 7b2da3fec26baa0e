"""What ``rose simulate`` shows: progress while it runs, tables of the result at its end, made from the result alone."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rose.simulation.study import StudyProgress

MISSING = "-"

_NUM_LINES = 10
_HEADS = ("strategy", "step", "rollout", "gain", "TTFT", "TPOT", "over", "lent", "$")
_GAIN = 3
_ALONE = "(alone)"


class StudyView:
    """Shows how far a study is, on the standard error; a context manager.

    A terminal gets a bar; anything else a line at the start and at each tenth.

    Args:
        console: Where to draw instead, for tests.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr, highlight=False)
        self._bar = _bar(self._console) if self._console.is_terminal else None
        self._task = None if self._bar is None else self._bar.add_task("cases", total=None)
        self._began_s = time.monotonic()
        self._tenth = -1

    def update(self, progress: StudyProgress) -> None:
        """Show a state."""
        if self._bar is not None and self._task is not None:
            text = "cases" if progress.last is None else str(progress.last)
            self._bar.update(self._task, completed=progress.num_done, total=progress.num_total, description=text)
            return
        tenth = progress.num_done * _NUM_LINES // max(1, progress.num_total)
        if tenth > self._tenth:
            self._tenth = tenth
            text = f"[{time.monotonic() - self._began_s:6.1f} s] {progress_line(progress)}"
            self._console.print(Text(text), soft_wrap=True)

    def log(self, message: str) -> None:
        """Print a line that stays."""
        self._console.print(Text(message), soft_wrap=True)

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and give the terminal back."""
        if self._bar is not None:
            self._bar.stop()


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
    )


def progress_line(progress: StudyProgress) -> str:
    """Return a state as one line."""
    parts = [f"{progress.num_done} of {progress.num_total} cases"]
    if progress.num_reused:
        parts.append(f"{progress.num_reused} from an earlier run")
    if progress.num_failed:
        parts.append(f"{progress.num_failed} failed")
    if progress.last is not None:
        parts.append(f"last {progress.last}")
    return "; ".join(parts)


def study_table(result: Mapping[str, Any]) -> RenderableType:
    """Return a result for the terminal: strategies, bounds, the sweep.

    Args:
        result: As ``rose.simulation.results.build_result`` gives it.
    """
    parts: list[RenderableType] = [Text(_headline(result)), Text(""), _strategies(result), Text(_bounds(result))]
    beside = _beside_serving(result)
    if beside is not None:
        parts += [Text("\nwhat serving's users saw, alone -> beside rollouts, over the same phases (ms)"), beside]
    sweep = result.get("sweep")
    if sweep is not None:
        for figure, title, show in (
            ("end_to_end_gain", "gain", _times),
            ("violations_fraction", "over the SLO", _share),
        ):
            parts += [Text(f"\n{title} by {sweep['axis']}"), _sweep(sweep, result["strategies"], figure, show)]
    return Group(*parts)


def plain_table(heads: Sequence[str], rows: Sequence[Sequence[str | Text]], *, strong: int | None = None) -> Table:
    """Return a table without lines; all columns but the first are aligned to the right."""
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for index, head in enumerate(heads):
        justify = "left" if index == 0 else "right"
        table.add_column(head, justify=justify, style="bold" if index == strong else "", no_wrap=True)  # type: ignore[arg-type]
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def _headline(result: Mapping[str, Any]) -> str:
    cluster, fixed = result["scenario"]["config"]["cluster"], result["fixed"]
    num_seeds = len(result["seeds"])
    return (
        f"{result['scenario']['name']}: {cluster['rollout_gpus']} + {cluster['training_gpus']} GPUs, up to "
        f"{cluster['borrowed_gpus']} borrowed; mean of {num_seeds} {'seed' if num_seeds == 1 else 'seeds'}\n"
        f"fixed: rollout {_share(fixed['rollout_share'])} of a step, "
        f"P75 of trajectories done at {_share(fixed['p75_fraction'])} of it"
    )


def _strategies(result: Mapping[str, Any]) -> Table:
    serving = result["scenario"]["config"]["serving"]
    rows = [_row(name, result[name], serving) for name in result["strategies"]]
    alone = result["serving_alone"]
    if alone is not None:
        rows.append(_row(_ALONE, alone, serving))
    return plain_table(_HEADS, rows, strong=_GAIN)


def _row(name: str, table: Mapping[str, Any], serving: Mapping[str, Any]) -> list[str | Text]:
    return [
        name,
        _number(table.get("step_s")),
        _number(table.get("rollout_s")),
        _with_spread(table, "end_to_end_gain"),
        _against(table.get("ttft_p99_ms"), serving["ttft_slo_s"]),
        _against(table.get("tpot_p99_ms"), serving["tpot_slo_s"]),
        _share(table.get("violations_fraction")),
        _share(table.get("borrowed_fraction")),
        _number(table.get("cost_dollars")),
    ]


_LATENCIES = (("TTFT P50", "ttft_p50_ms"), ("P99", "ttft_p99_ms"), ("TPOT P50", "tpot_p50_ms"), ("P99", "tpot_p99_ms"))


def _beside_serving(result: Mapping[str, Any]) -> Table | None:
    """Return serving's latency without and with each strategy, ``None`` where no strategy runs beside it."""
    rows = [
        [name, *(_step(table, figure) for _, figure in _LATENCIES)]
        for name in result["strategies"]
        if (table := result.get(name)) and table.get("alone_ttft_p99_ms") is not None
    ]
    return plain_table(["", *(head for head, _ in _LATENCIES)], rows) if rows else None


def _step(table: Mapping[str, Any], figure: str) -> str:
    return f"{_number(table[f'alone_{figure}'])} -> {_number(table[figure])}"


def _bounds(result: Mapping[str, Any]) -> str:
    return (
        "step, rollout: s; gain: over fixed, with standard deviation; TTFT, TPOT: P99, ms\n"
        "over: requests over the SLO; lent: tokens made on borrowed GPUs; $: of a step\n"
        f"bounds of the gain: {_times(result['floor_gain'])} with a rollout as short as its longest trajectory\n"
        f"({_number(result['floor_s'])} s alone), {_times(result['amdahl_gain'])} by Amdahl's law"
    )


def _sweep(sweep: Mapping[str, Any], names: Sequence[str], figure: str, show: Callable[[float | None], str]) -> Table:
    heads = ("strategy", *(_value(point["value"]) for point in sweep["points"]))
    rows = [[name, *(show(point[name].get(figure)) for point in sweep["points"])] for name in names]
    return plain_table(heads, rows)


def _with_spread(table: Mapping[str, Any], figure: str) -> str:
    if table.get(figure) is None:
        return MISSING
    return f"{table[figure]:.2f}±{table['spread'][figure]['sd']:.2f}"


def _value(value: float | str | None) -> str:
    return f"{value:g}" if isinstance(value, int | float) else str(value)


def _number(value: float | None) -> str:
    if value is None:
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.1f}"  # noqa: PLR2004 - three digits


def _times(value: float | None) -> str:
    return MISSING if value is None else f"{value:.2f}x"


def _share(value: float | None) -> str:
    return MISSING if value is None else f"{value:.1%}"


def _against(value_ms: float | None, slo_s: float) -> Text:
    if value_ms is None:
        return Text(MISSING)
    return Text(_number(value_ms), style="red" if value_ms > slo_s * 1e3 else "")
