"""``rose shadow``: a live page, recordings and traces; the report, the JSON, and every mistake told in one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import attrs
import pytest

from rose.cli.main import main
from rose.policies.admission import Mode, Slo
from rose.simulation.shadow.run import simulate

NAMES = ("prompt_tokens_total", "generation_tokens_total", "request_success_total")
QUICK = ("--draws", "1", "--mode", "quiet")


def page(requests: int) -> str:
    counters = zip(NAMES, (500 * requests, 40 * requests, requests), strict=True)
    return "".join(f'vllm:{name}{{model_name="m",engine="0"}} {value}\n' for name, value in counters)


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    path = tmp_path / "scrapes.prom"
    path.write_text("".join(f"# scraped_at_s {10 * i}\n{page(80 * i)}" for i in range(4)))
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    rows = "".join(f"{i * 0.1:.1f},400,60\n" for i in range(100))
    path.write_text("timestamp_s,input_tokens,output_tokens\n" + rows)
    return path


@pytest.fixture
def url() -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        count = 0

        def do_GET(self) -> None:
            Handler.count += 1
            body = page(5 * Handler.count).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/metrics"
    server.shutdown()
    server.server_close()
    thread.join()


def fail(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run what must be refused; returns the one line."""
    assert main(["shadow", *arguments]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert captured.out == ""
    return line.removeprefix("rose: error: ")


def test_recording_gives_report_json_and_table(
    recording: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(["shadow", "--metrics", str(recording), "--out", str(out), *QUICK]) == 0
    text = capsys.readouterr().out
    assert "m/0: 240 requests in 30 s" in text
    assert "'quiet' could have lent" in text
    result = json.loads((out / "result.json").read_text())
    quiet = result["engines"][0]["modes"]["quiet"]
    assert 0.03 < quiet["lent_fraction"] < 1
    assert sum(each["lent_fraction"] * each["width_s"] for each in quiet["series"]) == pytest.approx(quiet["lent_s"])
    html = (out / "report.html").read_text()
    assert result["advice"][0].split(";")[0].replace("'", "&#x27;") in html
    assert "http://" not in html.replace("http://www.w3.org", "")
    assert "<script" not in html
    assert "<svg" in html


def test_json_alone_on_standard_output(recording: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shadow", "--metrics", str(recording), "--json", *QUICK]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["slo"] == {"ttft_ms": 500.0, "tpot_ms": 150.0}
    assert captured.err == ""


def test_live_page_is_read_and_kept(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert (
        main(
            ["shadow", "--metrics", url, "--duration", "0.4", "--interval", "0.1", "--out", str(out), "--json", *QUICK]
        )
        == 0
    )
    captured = capsys.readouterr()
    live = json.loads(captured.out)
    assert "reading http" in captured.err
    assert main(["shadow", "--metrics", str(out / "scrapes.prom"), "--json", *QUICK]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["engines"][0]["requests"] == live["engines"][0]["requests"] == 20
    assert again["engines"][0]["duration_s"] == pytest.approx(live["engines"][0]["duration_s"], abs=0.01)


def test_trace_and_its_beginning(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shadow", "--metrics", str(trace), "--duration", "5", "--json", *QUICK]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["kind"] == "servegen trace"
    assert result["engines"][0]["requests"] == 50
    assert result["engines"][0]["duration_s"] == 5


def test_several_modes_are_compared(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["shadow", "--metrics", str(trace), "--mode", "slo", "quiet", "--mode", "strict", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    lent = {name: mode["lent_s"] for name, mode in result["engines"][0]["modes"].items()}
    assert lent["slo"] > lent["quiet"] > lent["strict"] > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--mode", "closed"], "--mode: 'closed' is no mode of lending; choose of slo, quiet, strict, paper, ungated"),
        (["--profile", "b300:gpt"], "unknown device profile 'b300:gpt'"),
        (["--slo-tpot-ms", "0"], "--slo-tpot-ms 0 is of no use; it must be above 0"),
        (["--slo-ttft-ms", "inf"], "--slo-ttft-ms inf is of no use; it must be finite"),
        (
            ["--slo-tpot-ms", "40"],
            "no mode could be judged: a TPOT SLO of 0.04 s leaves no room for one serving prefill",
        ),
        (["--chunk-tokens", "0"], "--chunk-tokens 0 is of no use; it must be 1 or more"),
        (["--draws", "0"], "--draws 0 is of no use"),
        (["--kv-pool-gb", "-4"], "--kv-pool-gb -4 is of no use; it must be above 0"),
        (["--kv-pool-gb", "1"], "leaves no room for rollouts"),
        (["--kv-pool-gb", "nan"], "--kv-pool-gb nan is of no use; it must be finite"),
        (["--interval", "0"], "--interval 0 is of no use; it must be 0.1 or more"),
        (["--duration", "0"], "--duration 0 is of no use; it must be above 0"),
        (["--rollout-profile", "h100x4:qwen3-32b"], "choose profiles of as many"),
    ],
)
def test_options_are_refused(trace: Path, capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert said in fail(capsys, "--metrics", str(trace), *options)


def test_files_and_addresses_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "missing.prom"
    assert "cannot be read" in fail(capsys, "--metrics", str(missing))
    poor = tmp_path / "poor.prom"
    poor.write_text("".join(f"# scraped_at_s {i}\nvllm:prompt_tokens_total 1\n" for i in range(2)))
    assert "has no vllm:generation_tokens_total" in fail(capsys, "--metrics", str(poor))
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "choose another folder" in fail(capsys, "--metrics", str(poor), "--out", str(blocked / "x"))
    assert main(["shadow", "--metrics", "http://127.0.0.1:9/metrics", "--interval", "0.1"]) == 2
    assert "refused; check the address" in capsys.readouterr().err
    assert "URL scheme 'ftp' is not read" in fail(capsys, "--metrics", "ftp://10.0.0.5/metrics")
    broken = tmp_path / "broken.prom"
    broken.write_text('vllm:prompt_tokens_total{model="m" 1\n')
    assert "neither Prometheus text nor a known trace format was recognised" in fail(capsys, "--metrics", str(broken))


def test_a_refused_mode_does_not_end_the_report(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refusing(load: Any, site: Any, mode: Mode | None, **rest: Any) -> Any:
        return simulate(load, attrs.evolve(site, slo=Slo(tpot_s=0.04)) if mode is Mode.SLO else site, mode, **rest)

    monkeypatch.setattr("rose.simulation.shadow.study.simulate", refusing)
    options = ["--mode", "slo", "strict", "--duration", "2", "--out", str(tmp_path)]
    assert main(["shadow", "--metrics", str(trace), *options]) == 0
    assert "refused" in capsys.readouterr().out
    result = json.loads((tmp_path / "result.json").read_text())
    (engine,) = result["engines"]
    assert list(engine["modes"]) == list(result["total"]) == ["strict"]
    reason = engine["refused"]["slo"]
    assert "leaves no room for one serving prefill chunk of 2048 tokens" in reason
    assert "lower --chunk-tokens or raise --slo-tpot-ms" in reason
    assert "slo." not in reason
    assert reason in result["advice"][0]
    assert "raise --slo-tpot-ms" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize("is_kept", [True, False])
def test_interrupted_computation_says_where_the_scrapes_are(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *, is_kept: bool
) -> None:
    saved = tmp_path / "scrapes.prom"

    def interrupted(*_: Any) -> None:
        assert not is_kept or saved.read_text().count("scraped_at_s") >= 2
        raise KeyboardInterrupt

    monkeypatch.setattr("rose.simulation.shadow.study.shadow_engines", interrupted)
    options = ["--out", str(tmp_path)] if is_kept else []
    assert main(["shadow", "--metrics", url, "--duration", "0.2", "--interval", "0.1", *options]) == 130
    said = capsys.readouterr().err
    assert (f"what was read is in {saved}" if is_kept else "not kept without --out") in said
    assert said.endswith("interrupted\n")
