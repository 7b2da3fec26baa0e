from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.observe.timeline import Timeline, busy_shares


def written(timeline, tmp_path):
    path = tmp_path / "timeline.json"
    timeline.write(path)
    return json.loads(path.read_text())


def test_one_process_a_device_and_one_thread_a_lane(tmp_path):
    timeline = Timeline()
    timeline.span("gpu0", "rollout", "step", kind="rollout", start_s=1.0, end_s=1.5)
    timeline.span("gpu1", "rollout", "step", kind="rollout", start_s=1.0, end_s=1.5)
    timeline.span("gpu0", "serving", "step", kind="serving", start_s=1.5, end_s=1.6, args={"prefill_tokens": 3})
    timeline.instant("gpu1", "rollout", "evicted", kind="evict", at_s=1.2)
    events = written(timeline, tmp_path)["traceEvents"]
    names = {
        (e["pid"], e.get("tid")): e["args"]["name"] for e in events if e["name"] in {"process_name", "thread_name"}
    }
    assert [names[1, None], names[2, None]] == ["gpu0", "gpu1"]
    assert [names[1, 1], names[1, 2], names[2, 3]] == ["serving", "rollout", "rollout"]
    complete = [e for e in events if e["ph"] == "X"]
    assert [(e["pid"], e["tid"], e["ts"], e["dur"]) for e in complete] == [
        (1, 2, 1e6, 5e5),
        (2, 3, 1e6, 5e5),
        (1, 1, 1.5e6, 1e5),
    ]
    assert complete[2]["args"] == {"prefill_tokens": 3}
    instant = next(e for e in events if e["ph"] == "i")
    assert (instant["pid"], instant["tid"], instant["ts"]) == (2, 3, 1.2e6)


def test_adjacent_equal_spans_become_one():
    timeline = Timeline()
    for start in (0.0, 0.1, 0.2):
        timeline.span("gpu0", "rollout", "decode", kind="rollout", start_s=start, end_s=start + 0.1)
    timeline.span("gpu0", "serving", "decode", kind="rollout", start_s=0.3, end_s=0.4)
    timeline.span("gpu0", "rollout", "decode", kind="rollout", start_s=0.5, end_s=0.6)
    assert [(s.lane, s.start_s, s.end_s) for s in timeline.spans] == [
        ("rollout", 0.0, pytest.approx(0.3)),
        ("serving", 0.3, 0.4),
        ("rollout", 0.5, 0.6),
    ]


@pytest.mark.parametrize("change", [{"name": "prefill"}, {"kind": "other"}, {"args": {"n": 2}}])
def test_spans_that_differ_stay_apart(change):
    timeline = Timeline()
    base = {"name": "decode", "kind": "rollout", "args": {"n": 1}}
    for start, fields in ((0.0, base), (0.1, {**base, **change})):
        timeline.span(
            "g", "rollout", fields["name"], kind=fields["kind"], start_s=start, end_s=start + 0.1, args=fields["args"]
        )
    assert len(timeline.spans) == 2


def test_when_the_room_is_used_up_the_whole_run_is_kept_more_coarsely(tmp_path):
    timeline = Timeline(max_events=200)
    timeline.span("gpu1", "sync", "stage", kind="sync", start_s=0.0, end_s=0.1)
    for index in range(2000):
        for lane in ("serving", "rollout"):
            name = "prefill" if index % 3 == 0 else "decode"
            timeline.span("gpu0", lane, name, kind=lane, start_s=index * 0.01, end_s=index * 0.01 + 0.004)
    assert len(timeline.spans) <= 200
    assert timeline.num_dropped == 0
    assert [span.start_s for span in timeline.spans[:2]] == [0, 0]
    assert [span.device for span in timeline.spans].count("gpu1") == 1
    assert max(span.end_s for span in timeline.spans) == pytest.approx(19.994)
    assert sum(span.busy_s for span in timeline.spans) == pytest.approx(0.1 + 2 * 2000 * 0.004)
    shares = busy_shares(timeline.spans, device="gpu0", lane="serving", start_s=0, end_s=20, bin_s=2)
    assert shares == pytest.approx([0.4] * 10, abs=0.02)
    assert written(timeline, tmp_path)["otherData"]["complete"] == "yes"
    assert "drawn as one" in written(timeline, tmp_path)["otherData"]["resolution"]


def test_what_finds_no_room_even_so_is_counted_and_the_file_says_so(tmp_path):
    timeline = Timeline(max_events=3)
    for index in range(10):
        timeline.span("gpu0", "rollout", f"s{index}", kind="x", start_s=2 * index, end_s=2 * index + 0.5)
    timeline.instant("gpu0", "rollout", "i", kind="x", at_s=30)
    trace = written(timeline, tmp_path)
    assert sum(e["ph"] in "Xi" for e in trace["traceEvents"]) == 3
    assert timeline.num_dropped == 8
    assert "8 later ones" in trace["otherData"]["complete"]


def test_joining_goes_on_when_the_room_is_used_up():
    timeline = Timeline(max_events=1)
    for start in (0.0, 0.1):
        timeline.span("gpu0", "rollout", "s", kind="x", start_s=start, end_s=start + 0.1)
    assert (timeline.spans[0].end_s, timeline.num_dropped) == (0.2, 0)


def test_a_span_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match="before its start"):
        Timeline().span("g", "rollout", "s", kind="x", start_s=2, end_s=1)


def test_busy_shares_split_a_span_over_its_bins():
    timeline = Timeline()
    timeline.span("gpu0", "rollout", "a", kind="x", start_s=9.0, end_s=10.1)
    timeline.span("gpu0", "rollout", "b", kind="x", start_s=10.4, end_s=10.8)
    timeline.span("gpu0", "serving", "c", kind="x", start_s=10.0, end_s=11.0)
    timeline.span("gpu1", "rollout", "d", kind="x", start_s=10.0, end_s=11.0)
    shares = busy_shares(timeline.spans, device="gpu0", lane="rollout", start_s=10, end_s=11, bin_s=0.25)
    assert shares == pytest.approx((0.4, 0.4, 1.0, 0.2))


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0, 2)), max_size=20))
def test_busy_shares_add_up_to_the_busy_time(gaps_and_lengths):
    timeline, now_s, busy_s = Timeline(), 0.0, 0.0
    for index, (gap_s, length_s) in enumerate(gaps_and_lengths):
        timeline.span("g", "rollout", f"s{index}", kind="x", start_s=now_s + gap_s, end_s=now_s + gap_s + length_s)
        now_s += gap_s + length_s
        busy_s += length_s
    shares = busy_shares(timeline.spans, device="g", lane="rollout", start_s=0, end_s=101, bin_s=0.25)
    assert all(0 <= share <= 1 for share in shares)
    assert sum(shares) * 0.25 == pytest.approx(busy_s, abs=1e-6)
