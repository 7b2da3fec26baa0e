"""Requests from a Prometheus export."""

from __future__ import annotations

import gzip
import itertools
import json
from collections import Counter
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from rose.errors import ConfigError
from rose.simulation.traces import Trace, read_trace

START_S = 1_700_000_000.0
STEP_S = 60.0
REQUESTS, PROMPTS, OUTPUTS = "vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total"


def series(
    name: str | None, values: list[float | str], *, skip: tuple[int, ...] = (), **labels: str
) -> dict[str, object]:
    metric = {"__name__": name, **labels} if name else labels
    samples = [[START_S + STEP_S * i, str(value)] for i, value in enumerate(values) if i not in skip]
    return {"metric": metric, "values": samples}


def counter(per_step: list[float], start: float = 1000.0) -> list[float | str]:
    return list(itertools.accumulate(per_step, initial=start))


def export(*result: dict[str, object], **changes: object) -> str:
    answer = {"status": "success", "data": {"resultType": "matrix", "result": list(result)}, **changes}
    return json.dumps(answer)


def read(tmp_path: Path, text: str | bytes) -> Trace:
    path = tmp_path / "export"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_trace(path)


def by_step(trace: Trace, first_s: float = 0.0) -> list[int]:
    """Return requests of each step; ``first_s`` is when the first request came."""
    counts = Counter(int((arrival.at_s + first_s) // STEP_S) for arrival in trace.arrivals)
    return [counts[i] for i in range(max(counts) + 1)]


def test_a_counter_s_increases_become_arrivals(tmp_path):
    trace = read(tmp_path, export(series(REQUESTS, counter([600, 60, 0, 6000]))))
    assert trace.source_format == "prometheus"
    assert (trace.num_skipped, trace.num_reordered) == (0, 0)
    counts = by_step(trace)
    assert counts[0] == pytest.approx(600, abs=100)
    assert counts[1] == pytest.approx(60, abs=35)
    assert counts[2] <= 25, "none but for the shift to the first request"
    assert counts[3] == pytest.approx(6000, abs=350)
    gaps_s = [after.at_s - before.at_s for before, after in itertools.pairwise(trace.arrivals[-4000:])]
    assert fmean(gap_s > 0.01 for gap_s in gaps_s) == pytest.approx(0.368, abs=0.03), "as many as in a Poisson process"


def test_counts_scatter_as_a_poisson_process_s_do(tmp_path):
    counts = by_step(read(tmp_path, export(series(REQUESTS, counter([25] * 500)))))
    assert fmean(counts) == pytest.approx(25, rel=0.05)
    assert pvariance(counts) == pytest.approx(25, rel=0.25)


def test_the_same_file_gives_the_same_arrivals(tmp_path):
    text = export(series(REQUESTS, counter([50, 70])))
    assert read(tmp_path, text) == read(tmp_path, text)


@pytest.mark.parametrize("name", [None, "job:requests:rate1m"])
def test_a_series_that_is_no_counter_is_a_rate(tmp_path, name):
    trace = read(tmp_path, export(series(name, [99, 10, 10, 20])))
    assert by_step(trace) == pytest.approx([600, 600, 1200], abs=130)


def test_a_counter_that_began_anew_loses_nothing(tmp_path):
    trace = read(tmp_path, export(series(REQUESTS, [5000, 6000, 400, 1400])))
    assert by_step(trace) == pytest.approx([1000, 400, 1000], abs=120)


def test_series_of_one_name_are_added_up(tmp_path):
    parts = [series(REQUESTS, counter([300, 900]), instance=name, finished_reason="stop") for name in "abc"]
    assert by_step(read(tmp_path, export(*parts))) == pytest.approx([900, 2700], abs=180)


def test_an_instance_that_comes_later_counts_from_then_on(tmp_path):
    early, late = counter([500] * 4), counter([500] * 4)
    trace = read(tmp_path, export(series(REQUESTS, early), series(REQUESTS, late, skip=(0, 1), instance="b")))
    assert by_step(trace) == pytest.approx([500, 500, 1000, 1000], abs=120)


def test_a_gap_has_the_counter_s_increase_but_no_rate(tmp_path):
    values = counter([600] * 6)
    assert sum(by_step(read(tmp_path, export(series(REQUESTS, values, skip=(3, 4)))))) == pytest.approx(3600, abs=250)
    counts = by_step(read(tmp_path, export(series(None, [10.0] * 7, skip=(3, 4)))))
    assert counts == pytest.approx([600, 600, 0, 0, 600, 600], abs=120)


def test_lengths_follow_the_token_counters(tmp_path):
    text = export(
        series(OUTPUTS, counter([50 * 2000, 400 * 2000])),
        series(PROMPTS, counter([3000 * 2000, 200 * 2000])),
        series(REQUESTS, counter([2000, 2000])),
    )
    arrivals = read(tmp_path, text).arrivals
    early = [arrival for arrival in arrivals if arrival.at_s < 59]
    late = [arrival for arrival in arrivals if arrival.at_s > 61]
    assert fmean(arrival.prompt_tokens for arrival in early) == pytest.approx(3000, rel=0.06)
    assert fmean(arrival.output_tokens for arrival in early) == pytest.approx(50, rel=0.1)
    assert fmean(arrival.prompt_tokens for arrival in late) == pytest.approx(200, rel=0.15)
    assert fmean(arrival.output_tokens for arrival in late) == pytest.approx(400, rel=0.08)


def test_few_requests_do_not_make_an_extreme_mean(tmp_path):
    """Four requests a step end while the tokens of many are counted."""
    requests, prompts = counter([1000, *[4] * 10, 1000]), counter([10**6, *[4 * 10**5] * 10, 10**6])
    arrivals = read(tmp_path, export(series(REQUESTS, requests), series(PROMPTS, prompts))).arrivals
    between = [arrival.prompt_tokens for arrival in arrivals if 61 < arrival.at_s < 659]
    assert len(between) > 20
    assert 5000 < fmean(between) < 40_000


def test_without_token_counters_lengths_are_those_of_a_public_trace(tmp_path):
    arrivals = read(tmp_path, export(series(REQUESTS, counter([20_000])))).arrivals
    assert fmean(arrival.prompt_tokens for arrival in arrivals) == pytest.approx(1155, rel=0.03)
    assert fmean(arrival.output_tokens for arrival in arrivals) == pytest.approx(211, rel=0.03)


def test_histograms_of_requests_do_not_confuse(tmp_path):
    text = export(
        series("vllm:request_success_created", [1.7e9, 1.7e9]),
        series("vllm:e2e_request_latency_seconds_bucket", counter([9e6]), le="1"),
        series("vllm:e2e_request_latency_seconds_count", counter([700])),
    )
    assert by_step(read(tmp_path, text)) == pytest.approx([700], abs=130)
    both = export(series("vllm:num_requests_running", [3, 4]), series(REQUESTS, counter([700])))
    assert by_step(read(tmp_path, both)) == pytest.approx([700], abs=130)


def test_the_form_of_the_file_does_not_matter(tmp_path):
    answer = json.loads(export(series(REQUESTS, counter([60]))))
    expected = read(tmp_path, json.dumps(answer))
    other_order = {"data": answer["data"], "status": "success", "warnings": ["x"]}
    for text in (
        json.dumps(answer, indent=2),
        json.dumps(other_order, indent=1).replace("\n", "\r\n"),
        gzip.compress(json.dumps(other_order).encode()),
    ):
        assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (export(series(REQUESTS, [1, 2]))[:-9], r"not JSON \(.*line 1, column \d+\); export it again"),
        (
            export(status="error", errorType="bad_data", error="parse error"),
            r"status 'error' \(parse error\); repeat the query",
        ),
        (export(data={"resultType": "vector", "result": []}), "resultType is 'vector', not 'matrix'; ask"),
        (export(data=[]), "resultType is None"),
        (export(), "the result has no series"),
        (export({"metric": {}}), "series 1 has no metric or no values"),
        (export(series(REQUESTS, [1])), r"series 1 \(vllm:request_success_total\) has 1 sample, at least 2"),
        (
            export(series(REQUESTS, [1, 2, "NaN"])),
            r"series 1 .*, sample 3 is .*'NaN'.*, not a time and a finite number",
        ),
        (export(series(REQUESTS, [1, -2])), "sample 2 is"),
        (export({"metric": {}, "values": [[1, "2"], [2]]}), r"series 1 \(without a name\), sample 2 is \[2\]"),
        (export({"metric": {}, "values": [[1, "2"], [1, "3"]]}), "sample 2: its time is not after"),
        (export(series(PROMPTS, [1, 2])), "no request counter or rate among the series vllm:prompt_tokens_total"),
        (
            export(series("a_total", [1, 2]), series("b_total", [1, 2])),
            "several series could be the requests: a_total, b_total; export only one",
        ),
        (
            export(series(REQUESTS, [1, 2]), series(PROMPTS, [1, 2]), series("vllm:request_prompt_tokens_sum", [1, 2])),
            "several series could be the prompt tokens",
        ),
        (export(series("requests", [10**6, 10**6])), "would be 6e\\+07 requests; a counter's name must end in _total"),
        (export(series(REQUESTS, [7, 7, 7])), "no request with a prompt and an answer"),
    ],
)
def test_an_export_of_no_use_is_refused_in_one_line(tmp_path, text, complaint):
    with pytest.raises(ConfigError, match=complaint) as caught:
        read(tmp_path, text)
    assert str(tmp_path / "export") in str(caught.value)
    assert "\n" not in str(caught.value)
