"""What a long run shows while it goes on: a live panel on a terminal, else one line whenever something ends.

Invariants: the view never writes to the standard output when that is kept for JSON; it draws at most four times a
second whatever the rate of ``update``; leaving the context gives the terminal back as it was.
"""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Self

import attrs
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_DRAWS_PER_S = 4
_STATE_STYLES = {
    "ready": "green",
    "updating": "yellow",
    "stale": "yellow",
    "draining": "yellow",
    "fenced": "red",
    "lost": "red",
}


@attrs.frozen(kw_only=True)
class EngineRow:
    """One engine in the view: name, ``dedicated`` / ``borrowed`` / ``serving``, state, requests running, tokens made."""

    name: str
    kind: str
    state: str
    num_running: int
    num_tokens: int


@attrs.frozen(kw_only=True)
class LiveState:
    """One moment of a run. ``None`` means not measured yet.

    Attributes:
        arm: The arm that runs.
        step: Number of the running step, 0 before the first.
        num_steps: Steps of the arm.
        phase: What goes on, such as ``rollout`` or ``weight sync``.
        reward: Mean reward of the last step.
        success: Success on the held-out maps, last measured.
        engines: The engines, in the order to show them.
        borrowed_fraction: Share of the running turns that borrowed engines have.
        ttft_p99_ms: Serving's P99 time to the first token in this arm so far.
        tpot_p99_ms: Serving's P99 time of a further token in this arm so far.
        slo_ttft_ms: Budget for the first.
        slo_tpot_ms: Budget for the second.
        sync_sent_bytes: Bytes that the last weight sync sent.
        sync_dense_bytes: Bytes of the full weights.
        modelled_s: Modelled seconds of the arm so far.
        wall_s: Wall seconds of the run so far.
    """

    arm: str
    step: int
    num_steps: int
    phase: str
    slo_ttft_ms: float
    slo_tpot_ms: float
    reward: float | None = None
    success: float | None = None
    engines: tuple[EngineRow, ...] = ()
    borrowed_fraction: float | None = None
    ttft_p99_ms: float | None = None
    tpot_p99_ms: float | None = None
    sync_sent_bytes: int | None = None
    sync_dense_bytes: int | None = None
    modelled_s: float = 0.0
    wall_s: float = 0.0


class LiveView:
    """Shows a run; a context manager.

    Args:
        is_json: The standard output is kept for one JSON object, so lines go to the standard error.
        console: Where to draw instead, for tests.
    """

    def __init__(self, *, is_json: bool = False, console: Console | None = None) -> None:
        self._console = console or Console(file=sys.stderr if is_json else sys.stdout, highlight=False)
        self._live = (
            Live(console=self._console, auto_refresh=True, refresh_per_second=_DRAWS_PER_S, transient=True)
            if self._console.is_terminal and not is_json
            else None
        )
        self._pending: LiveState | None = None

    def update(self, state: LiveState) -> None:
        """Show a state: the panel follows at its own rate; lines come when a step is over, and for each phase before the first."""
        if self._live is not None:
            self._live.update(panel(state))
            return
        pending = self._pending
        is_new = pending is None or (pending.arm, pending.step) != (state.arm, state.step)
        if is_new:
            self._print_pending()
        if state.step == 0 and (is_new or pending is None or pending.phase != state.phase):
            self._print(line(state))
        self._pending = state

    def log(self, message: str) -> None:
        """Print a line that stays, above the panel where there is one."""
        self._print(message)

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop drawing and give the terminal back."""
        if self._live is not None:
            self._live.stop()
        self._print_pending()

    def _print_pending(self) -> None:
        if self._pending is not None and self._pending.step > 0:
            self._print(line(self._pending))
        self._pending = None

    def _print(self, text: str) -> None:
        self._console.print(Text(text), soft_wrap=True)


def line(state: LiveState) -> str:
    """Return a state as one line, the parts that are not known yet left out."""
    parts = [f"[{state.wall_s:6.1f} s] {state.arm} step {state.step}/{state.num_steps} {state.phase}"]
    if state.reward is not None:
        parts.append(f"reward {state.reward:.2f}")
    if state.success is not None:
        parts.append(f"success {state.success:.2f}")
    if state.borrowed_fraction is not None:
        parts.append(f"borrowed {state.borrowed_fraction:.0%}")
    if state.ttft_p99_ms is not None:
        parts.append(f"TTFT P99 {state.ttft_p99_ms:.0f}/{state.slo_ttft_ms:g} ms")
    if state.tpot_p99_ms is not None:
        parts.append(f"TPOT P99 {state.tpot_p99_ms:.0f}/{state.slo_tpot_ms:g} ms")
    return ", ".join(parts)


def panel(state: LiveState) -> RenderableType:
    """Return a state as the live panel."""
    head = Table.grid(padding=(0, 2))
    head.add_row(
        Text(f"step {state.step}/{state.num_steps}", style="bold"),
        ProgressBar(total=max(1, state.num_steps), completed=state.step, width=28, complete_style="magenta"),
        Text(state.phase, style="cyan"),
        Text(f"{state.modelled_s:.0f} s (wall {state.wall_s:.0f} s)", style="dim"),
    )
    body = Columns([_engines(state), _figures(state)], padding=(0, 3))
    return Panel(Group(head, Text(""), body), title=f"rose demo: {state.arm} arm", title_align="left", expand=False)


def _engines(state: LiveState) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("engine", "kind", "state"):
        table.add_column(name)
    for name in ("running", "tokens"):
        table.add_column(name, justify="right")
    for engine in state.engines:
        state_text = Text(engine.state, style=_STATE_STYLES.get(engine.state, ""))
        table.add_row(engine.name, engine.kind, state_text, f"{engine.num_running}", f"{engine.num_tokens:,}")
    return table


def _figures(state: LiveState) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_row("reward", _value(state.reward, ".2f"))
    table.add_row("success, held-out", _value(state.success, ".2f"))
    table.add_row("borrowed share", _value(state.borrowed_fraction, ".0%"))
    table.add_row("serving TTFT P99", _against(state.ttft_p99_ms, state.slo_ttft_ms))
    table.add_row("serving TPOT P99", _against(state.tpot_p99_ms, state.slo_tpot_ms))
    table.add_row("last sync", _sync(state))
    return table


def _value(value: float | None, form: str) -> Text:
    return Text("-" if value is None else format(value, form))


def _against(value_ms: float | None, limit_ms: float) -> Text:
    if value_ms is None:
        return Text(f"- / {limit_ms:g} ms")
    return Text(f"{value_ms:.0f} / {limit_ms:g} ms", style="green" if value_ms <= limit_ms else "red")


def _sync(state: LiveState) -> Text:
    if state.sync_sent_bytes is None or not state.sync_dense_bytes:
        return Text("-")
    return Text(f"{state.sync_sent_bytes / 1e3:,.0f} kB, {state.sync_sent_bytes / state.sync_dense_bytes:.0%} of dense")
