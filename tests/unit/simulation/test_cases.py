from __future__ import annotations

import json
import re
import shutil

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from study_standins import SCENARIO, outcome, serving_outcome

from rose.errors import ConfigError
from rose.simulation import cases
from rose.simulation.axes import evolve
from rose.simulation.cases import SERVING_ALONE, CaseMaker, decode, encode

MAKER = CaseMaker()


def test_equal_cases_have_equal_keys_whatever_they_are_called():
    first = MAKER.make(SCENARIO, "paper", 1, "here")
    second = CaseMaker().make(attrs.evolve(SCENARIO), "paper", 1, "there")
    assert first.key == second.key
    assert str(first) == "here, strategy paper, seed 1"
    assert str(MAKER.make(SCENARIO, SERVING_ALONE, 0)) == "toy, serving alone, seed 0"


def test_everything_that_matters_is_in_the_key():
    case = MAKER.make(SCENARIO, "paper", 1)
    others = [
        MAKER.make(SCENARIO, "default", 1),
        MAKER.make(SCENARIO, "paper", 2),
        MAKER.make(evolve(SCENARIO, "serving.layout", "pd"), "paper", 1),
        MAKER.make(evolve(SCENARIO, "prices.spot", 1.01), "paper", 1),
        CaseMaker(sources="other code").make(SCENARIO, "paper", 1),
    ]
    assert len({case.key, *(other.key for other in others)}) == 6


def test_the_version_is_in_the_key(monkeypatch):
    before = MAKER.make(SCENARIO, "paper", 1).key
    monkeypatch.setattr(cases, "version", lambda _name: "99")
    assert CaseMaker().make(SCENARIO, "paper", 1).key != before


def test_the_contents_of_named_files_are_in_the_key(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("one")
    scenario = evolve(SCENARIO, "serving.trace", str(path))
    before = CaseMaker().make(scenario, "paper", 1).key
    path.write_text("two")
    assert CaseMaker().make(scenario, "paper", 1).key != before
    path.write_text("one")
    assert CaseMaker().make(scenario, "paper", 1).key == before


@pytest.mark.parametrize("key", ["serving.trace", "serving.operators", "rollout.logs"])
def test_a_named_file_that_is_not_there_is_refused(key):
    with pytest.raises(ConfigError, match=f"^{key}: cannot read no/such.file: No such file or directory; give"):
        MAKER.make(evolve(SCENARIO, key, "no/such.file"), "paper", 1)


def test_the_digest_of_the_sources_follows_what_is_simulated_and_nothing_else(monkeypatch, tmp_path):
    root = tmp_path / "rose"
    shutil.copytree(cases._ROSE, root, ignore=shutil.ignore_patterns("__pycache__", "vllm"))
    not_sources = tuple(root / path.relative_to(cases._ROSE) for path in cases._NOT_SOURCES)
    monkeypatch.setattr(cases, "_ROSE", root)
    monkeypatch.setattr(cases, "_NOT_SOURCES", not_sources)
    digest = cases.sources_digest.__wrapped__
    before = digest()
    for name in ("simulation/results.py", "simulation/report/words.py", "cli/main.py", "simulation/__pycache__/x.pyc"):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("# changed\n")
        assert digest() == before, name
    seen = {before}
    for name in (
        *("policies/routing.py", "pool/state.py", "coserving/lender.py", "transfer/plan.py", "types.py"),
        *("simulation/loop.py", "simulation/scenario.py", "backends/paced/profiles.py", "simulation/new/table.csv"),
    ):
        path = root / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("# changed\n")
        seen.add(digest())
    assert len(seen) == 10


def test_what_is_simulated_uses_nothing_that_the_digest_leaves_out():
    left_out = "|".join(path.stem for path in cases._NOT_SOURCES)
    uses = re.compile(
        rf"^\s*(from rose\.simulation\.({left_out})\b|from rose\.simulation import .*\b({left_out})\b)",
        re.MULTILINE,
    )
    assert uses.search("from rose.simulation import axes\n")
    for path in (cases._ROSE / "simulation").rglob("*.py"):
        if cases._is_source(path) and path.name != "cases.py":
            assert not uses.search(path.read_text()), path.name


@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(0, 2**62), st.booleans())
def test_an_outcome_comes_back_as_it_was(step_s, num_turns, has_serving):
    found = attrs.evolve(outcome(SCENARIO, "paper", 1), step_s=step_s, num_turns=num_turns)
    found = found if has_serving else attrs.evolve(found, serving=None)
    assert decode("paper", encode(found)) == found
    assert encode(decode("paper", encode(found))) == encode(found)


