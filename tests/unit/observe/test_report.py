from __future__ import annotations

import re
import subprocess
import sys
from html.parser import HTMLParser

import attrs
import pytest
from synthetic_run import ROSE, figures, report_data

from rose.errors import BackendUnavailableError, ConfigError
from rose.observe.report import write_report
from rose.observe.report.page import render
from rose.observe.summary import build_summary

VOID = {"meta", "br", "path", "use", "rect", "line", "circle"}


class Outline(HTMLParser):
    """Checks that elements nest and collects ids and headings."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.headings, self.images = [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.images += [found.get("aria-label")] if found.get("role") == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] in {"h1", "h2"}:
            self.headings.append(text)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, report_data())
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outline(page):
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def test_the_file_names_nothing_outside_itself(page):
    assert not re.search(r"https?://|<script|<link|@import|src=", page)
    references = re.findall(r"""(?:href="|url\()([^")]*)""", page)
    assert references
    assert all(reference.startswith("#") for reference in references)


def test_ids_are_unique_over_all_figures_and_every_reference_has_its_target(page, outline):
    assert len(outline.ids) == len(set(outline.ids))
    assert set(re.findall(r"""(?:href="|url\()#([^")]*)""", page)) <= set(outline.ids)


def test_all_six_figures_are_there_with_a_text_that_stands_for_them(outline, page):
    assert page.count("<svg") == 6
    assert len(outline.images) == 6
    assert all(len(text) > 40 for text in outline.images)


def test_titles_say_the_finding(outline):
    assert outline.headings[0] == "FrozenLake GRPO on 2 dedicated and 2 borrowed GPUs"
    assert "Borrowed GPUs raise rollout throughput 1.46x" in outline.headings
    assert any(title.startswith("Serving stays within its SLO: TTFT P99") for title in outline.headings)
    assert "The policy learns: success +0.30 with borrowed GPUs, +0.32 without" in outline.headings
    assert "Weight sync: 100.0 % of dense in the learn phase, 4.9 % of dense in the sparse phase" in outline.headings


def test_a_disturbed_run_says_so_first():
    page = render(report_data(invalid_reasons=("rate error 3.1 % over 1 %",)), {})
    assert "Invalid, repeat" in page
    assert "rate error 3.1 % over 1 %" in page
    assert "Valid run" not in page


def test_a_bad_result_is_told_as_one():
    slow = attrs.evolve(ROSE, rollout_tokens_per_s=1500.0, success_last=0.05)
    page = render(report_data(rose=slow, is_bit_exact=False), {"learning": "<svg></svg>"})
    assert "Borrowed GPUs do not pay here" in page
    assert "The policy does not learn" in page
    assert "do not trust this run" in page
    assert 'class="value bad">0.92x' in page


def test_a_broken_slo_is_told_from_one_that_serving_breaks_alone():
    data = report_data()
    for alone_ms, title in ((100.0, "Serving breaks its SLO"), (700.0, "Serving is over its SLO even alone")):
        summary = build_summary(figures())
        summary["serving"]["alone"]["ttft_p99_ms"] = alone_ms
        summary["serving"]["shared"]["ttft_p99_ms"] = 800.0
        assert title in render(attrs.evolve(data, summary=summary), {})


def test_text_from_outside_is_escaped():
    page = render(attrs.evolve(report_data(), title="<b>&", assumptions=('a "<i>"',)), {})
    assert "<h1>&lt;b&gt;&amp;</h1>" in page
    assert "<i>" not in page


def test_a_run_that_measured_little_still_gives_a_report(tmp_path):
    bare = attrs.evolve(ROSE, success_first=None, success_last=None)
    data = attrs.evolve(
        report_data(
            fixed=bare, rose=bare, ungated=None, serving_ungated=None, uncapped_tokens_per_s=None, versions=()
        ),
        strips=(), busy=(), latency={}, steps={"fixed": (), "rose": ()}, versions=(), completion_s={},
        reference_success=None, assumptions=(),
    )  # fmt: skip
    write_report(tmp_path / "report.html", data)
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<svg" not in page
    assert "None" not in page


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "rose.observe.report.figures", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"rose-rl\[demo\]"):
        write_report(tmp_path / "report.html", report_data())


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        write_report(tmp_path / "missing" / "report.html", report_data())


def test_the_report_is_imported_without_matplotlib():
    code = "import sys, rose.observe.report, rose.observe.live; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
