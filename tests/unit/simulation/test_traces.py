from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from rose.errors import ConfigError
from rose.simulation.traces import Arrival, read_trace
from rose.simulation.workloads import peak_to_mean

SHARED = Path(__file__).parents[3] / ".." / "shared" / "traces"

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 02:00:01.509930+02:00,2399,6
"""
BURST_GPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,GPT-4,1087,0,1087,API log
118,ChatGPT,417,276,693,Conversation log
"""
BURST_GPT_SESSIONS = """Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type
5.5,17,1.25,ChatGPT,472,18,490,Conversation log
"""
MOONCAKE = """{"timestamp": 1000, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1]}
{"timestamp": 27482, "input_length": 7322, "output_length": 490, "hash_ids": [0, 2]}
"""
SERVE_GEN = "timestamp_s,input_tokens,output_tokens\n0.000,263,499\n0.061,312,2440\n"


def write(tmp_path: Path, content: str | bytes, name: str = "trace.csv") -> Path:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.parametrize(
    ("content", "source_format", "expected", "num_skipped"),
    [
        (AZURE, "azure", [(0, 374, 44), (4.314579, 396, 109)], 0),
        (AZURE_2024, "azure", [(0, 2162, 5), (1.5, 2399, 6)], 0),
        (BURST_GPT, "burstgpt", [(0, 472, 18), (113, 417, 276)], 1),
        (BURST_GPT_SESSIONS, "burstgpt", [(0, 472, 18)], 0),
        (MOONCAKE, "mooncake", [(0, 6758, 500), (26.482, 7322, 490)], 0),
        (SERVE_GEN, "servegen", [(0, 263, 499), (0.061, 312, 2440)], 0),
    ],
)
def test_each_format_is_found_from_the_content(tmp_path, content, source_format, expected, num_skipped):
    for name, data in (
        ("t.txt", content),
        ("t.gz", gzip.compress(content.encode(), mtime=0)),
        ("t", content.replace("\n", "\r\n")),
    ):
        trace = read_trace(write(tmp_path, data, name))
        assert (trace.source_format, trace.num_skipped, trace.num_reordered) == (source_format, num_skipped, 0)
        assert [(a.prompt_tokens, a.output_tokens) for a in trace.arrivals] == [(p, o) for _, p, o in expected]
        assert [a.at_s for a in trace.arrivals] == pytest.approx([at for at, _, _ in expected], abs=2e-6)


def test_rows_out_of_order_are_sorted_and_counted(tmp_path):
    content = "timestamp_s,input_tokens,output_tokens\n3,30,1\n1,10,1\n2,20,1\n"
    trace = read_trace(write(tmp_path, content))
    assert trace.arrivals == (Arrival(0, 10, 1), Arrival(1, 20, 1), Arrival(2, 30, 1))
    assert trace.num_reordered == 1


def test_a_byte_order_mark_and_blank_lines_do_no_harm(tmp_path):
    trace = read_trace(write(tmp_path, b"\xef\xbb\xbf" + SERVE_GEN.replace("\n", "\n\n").encode()))
    assert len(trace.arrivals) == 2


def test_columns_are_found_by_name(tmp_path):
    trace = read_trace(write(tmp_path, "output_tokens,note,timestamp_s,input_tokens\n7,x,1.0,9.0\n"))
    assert trace.arrivals == (Arrival(0, 9, 7),)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (AZURE + "2023-11-16 18:15:51,879\n", ("line 4", "2 fields where the header has 3")),
        (AZURE + "yesterday,879,55\n", ("line 4", "TIMESTAMP is 'yesterday', which is no time")),
        (AZURE + "2023-11-16 18:15:51,many,55\n", ("line 4", "ContextTokens is 'many', not a whole")),
        (AZURE + "2023-11-16 18:15:51,12.5,55\n", ("line 4", "ContextTokens is '12.5', not a whole number")),
        (AZURE + "2023-11-16 18:15:51,-3,55\n", ("line 4", "'-3'")),
        (AZURE + "2023-11-16 18:15:51,inf,55\n", ("line 4", "inf")),
        (BURST_GPT + "nan,ChatGPT,1,1,2,API log\n", ("line 5", "no time")),
        (MOONCAKE + '{"timestamp": 1, "input_length": 5}\n', ("line 3", "no output_length")),
        (MOONCAKE + '{"timestamp": 1, "input_le', ("line 3: not JSON (Unterminated string", "column 18)")),
        (MOONCAKE + "[1, 2]\n", ("line 3", "not a JSON object")),
        (MOONCAKE + '{"timestamp": "x", "input_length": 5, "output_length": 5}\n', ("line 3", "no time")),
        (MOONCAKE + '{"timestamp": 1, "input_length": true, "output_length": 5}\n', ("line 3", "input_length is True")),
        (MOONCAKE + '{"timestamp": 1, "input_length": null, "output_length": 5}\n', ("line 3", "input_length is None")),
    ],
)
def test_a_malformed_row_is_named_by_file_and_line(tmp_path, content: str, parts: tuple[str, ...]):
    path = write(tmp_path, content)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert "\n" not in message
    for part in (str(path), "correct or remove the row", *parts):
        assert part in message


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.csv", b"", "the file is empty; expected Azure, BurstGPT"),
        ("t.csv", b"\n", "is empty"),
        ("t.csv", b"time,tokens\n1,2\n", "unknown format, its first line is 'time,tokens'"),
        ("t.csv", b"\x80\xff\x00\x01", "not a text file"),
        ("t.csv.gz", AZURE.encode(), "not gzip data despite its name"),
        ("t.csv.gz", gzip.compress(AZURE.encode() * 50, mtime=0)[:60], "damaged or cut short"),
        (
            "t.csv",
            b"timestamp_s,input_tokens,output_tokens\n",
            "no request with a prompt and an answer among its 0 rows",
        ),
        ("t.csv", b"timestamp_s,input_tokens,output_tokens\n1,2,0\n", "among its 1 rows"),
    ],
)
def test_a_file_that_is_no_trace_gives_one_clear_line(tmp_path, name: str, content: bytes, said: str):
    path = write(tmp_path, content, name)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert said in str(caught.value)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_or_a_folder_gives_one_clear_line(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        read_trace(tmp_path / "nothing.csv")
    with pytest.raises(ConfigError, match=r"cannot be read \(Is a directory\)"):
        read_trace(tmp_path)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the public traces are not beside this checkout")
@pytest.mark.parametrize(
    ("name", "source_format", "num_arrivals", "span_s", "peak_1s"),
    [
        ("azure2023_conv.csv.gz", "azure", 19_366, 3_501.7, 2.89),
        ("mooncake_synthetic.jsonl.gz", "mooncake", 3_993, 1_022.0, 3.33),
    ],
)
def test_the_public_traces_read_as_documented(name, source_format, num_arrivals, span_s, peak_1s):
    trace = read_trace(SHARED / name)
    assert (trace.source_format, len(trace.arrivals), trace.num_skipped) == (source_format, num_arrivals, 0)
    assert trace.arrivals[-1].at_s == pytest.approx(span_s, abs=0.1)
    assert peak_to_mean(trace.arrivals, 1.0) == pytest.approx(peak_1s, abs=0.01)
