from __future__ import annotations

import gzip
import itertools
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st

from rose.simulation.traces import Arrival, read_trace
from rose.simulation.workloads import cut, scale_rate, split_devices

counts = st.integers(min_value=1, max_value=200_000)
rows_ms = st.lists(st.tuples(st.integers(0, 10**8), counts, counts), min_size=1, max_size=30)
arrivals = st.lists(st.tuples(st.floats(0, 1e5), counts, counts), min_size=1, max_size=40).map(
    lambda rows: tuple(Arrival(*row) for row in sorted(rows))
)


def as_azure(rows):
    start = datetime(2023, 11, 16, tzinfo=UTC)
    times = [(start + timedelta(milliseconds=at)).replace(tzinfo=None) for at, _, _ in rows]
    body = [f"{at:%Y-%m-%d %H:%M:%S.%f}0,{p},{o}" for at, (_, p, o) in zip(times, rows, strict=True)]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *body])


def as_burst_gpt(rows):
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
    return "\n".join([header, *(f"{at / 1000},GPT-4,{p},{o},{p + o},API log" for at, p, o in rows)])


def as_mooncake(rows):
    return "\n".join(json.dumps({"timestamp": at, "input_length": p, "output_length": o}) for at, p, o in rows)


@given(rows_ms, st.sampled_from([as_azure, as_burst_gpt, as_mooncake]), st.booleans())
def test_what_is_written_in_any_format_is_read_back_sorted(rows, render, is_compressed):
    content = render(rows).encode()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace"
        path.write_bytes(gzip.compress(content) if is_compressed else content)
        trace = read_trace(path)
    start_ms = min(at for at, _, _ in rows)
    expected = sorted(rows, key=lambda row: row[0])
    assert [(round(a.at_s * 1000), a.prompt_tokens, a.output_tokens) for a in trace.arrivals] == [
        (at - start_ms, p, o) for at, p, o in expected
    ]
    assert trace.num_reordered == sum(b[0] < a[0] for a, b in itertools.pairwise(rows))


@given(arrivals, st.integers(1, 8), st.integers(0, 1000))
def test_a_split_loses_and_doubles_nothing(load, num_devices, seed):
    shares = split_devices(load, num_devices, seed=seed)
    assert len(shares) == num_devices
    assert sorted(a for share in shares for a in map(_key, share)) == sorted(map(_key, load))
    for share in shares:
        assert [a.at_s for a in share] == sorted(a.at_s for a in share)


@given(arrivals, st.floats(0, 1e5), st.floats(0.001, 1e5))
def test_cuts_at_a_point_partition_the_load(load, point, rest):
    before = cut(load, offset_s=0.0, duration_s=point)
    after = cut(load, offset_s=point, duration_s=2e5 + rest)
    assert len(before) + len(after) == len(load)
    assert all(0 <= a.at_s for a in after)


@given(arrivals, st.floats(0.01, 1.0), st.integers(0, 1000))
def test_thinning_keeps_a_part_of_the_load_in_order(load, share, seed):
    duration_s = 100.0
    thin = scale_rate(load, share * len(load) / duration_s, duration_s=duration_s, seed=seed)
    assert abs(len(thin) - share * len(load)) <= 0.5 + 1e-6
    remaining = iter(load)
    assert all(any(a is b for b in remaining) for a in thin)


def _key(arrival: Arrival) -> tuple[float, int, int]:
    return arrival.at_s, arrival.prompt_tokens, arrival.output_tokens
