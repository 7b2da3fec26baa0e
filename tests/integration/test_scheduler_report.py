from __future__ import annotations

import json

import attrs
import pytest

from rose.bench.scheduler import report
from rose.bench.scheduler.settings import SECTIONS, SchedulerSettings
from rose.errors import EngineLostError

ISSUE_KEYS = {
    "decisions_per_s",
    "p99_us",
    "bytes_per_trajectory",
    "gateway",
    "inprocess_added_p99_ms",
    "dead_server",
    "affinity_kept_fraction",
}


@pytest.fixture(scope="module")
def quick():
    """A report of all sections that need no other process."""
    sections = tuple(name for name in SECTIONS if name != "gateway")
    return report.run(attrs.evolve(SchedulerSettings().quick(), only=sections), lambda text: None)


def test_every_key_is_there_and_plain(quick):
    assert set(quick) >= ISSUE_KEYS | {"machine", "versions", "commit", "schema", "date"}
    assert json.loads(json.dumps(quick, allow_nan=False)) == quick


def test_sections_bring_their_figures(quick):
    assert set(quick["decisions_per_s"]) == set(quick["p99_us"]) == {"8", "64"}
    assert quick["growth"] == pytest.approx(1.0)
    assert quick["bytes_per_trajectory"] > 0
    assert 0.0 <= quick["affinity_kept_fraction"] <= 1.0
    assert quick["dead_server"]["lost"] == 0
    assert quick["failed"] == {}
    assert set(quick["section_s"]) == set(SECTIONS) - {"gateway"}


def test_what_was_not_asked_for_is_null_and_said(quick):
    assert quick["gateway"] is None
    assert quick["skipped"]["gateway"] == "not asked for"


def test_a_section_that_fails_leaves_the_others(monkeypatch):
    def fail(settings, tell):
        message = "an engine is gone"
        raise EngineLostError(message)

    monkeypatch.setattr(report, "measure_gateway", fail)
    monkeypatch.setattr(report, "measure_dead_http", lambda settings, tell: {})
    settings = attrs.evolve(SchedulerSettings().quick(), only=("dead-server", "gateway"))

    found = report.run(settings, lambda text: None)

    assert found["failed"] == {"gateway": "an engine is gone"}
    assert found["gateway"] is None
    assert found["dead_server"]["requests"] == 400


def test_routers_that_are_absent_are_skipped_by_name(monkeypatch):
    rows = {"gateway": {"direct": {}}, "skipped": {"vllm-router": "absent"}}
    monkeypatch.setattr(report, "router_versions", lambda folder: {"smg": "1"})
    monkeypatch.setattr(report, "measure_gateway", lambda settings, tell: rows)

    found = report.run(attrs.evolve(SchedulerSettings().quick(), only=("gateway",)), lambda text: None)

    assert found["skipped"]["vllm-router"] == "absent"
    assert found["versions"]["smg"] == "1"


def test_quick_keeps_what_was_asked():
    settings = SchedulerSettings(only=("memory",), seed=7).quick()

    assert (settings.only, settings.seed) == (("memory",), 7)
    assert settings.num_turns < SchedulerSettings().num_turns


def test_unknown_sections_are_refused():
    with pytest.raises(ValueError, match="only"):
        SchedulerSettings(only=("speed",))
