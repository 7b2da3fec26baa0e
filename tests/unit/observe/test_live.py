from __future__ import annotations

import io

import attrs
import pytest
from rich.console import Console

from rose.observe.live import EngineRow, LiveState, LiveView, line, panel

STATE = LiveState(
    arm="rose", step=7, num_steps=16, phase="rollout", slo_ttft_ms=500, slo_tpot_ms=150, reward=0.31, success=0.29,
    engines=(
        EngineRow(name="dedicated-0", kind="dedicated", state="ready", num_running=16, num_tokens=12_345),
        EngineRow(name="borrowed-0", kind="borrowed", state="updating", num_running=3, num_tokens=678),
    ),
    borrowed_fraction=0.42, ttft_p99_ms=139.0, tpot_p99_ms=162.0, sync_sent_bytes=30_000, sync_dense_bytes=600_000,
    modelled_s=120.0, wall_s=245.5,
)  # fmt: skip


def plain_console(**options):
    return Console(file=io.StringIO(), width=120, **options)


def drawn(state):
    console = plain_console()
    console.print(panel(state))
    return console.file.getvalue()


def test_the_panel_shows_progress_engines_and_serving_against_the_slo():
    text = drawn(STATE)
    for part in (
        "rose arm",
        "step 7/16",
        "rollout",
        "dedicated-0",
        "updating",
        "12,345",
        "42%",
        "139 / 500 ms",
        "5% of dense",
    ):
        assert part in text


def test_what_is_not_known_yet_is_a_hyphen():
    text = drawn(LiveState(arm="fixed", step=0, num_steps=2, phase="warm start", slo_ttft_ms=500, slo_tpot_ms=150))
    assert "- / 500 ms" in text
    assert "None" not in text


def test_a_line_leaves_out_what_is_not_known():
    bare = LiveState(arm="fixed", step=0, num_steps=2, phase="warm start", slo_ttft_ms=500, slo_tpot_ms=150, wall_s=3.0)
    assert line(bare) == "[   3.0 s] fixed step 0/2 warm start"
    assert "TTFT P99 139/500 ms" in line(STATE)


def test_without_a_terminal_there_is_one_line_a_step_with_its_last_figures():
    console = plain_console()
    with LiveView(console=console) as view:
        for reward in (None, 0.1, 0.2):
            view.update(attrs.evolve(STATE, step=1, reward=reward))
        view.update(attrs.evolve(STATE, step=2, reward=0.3))
    lines = console.file.getvalue().splitlines()
    assert len(lines) == 2
    assert "step 1/16" in lines[0]
    assert "reward 0.20" in lines[0]
    assert "reward 0.30" in lines[1]


def test_before_the_first_step_each_phase_has_its_line_at_once():
    console = plain_console()
    view = LiveView(console=console)
    for phase in ("starting engines", "starting engines", "warm start"):
        view.update(attrs.evolve(STATE, step=0, phase=phase))
    assert [text.count("step 0/16") for text in console.file.getvalue().splitlines()] == [1, 1]
    assert "warm start" in console.file.getvalue()


def test_with_json_lines_go_to_the_standard_error(capsys):
    with LiveView(is_json=True) as view:
        view.update(STATE)
        view.log("a note [in brackets]")
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "step 7/16" in captured.err
    assert "a note [in brackets]" in captured.err


def test_on_a_terminal_the_panel_is_drawn_and_taken_away_again():
    console = plain_console(force_terminal=True)
    with LiveView(console=console) as view:
        view.update(STATE)
        view.log("a line that stays")
    text = console.file.getvalue()
    assert "\x1b[?25l" in text
    assert text.rstrip().endswith("\x1b[2K")
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l")
    assert "a line that stays" in text


def test_the_terminal_is_given_back_when_the_run_fails():
    console = plain_console(force_terminal=True)

    def fail():
        with LiveView(console=console) as view:
            view.update(STATE)
            message = "boom"
            raise RuntimeError(message)

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    assert "\x1b[?25h" in console.file.getvalue()
