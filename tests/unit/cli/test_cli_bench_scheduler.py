from __future__ import annotations

import json

import pytest
from rich.console import Console

from rose.bench.scheduler import report
from rose.cli.bench_scheduler import scheduler_tables
from rose.cli.main import main

RUN = ["bench", "scheduler"]


@pytest.fixture(autouse=True)
def here(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def seen(monkeypatch):
    """The settings of the run that was asked for, which is not made."""
    found = []

    def run(settings, tell):
        found.append(settings)
        return {**dict.fromkeys(report.KEYS), "skipped": {}, "failed": {}}

    monkeypatch.setattr(report, "run", run)
    return found


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--only", "speed"], "--only: there is no 'speed'; choose of decisions, memory, affinity, in-process"),
        (["--peers", "nowhere"], "--peers: nowhere is no folder"),
        (["--peers", ""], "--peers is empty"),
        (["--rate", "0"], "'0' is not a number above 0"),
        (["--rounds", "0"], "'0' is not a whole number >= 1"),
    ],
)
def test_a_wrong_argument_is_explained(arguments, complaint, capsys):
    with pytest.raises(SystemExit):
        raise SystemExit(main([*RUN, *arguments]))
    assert complaint in capsys.readouterr().err


def test_options_reach_the_run(seen, here, capsys):
    assert main([*RUN, "--only", "gateway,memory", "--peers", str(here), "--rate", "20", "--rounds", "2"]) == 0

    (settings,) = seen
    assert settings.only == ("memory", "gateway")
    assert settings.peers == str(here)
    assert (settings.rate_per_s, settings.num_rounds) == (20.0, 2)
    assert settings.num_turns > 1000


def test_quick_is_small_and_keeps_other_options(seen, capsys):
    assert main([*RUN, "--quick", "--rounds", "3", "--seed", "5"]) == 0

    (settings,) = seen
    assert (settings.num_rounds, settings.seed, settings.num_turns) == (3, 5, 300)


def test_json_is_one_object_and_a_file(here, capsys):
    assert main([*RUN, "--only", "affinity", "--quick", "--json", "--out", "out"]) == 0

    printed = json.loads(capsys.readouterr().out)
    assert 0.0 <= printed["affinity_kept_fraction"] <= 1.0
    assert json.loads((here / "out" / "scheduler.json").read_text(encoding="utf-8")) == printed


ROW = {"num_engines": 8, "num_trajectories": 96, "num_waiting": 1, "decisions_per_s": 54321.0, "decision_p50_us": 1.0}
COSTS = {**ROW, "decision_p99_us": 99.5, "turns_per_s": 1234.0}
WAY = {
    "baseline": "direct",
    "turns_per_s": 70.0,
    "p50_ms": 20.25,
    "p99_ms": 30.0,
    "added_p50_ms": 0.75,
    "added_p99_ms": 1.5,
    "between_cpu_ms": 0.5,
    "client_cpu_ms": 1.0,
}
HOLE = {"requests": 400, "lost": 0, "sent_to_dead": 3}
FOUND = {
    **dict.fromkeys(report.KEYS),
    "by_engines": [COSTS],
    "by_trajectories": [],
    "gateway": {"rose": WAY},
    "bytes_per_trajectory": 4664.0,
    "dead_server": {
        **HOLE,
        "burst": HOLE,
        "verl_like": {**HOLE, "lost": 397},
        "http": {"smg": {**HOLE, "sent_to_dead": 77}},
    },
    "skipped": {"smg": "there is no smg", "affinity": "not asked for"},
    "failed": {},
}


def test_the_tables_show_what_was_measured(capsys):
    Console(width=120).print(scheduler_tables(FOUND))

    shown = capsys.readouterr().out
    for part in (
        "54321",
        "99.5",
        "0.75",
        "4664 bytes",
        "dead server, rose: 0 of 400 lost, 3 sent to it",
        "397 of 400",
        "77 sent",
    ):
        assert part in shown
    assert "smg: not measured, there is no smg" in shown
    assert "not asked for" not in shown


def test_drawings_are_made_of_what_there_is(tmp_path):
    drawings = pytest.importorskip("rose.bench.scheduler.drawings", reason="needs matplotlib", exc_type=ImportError)

    names = [path.name for path in drawings.draw_plots(tmp_path, FOUND)]

    assert names == ["scheduler-by-engines.svg", "scheduler-gateway.svg"]
    assert drawings.draw_plots(tmp_path, dict.fromkeys(report.KEYS)) == ()
