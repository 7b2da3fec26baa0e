"""Metrics text: parsing, recordings, names, engines side by side, resets, gaps, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rose.errors import ConfigError
from rose.simulation.shadow import series
from rose.simulation.shadow.exposition import (
    Scrape,
    looks_like_scrapes,
    mark,
    parse_scrape,
    read_recording,
    wanted_lines,
)
from rose.simulation.shadow.load import load_of, load_of_trace
from rose.simulation.shadow.series import engine_series, is_wanted
from rose.simulation.traces import Arrival

from shadow_metrics import SGLANG, VLLM, histogram  # isort: skip

LABELS = 'model_name="m",engine="0"'


def page(names: dict[str, str] = VLLM, labels: str = LABELS, **values: float) -> str:
    """Return a page with counters and gauges, by role."""
    return "".join(f"{names[key]}{{{labels}}} {value}\n" for key, value in values.items())


def scrapes(*pages: str, interval_s: float = 10.0) -> list[Scrape]:
    return [parse_scrape(text, i * interval_s, is_wanted) for i, text in enumerate(pages)]


def counted(firsts: int, prompt: float, generated: float, *, labels: str = LABELS, lengths: bool = False) -> str:
    text = page(labels=labels, running=0, waiting=0, prompt=prompt, generated=generated)
    text += "\n".join(histogram(VLLM["ttft"], labels, (1.0,), [0.1] * firsts)) + "\n"
    if lengths:
        text += "\n".join(histogram(VLLM["outputs"], labels, (10, 100, 1000), [50] * firsts)) + "\n"
    return text


def test_lines_are_parsed() -> None:
    text = (
        "# HELP vllm:prompt_tokens_total x\n"
        'vllm:prompt_tokens_total{model_name="a \\"b\\" {c}",engine="1"} 1.5e3 1700000000000\n'
        'vllm:num_requests_running{engine="1"} 2 # {trace_id="x"} 0.5\n'
        "vllm:generation_tokens_total 7\n"
        "process_open_fds 12\n"
        "# EOF\n"
    )
    scrape = parse_scrape(text, 3.0, is_wanted)
    assert scrape.at_s == 3.0
    assert [(s.name, s.value) for s in scrape.samples] == [
        ("vllm:prompt_tokens_total", 1500.0),
        ("vllm:num_requests_running", 2.0),
        ("vllm:generation_tokens_total", 7.0),
    ]
    assert dict(scrape.samples[0].labels) == {"model_name": 'a \\"b\\" {c}', "engine": "1"}
    assert wanted_lines(text, is_wanted).count("\n") == 3


@pytest.mark.parametrize(
    "line", ["vllm:prompt_tokens_total{a=", "vllm:prompt_tokens_total many", "vllm:prompt_tokens_total"]
)
def test_a_damaged_line_is_named(line: str) -> None:
    with pytest.raises(ValueError, match="line 2 is no sample"):
        parse_scrape(f"vllm:generation_tokens_total 1\n{line}\n", 0.0, is_wanted)


def test_a_recording_says_its_times(tmp_path: Path) -> None:
    sample = "vllm:prompt_tokens_total 1\n"
    file = tmp_path / "all.prom"
    file.write_text(mark(20.0) + sample + mark(10.0) + sample)
    assert [scrape.at_s for scrape in read_recording(file, is_wanted)] == [10.0, 20.0]
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "30.5.prom").write_text(sample)
    (folder / "a.txt").write_text("vllm:prompt_tokens_total 1 1700000000000\n")
    (folder / "notes.md").write_text("not metrics")
    assert [scrape.at_s for scrape in read_recording(folder, is_wanted)] == [30.5, 1.7e9]
    (folder / "b.prom").write_text(sample)
    with pytest.raises(ConfigError, match="nothing says when it was scraped"):
        read_recording(folder, is_wanted)
    file.write_text("# scraped_at_s noon\n" + sample)
    with pytest.raises(ConfigError, match="'noon' is no time"):
        read_recording(file, is_wanted)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="no file that ends in"):
        read_recording(tmp_path / "empty", is_wanted)


def test_metrics_are_told_from_traces() -> None:
    assert looks_like_scrapes("# HELP python_gc x")
    assert looks_like_scrapes('vllm:prompt_tokens_total{a="b"} 1')
    assert not looks_like_scrapes("TIMESTAMP,ContextTokens,GeneratedTokens")
    assert not looks_like_scrapes('{"timestamp": 1}')


@pytest.mark.parametrize("names", [VLLM, SGLANG])
def test_counters_gauges_and_pool(names: dict[str, str]) -> None:
    info = 'vllm:cache_config_info{engine="0",block_size="16",num_gpu_blocks="1000"} 1\n'
    pool = info if names is VLLM else f"sglang:max_total_num_tokens{{{LABELS}}} 16000\n"
    pages = [
        pool + page(names, running=r, waiting=1, kv=0.5, prompt=100 * i, generated=10 * i, finished=i)
        for i, r in enumerate((3, 4))
    ]
    (engine,) = engine_series(scrapes(*pages), "x")
    assert engine.name == "m/0"
    assert engine.pool_tokens == 16000
    assert engine.duration_s == 10.0
    assert engine.counters[series.PROMPT].tolist() == [0, 100]
    assert engine.gauges[series.RUNNING].tolist() == [3, 4]
    assert engine.gauges[series.KV].tolist() == [0.5, 0.5]
    assert "not exported" in engine.notes[0]


def test_a_counter_that_falls_begins_anew() -> None:
    (engine,) = engine_series(scrapes(counted(10, 1000, 500), counted(14, 1400, 700), counted(3, 300, 100)), "x")
    assert engine.counters[series.PROMPT].tolist() == [0, 400, 700]
    assert engine.histograms[series.TTFT].totals.tolist() == [0, 4, 7]
    assert any("began anew 1 times" in note for note in engine.notes)
    assert len(load_of(engine, 0).arrivals) == 7


def test_gaps_and_missing_scrapes_are_said() -> None:
    pages = [parse_scrape(counted(i, 100 * i, 10 * i), at_s, is_wanted) for i, at_s in enumerate((0, 5, 10, 60, 65))]
    pages.insert(2, Scrape(7.0, ()))
    (engine,) = engine_series(pages, "x", ["2 readings failed"])
    assert engine.notes[0] == "2 readings failed"
    assert any("1 gaps between scrapes, 50 s together" in note for note in engine.notes)
    assert any("missing in 1 of 6" in note for note in engine.notes)
    load = load_of(engine, 0)
    assert load.duration_s == 65.0
    assert len(load.arrivals) == 4


def test_engines_are_told_apart_and_ranks_taken_once() -> None:
    def both(i: int) -> str:
        first = counted(10 * i, 1000 * i, 100 * i)
        second = counted(i, 10 * i, 5 * i, labels='model_name="m",engine="1"')
        ranks = "".join(
            page(SGLANG, f'model_name="s",tp_rank="{rank}"', prompt=7 * i, generated=7 * i, finished=i)
            for rank in range(4)
        )
        return first + second + ranks

    engines = engine_series(scrapes(both(0), both(2)), "x")
    assert [engine.name for engine in engines] == ["m/0", "m/1", "s"]
    assert [engine.counters[series.PROMPT][-1] for engine in engines] == [2000, 20, 14]


def test_requests_by_reason_are_added_up() -> None:
    def ended(i: int) -> str:
        return page(prompt=i * 10, generated=i * 10) + "".join(
            f'vllm:request_success_total{{{LABELS},finished_reason="{reason}"}} {i}\n' for reason in ("stop", "length")
        )

    (engine,) = engine_series(scrapes(ended(0), ended(3)), "x")
    assert engine.counters[series.FINISHED].tolist() == [0, 6]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("prompt", "vllm:prompt_tokens_total or sglang:prompt_tokens_total"),
        ("generated", "vllm:generation_tokens_total"),
        ("finished", "vllm:request_success_total"),
    ],
)
def test_a_series_that_is_needed_is_named(key: str, said: str) -> None:
    values = {"running": 1, "prompt": 1, "generated": 1, "finished": 1}
    del values[key]
    with pytest.raises(ConfigError, match=said) as caught:
        engine_series(scrapes(page(**values), page(**values)), "http://x/metrics")
    assert "http://x/metrics" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_no_engine_and_too_little_are_refused() -> None:
    with pytest.raises(ConfigError, match="no series of vLLM"):
        engine_series(scrapes("process_open_fds 1\n", "process_open_fds 1\n"), "x")
    with pytest.raises(ConfigError, match="1 scrape, at least 2"):
        engine_series(scrapes(counted(1, 1, 1)), "x")


def test_load_has_the_counted_tokens() -> None:
    """Each interval has its requests and its prompt tokens, all together the answers; where one request came it is exact."""
    steps = [(0, 0, 0), (1, 777, 50), (1, 777, 90), (11, 20_777, 700), (12, 21_000, 1200)]
    (engine,) = engine_series(scrapes(*(counted(*step, lengths=True) for step in steps)), "x")
    load = load_of(engine, 1)
    assert load == load_of(engine, 1)
    assert load.arrivals != load_of(engine, 2).arrivals
    by_interval = [[a.prompt_tokens for a in load.arrivals if 10 * i <= a.at_s < 10 * (i + 1)] for i in range(4)]
    assert [len(lengths) for lengths in by_interval] == [1, 0, 10, 1]
    assert by_interval[0] == [777]
    assert sum(by_interval[2]) == pytest.approx(20_000, abs=10)
    assert by_interval[3] == [223]
    assert sum(a.output_tokens for a in load.arrivals) == pytest.approx(1200, rel=0.02)
    times_s = [a.at_s for a in load.arrivals]
    assert times_s == sorted(times_s)


def test_requests_that_wait_have_arrived() -> None:
    texts = [counted(0, 0, 0), counted(2, 200, 20).replace(f"waiting{{{LABELS}}} 0", f"waiting{{{LABELS}}} 5")]
    (engine,) = engine_series(scrapes(*texts), "x")
    assert len(load_of(engine, 0).arrivals) == 7


def test_cached_prompts_are_known() -> None:
    cached = "vllm:prompt_tokens_cached_total"
    pages = [counted(i, 1000 * i, 10 * i) + f"{cached}{{{LABELS}}} {250 * i}\n" for i in (0, 4)]
    (engine,) = engine_series(scrapes(*pages), "x")
    assert load_of(engine, 0).cached_fraction == 0.25


def test_quantiles_lie_within_their_bucket() -> None:
    text = [
        counted(0, 0, 0),
        counted(0, 1, 1) + "\n".join(histogram(VLLM["itl"], LABELS, (1, 2, 4), [1.5] * 6 + [3.0] * 4)) + "\n",
    ]
    text[0] += "\n".join(histogram(VLLM["itl"], LABELS, (1, 2, 4), [])) + "\n"
    (engine,) = engine_series(scrapes(*text), "x")
    itl = engine.histograms[series.ITL]
    assert itl.quantile(0.5) == pytest.approx(1 + 5 / 6)
    assert 2 < (itl.quantile(0.99) or 0) <= 4
    assert itl.mean == pytest.approx(2.1)
    assert np.isinf(itl.bounds[-1])


def test_a_traces_beginning() -> None:
    arrivals = [Arrival(float(i), 10, 10) for i in range(10)]
    assert len(load_of_trace(arrivals, 4.0).arrivals) == 4
    assert load_of_trace(arrivals, None).duration_s == 10.0