def test_serving_alone_comes_back_as_it_was():
    found = attrs.evolve(serving_outcome(8, 1), ttft_mean_ms=None)
    assert decode(SERVING_ALONE, encode(found)) == found


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_refused(bad):
    with pytest.raises(ValueError, match="JSON"):
        encode(attrs.evolve(outcome(SCENARIO, "paper", 1), step_s=bad))


def test_a_kept_outcome_is_found_again_by_its_own_case_only(tmp_path):
    case = MAKER.make(SCENARIO, "paper", 1)
    found = outcome(SCENARIO, "paper", 1)
    assert cases.load(tmp_path, case) is None
    cases.save(tmp_path, case, encode(found))
    assert cases.load(tmp_path, case) == found
    assert [path.name for path in tmp_path.iterdir()] == [f"{case.key}.json"]
    other = MAKER.make(SCENARIO, "paper", 2)
    (tmp_path / f"{case.key}.json").rename(tmp_path / f"{other.key}.json")
    assert cases.load(tmp_path, other) is None


def test_a_kept_outcome_says_what_it_is_of(tmp_path):
    case = MAKER.make(SCENARIO, "paper", 1)
    cases.save(tmp_path, case, encode(outcome(SCENARIO, "paper", 1)))
    record = json.loads((tmp_path / f"{case.key}.json").read_text())
    assert (record["strategy"], record["seed"], record["scenario"]["serving"]["layout"]) == ("paper", 1, "colocated")


@settings(max_examples=40)
@given(st.data())
def test_a_damaged_file_counts_as_not_there(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("cases")
    case = MAKER.make(SCENARIO, "paper", 1)
    cases.save(folder, case, encode(outcome(SCENARIO, "paper", 1)))
    (path,) = folder.iterdir()
    whole = path.read_bytes()
    begin = whole.index(b'"check"')
    if data.draw(st.booleans()):
        path.write_bytes(whole[: data.draw(st.integers(0, len(whole) - 3))])
    else:
        place = data.draw(st.integers(begin, len(whole) - 3))
        other = data.draw(st.integers(0, 255).filter(lambda byte: byte != whole[place]))
        path.write_bytes(whole[:place] + bytes([other]) + whole[place + 1 :])
    assert cases.load(folder, case) in (None, outcome(SCENARIO, "paper", 1))
    if path.stat().st_size < len(whole):
        assert cases.load(folder, case) is None


def test_a_changed_figure_is_found_out(tmp_path):
    case = MAKER.make(SCENARIO, "paper", 1)
    cases.save(tmp_path, case, encode(outcome(SCENARIO, "paper", 1)))
    (path,) = tmp_path.iterdir()
    text = path.read_text()
    assert '"num_turns": 1001' in text
    path.write_text(text.replace('"num_turns": 1001', '"num_turns": 1002'))
    assert cases.load(tmp_path, case) is None


def test_a_folder_that_cannot_be_written_is_told(tmp_path):
    case = MAKER.make(SCENARIO, "paper", 1)
    with pytest.raises(ConfigError, match=r"cannot write .*No such file or directory"):
        cases.save(tmp_path / "missing", case, encode(outcome(SCENARIO, "paper", 1)))
