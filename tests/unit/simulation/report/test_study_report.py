from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest
from synthetic_study import problem_sweep, strategy, study_result, sweep

from rose.errors import BackendUnavailableError, ConfigError
from rose.simulation.report import write_reproduction_report, write_study_report

VOID = {"meta", "br", "path", "use", "rect", "line", "circle"}
HERE = str(Path(__file__).parent)
LIMIT_BYTES = 2_000_000


class Outline(HTMLParser):
    """Checks that elements nest and collects ids, headings and texts that stand for figures."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.headings, self.images = [], [], [], []

    def handle_starttag(self, tag, attributes):
        found = dict(attributes)
        self.ids += [found["id"]] if "id" in found else []
        self.images += [found.get("aria-label")] if found.get("role") == "img" else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.ids += [value for name, value in attributes if name == "id"]

    def handle_endtag(self, tag):
        if tag not in VOID:
            assert self.open.pop() == tag

    def handle_data(self, text):
        if self.open and self.open[-1] in {"h1", "h2"}:
            self.headings.append(text)


def outline_of(page):
    parser = Outline()
    parser.feed(page)
    assert parser.open == []
    return parser


def written(tmp_path, result):
    write_study_report(tmp_path / "report.html", result)
    return (tmp_path / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Two chapters, the first with two sweeps."""
    path = tmp_path_factory.mktemp("report") / "report.html"
    base = study_result()
    results = [{**base, "sweep": sweep("borrowed", "GPUs", [0, 1, 4, 16])}, {**base, "sweep": problem_sweep([4, 16])}]
    write_reproduction_report(path, [*results, study_result(["paper"], name="alfworld-32b-grpo")])
    return path.read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def outline(page):
    return outline_of(page)


def test_the_file_names_nothing_outside_itself(page):
    assert not re.search(r"https?://|<script|<link|@import|src=", page)
    references = re.findall(r"""(?:href="|url\()([^")]*)""", page)
    assert references
    assert all(reference.startswith("#") for reference in references)


def test_ids_are_unique_and_every_reference_has_its_target(page, outline):
    assert len(outline.ids) == len(set(outline.ids))
    assert set(re.findall(r"""(?:href="|url\()#([^")]*)""", page)) <= set(outline.ids)


def test_every_class_of_a_figure_is_defined_once(page):
    used = set(re.findall(r'<(?:path|use|text|g)[^>]* class="([^"]*)"', page))
    defined = re.findall(r"\.([\w-]+-c\d+)\{", page)
    assert used
    assert used == set(defined)
    assert len(defined) == len(set(defined))


def test_every_figure_has_a_text_that_stands_for_it(page, outline):
    assert page.count("<svg") == len(outline.images) == 1 + 6 + 2 + 6
    assert all(len(text) > 40 for text in outline.images)


def test_titles_say_the_finding(outline):
    assert outline.headings[:2] == ["The paper's evaluation, simulated", "End-to-end gain by preset"]
    assert outline.headings[2] == "frozenlake-8b-grpo"
    assert "default makes a step 1.57x as fast as fixed" in outline.headings
    assert "Rollout time 696 s fixed, 405 s under default" in outline.headings
    assert "default keeps serving's SLO: TTFT P99 321 ms, TPOT P99 128 ms" in outline.headings
    assert "A step costs 17% less under default than fixed" in outline.headings
    assert "Growth with borrowed GPUs" in outline.headings


def test_what_was_not_drawn_is_listed_with_its_reason(page):
    assert "sensitivity to the link: no sweep over link in the result" in page
    assert page.count("growth with borrowed GPUs: no sweep over borrowed in the result") == 1


def test_a_new_strategy_is_in_every_figure_and_table_by_being_named(tmp_path):
    def with_new(table):
        return {**table, "brand-new": strategy("default")}

    swept = sweep("load", "", [0.1, 0.9], ["paper"])
    swept["points"] = [with_new(point) for point in swept["points"]]
    result = {**with_new(study_result(["paper"])), "strategies": ["fixed", "paper", "brand-new"], "sweep": swept}
    result["brand-new"]["sync_by_version_s"] = [1.0]
    text = written(tmp_path, result)
    drawn = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(drawn) == 7
    assert all("brand-new" in svg for svg in drawn)
    tables = [table for table in re.findall(r"<table>.*?</table>", text, re.DOTALL) if "paper</td>" in table]
    assert len(tables) == 3
    assert all("brand-new" in table for table in tables)


@pytest.mark.parametrize("names", [["paper"], ["spot"], []])
def test_a_single_strategy_or_none_gives_a_report(tmp_path, names):
    text = written(tmp_path, study_result(names, seeds=1))
    outline_of(text)
    assert "frozenlake-8b-grpo" in text
    assert "1 seed;" in text
    assert "None" not in text


def test_a_result_without_any_figure_gives_a_report_that_says_why(tmp_path):
    result = {"scenario": {"name": "own"}, "strategies": ["paper"], "paper": {"step_s": None}}
    text = written(tmp_path, result)
    assert "<svg" not in text
    assert "rollout time: no strategy has rollout_s or step_s" in text
    assert "None" not in text


def test_every_figure_may_be_missing(tmp_path):
    figures = [
        name for name in study_result(["paper"])["paper"] if name not in {"kind", "summary", "completion", "spread"}
    ]
    for gone in (figures[::2], figures[1::2]):
        result = study_result(["paper", "static"], seeds=1)
        for name in ("fixed", "paper", "static"):
            result[name].update(dict.fromkeys(gone))
        text = written(tmp_path, result)
        outline_of(text)
        assert "None" not in text


def test_bad_results_are_told_as_such(tmp_path):
    result = study_result(["paper"])
    result["paper"].update(end_to_end_gain=0.95, ttft_p99_ms=800.0, cost_dollars=150.0)
    text = written(tmp_path, {**result, "failures": ["own, spot, seed 3: stuck at 12 s"]})
    assert "Borrowing does not pay here: 0.95x at best" in text
    assert "paper breaks serving&#x27;s SLO" in text
    assert "A step costs 19% more under paper than fixed" in text
    assert 'class="value bad">0.95x' in text
    assert "Incomplete" in text
    assert "own, spot, seed 3: stuck at 12 s" in text


def test_text_from_outside_is_escaped(tmp_path):
    result = {**study_result(["paper"], name="<b>&"), "assumptions": ['a "<i>"']}
    result["<u>x"] = result["paper"]
    text = written(tmp_path, {**result, "strategies": ["fixed", "<u>x"]})
    assert "<h1>&lt;b&gt;&amp;</h1>" in text
    assert "<i>" not in text
    assert "<u>" not in text


def test_the_same_result_gives_the_same_bytes_under_any_hash_seed(tmp_path):
    code = (
        f"import sys; sys.path.insert(0, {HERE!r})\n"
        "from pathlib import Path\n"
        "from synthetic_study import study_result, sweep\n"
        "from rose.simulation.report import write_study_report\n"
        "result = {**study_result(['paper', 'spot']), 'sweep': sweep('load', '', [0.1, 0.9], ['paper', 'spot'])}\n"
        "write_study_report(Path(sys.argv[1]), result)\n"
    )
    path = tmp_path / "other.html"
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, env=environment)
    names = ["paper", "spot"]
    here = written(tmp_path, {**study_result(names), "sweep": sweep("load", "", [0.1, 0.9], names)})
    assert path.read_text(encoding="utf-8") == here


def test_a_page_is_light_enough_to_send(page):
    assert len(page.encode()) < LIMIT_BYTES / 4


def test_too_large_a_page_goes_without_the_tables_of_its_sweeps(tmp_path, monkeypatch):
    result = {**study_result(["paper"]), "sweep": sweep("load", "", [0.1, 0.9], ["paper"])}
    pages = []
    for limit in (LIMIT_BYTES, 1000):
        monkeypatch.setattr("rose.simulation.report.page.LIMIT_BYTES", limit)
        write_reproduction_report(tmp_path / "report.html", [result])
        pages.append((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert ["The figures behind it" in page for page in pages] == [True, False]
    assert ["The table of this sweep is left out" in page for page in pages] == [False, True]


def test_the_page_follows_the_reader_into_the_dark(page):
    assert "prefers-color-scheme: dark" in page
    defined = set(re.findall(r"(--[\w-]+):", page))
    assert set(re.findall(r"var\((--[\w-]+)", page)) <= defined


def test_missing_matplotlib_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    for name in list(sys.modules):
        if name.startswith("rose.simulation.report.") and name.endswith(("figures", "canvas")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "rose.observe.report.svg", raising=False)
    monkeypatch.delattr("rose.simulation.report.figures", raising=False)
    with pytest.raises(BackendUnavailableError, match=r"rose-rl\[demo\]"):
        write_study_report(tmp_path / "report.html", study_result(["paper"]))


def test_a_path_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot write"):
        write_study_report(tmp_path / "missing" / "report.html", study_result(["paper"]))


def test_no_results_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least one"):
        write_reproduction_report(tmp_path / "report.html", [])


def test_the_report_is_imported_without_matplotlib():
    code = "import sys, rose.simulation.report; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
