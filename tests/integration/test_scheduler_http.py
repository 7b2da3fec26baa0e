from __future__ import annotations

import asyncio
import os
import socket
import stat
import sys
import time

import attrs
import pytest

from rose.bench.scheduler import peers
from rose.bench.scheduler.arrivals import Arrivals
from rose.bench.scheduler.dead_http import _num_lost, _num_requests, measure_dead_http
from rose.bench.scheduler.gateway import Way, _closed_loop, _cpu_s, _figures, _open_loop, _run_turn, measure_gateway
from rose.bench.scheduler.http_engine import Answer, EngineProtocol, Pages
from rose.bench.scheduler.peers import find_router, http_engines, router, router_versions, running
from rose.bench.scheduler.report import ahead_of_routers
from rose.bench.scheduler.routes import CompletionsRoute, GenerateRoute, RemoteRoute, Route
from rose.bench.scheduler.settings import SchedulerSettings
from rose.errors import BackendUnavailableError, EngineError, EngineLostError

ANSWER = Answer(num_chunks=3, chunk_tokens=4, chunk_s=0.0)
PROMPT = tuple(range(500))


@pytest.fixture
async def serve():
    servers = []

    async def start(answer):
        pages = Pages(answer)
        server = await asyncio.get_running_loop().create_server(lambda: EngineProtocol(pages), "127.0.0.1", 0)
        servers.append(server)
        return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"

    yield start
    for server in servers:
        server.close()


@pytest.mark.parametrize("route_type", [CompletionsRoute, GenerateRoute, RemoteRoute])
@pytest.mark.parametrize("chunk_s", [0.0, 0.001])
async def test_every_interface_brings_all_tokens_again_and_again(serve, route_type, chunk_s):
    route = route_type(await serve(attrs.evolve(ANSWER, chunk_s=chunk_s)))
    try:
        counts = [await route.run_turn(number, PROMPT, ANSWER.num_tokens) for number in range(3)]
    finally:
        await route.close()

    assert counts == [12, 12, 12]


@pytest.mark.parametrize("route_type", [CompletionsRoute, RemoteRoute])
async def test_a_dead_engine_fails_and_can_be_read(serve, route_type):
    url = await serve(attrs.evolve(ANSWER, is_dead=True))
    route = route_type(url)
    try:
        with pytest.raises(EngineError):
            await route.run_turn(0, PROMPT, 12)
    finally:
        await route.close()
    assert b'"kv_total_tokens"' in await _get(url, "/v1/snapshot")


async def test_turns_are_spread_over_engines(serve):
    urls = [await serve(ANSWER) for _ in range(2)]
    route = GenerateRoute(*urls)

    assert [next(route._urls) for _ in range(3)] == [
        f"{urls[0]}/generate",
        f"{urls[1]}/generate",
        f"{urls[0]}/generate",
    ]
    await route.close()


async def test_a_request_may_come_in_pieces(serve):
    url = await serve(ANSWER)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    for piece in (b"POST /v1/comple", b"tions HTTP/1.1\r\nContent-Length: 4\r\n\r\n{", b"}  "):
        writer.write(piece)
        await asyncio.sleep(0.01)
    answer = await reader.readuntil(b"0\r\n\r\n")
    writer.close()

    assert answer.count(b"data: {") == 3
    assert b"data: [DONE]" in answer


async def _get(url, path):
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
    writer.write(f"GET {path} HTTP/1.1\r\n\r\n".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0])
    body = await reader.readexactly(length)
    writer.close()
    return body


# Processes.


def test_engines_end_with_the_block_that_started_them():
    with http_engines([[ANSWER]]) as (url,):
        port = int(url.rpartition(":")[2])
        socket.create_connection(("127.0.0.1", port), timeout=5.0).close()

    with pytest.raises(OSError, match=r"refused"):
        socket.create_connection(("127.0.0.1", port), timeout=5.0)


def test_a_process_that_ends_at_once_is_reported(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/bin/false")

    with pytest.raises(EngineLostError, match="ended before it served"), http_engines([[ANSWER]]):
        pass


def test_a_router_that_is_not_there_is_named(tmp_path):
    with pytest.raises(BackendUnavailableError, match=r"there is no smg in .*--peers"):
        find_router("smg", str(tmp_path))


ROUTER = """\
#!{python}
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/readiness" else 404)
        self.end_headers()
    def log_message(self, *args):
        pass
port = int(sys.argv[sys.argv.index("--port") + 1])
assert "--worker-urls" in sys.argv and "round_robin" in sys.argv
http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def _install(folder, name, text):
    program = folder / name
    program.write_text(text, encoding="utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize("name", ["vllm-router", "smg"])
def test_a_router_serves_and_ends(tmp_path, name):
    _install(tmp_path, name, ROUTER.format(python=sys.executable))
    path = find_router(name, str(tmp_path))

    with router(path, name, "round_robin", ["http://127.0.0.1:1"]) as started:
        os.kill(started.pid, 0)
        assert started.url.startswith("http://127.0.0.1:")

    with pytest.raises(ProcessLookupError):
        os.kill(started.pid, 0)
    assert router_versions(str(tmp_path)) == {name: "unknown"}


def test_a_router_that_does_not_come_up_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "_START_S", 2.0)
    _install(tmp_path, "smg", f"#!{sys.executable}\nraise SystemExit(1)\n")

    with pytest.raises(EngineLostError, match="smg did not serve"), router(str(tmp_path / "smg"), "smg", "x", []):
        pass


def test_a_program_that_ignores_the_end_is_ended(monkeypatch):
    monkeypatch.setattr(peers, "_END_S", 0.1)
    stubborn = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"

    with running([sys.executable, "-c", stubborn]) as process:
        assert peers._first_line(process) == "up\n"

    assert process.returncode == -9


# Figures.


class FixedRoute(Route):
    """Gives so many tokens."""

    def __init__(self, num_tokens):
        self.num_tokens = num_tokens
        self.numbers = []

    async def run_turn(self, number, prompt_ids, max_tokens):
        self.numbers.append(number)
        await asyncio.sleep(0.001)
        return self.num_tokens


async def test_both_loops_count_turns():
    way = Way(name="x", route=FixedRoute(64), baseline="x")
    arrivals = Arrivals(rate_per_s=100, duration_s=0.1, prompt_tokens=(1, 2))

    row = await _open_loop(way, arrivals)
    num_open = len(way.route.numbers)
    turns_per_s = await _closed_loop(way, arrivals, 0.05, 4)

    assert num_open == len(arrivals.times_s)
    assert row["p50_ms"] >= 1.0
    assert row["between_cpu_ms"] == 0.0
    assert turns_per_s > 0
    assert len(way.route.numbers) > num_open


async def test_missing_tokens_are_an_error():
    way = Way(name="x", route=FixedRoute(63), baseline="x")

    with pytest.raises(EngineError, match="x: 63 of 64 tokens"):
        await _run_turn(way, Arrivals(rate_per_s=1, duration_s=0.1, prompt_tokens=(1, 2)), 0)


def test_added_is_the_median_of_differences_within_rounds():
    direct = Way(name="direct", route=FixedRoute(1), baseline="direct")
    way = Way(name="x", route=FixedRoute(1), baseline="direct")
    direct.rounds = [{"p50_ms": value, "p99_ms": 9.0} for value in (1.0, 50.0, 2.0)]
    way.rounds = [{"p50_ms": value, "p99_ms": 10.0} for value in (2.0, 50.5, 5.0)]

    figures = _figures(way, [direct, way])

    assert figures["added_p50_ms"] == 1.0
    assert figures["added_p99_ms"] == 1.0
    assert figures["p50_ms"] == 5.0
    assert figures["baseline"] == "direct"
    assert _figures(direct, [direct, way])["added_p50_ms"] == 0.0


def test_rose_is_compared_with_each_router():
    rows = {
        "rose": {"added_p50_ms": 0.25, "added_p99_ms": 1.0},
        "smg": {"added_p50_ms": 0.5, "added_p99_ms": 0.5},
        "direct": {"added_p50_ms": 0.0, "added_p99_ms": 0.0},
    }

    assert ahead_of_routers(rows) == {"smg": {"added_p50_ms": 0.25, "added_p99_ms": -0.5}}
    assert ahead_of_routers({"smg": rows["smg"]}) is None
    assert ahead_of_routers({"rose": rows["rose"]}) is None


def test_cpu_time_is_this_process_own():
    until_s = time.process_time() + 0.05
    while time.process_time() < until_s:
        pass

    assert _cpu_s(os.getpid()) > 0.0
    assert _cpu_s(None) == 0.0
    assert _cpu_s(2**30) == 0.0


async def test_an_engine_counts_its_turns_and_fails_those_of_a_stream(serve):
    url = await serve(attrs.evolve(ANSWER, is_dead=True))
    way = Way(name="x", route=CompletionsRoute(url), baseline="x")
    arrivals = Arrivals(rate_per_s=200, duration_s=0.05, prompt_tokens=(1, 2))
    try:
        num_lost = await _num_lost(way, arrivals)
    finally:
        await way.route.close()

    assert num_lost == len(arrivals.times_s) == await _num_requests(url)


def test_a_dead_server_over_http_loses_the_pool_nothing(tmp_path):
    settings = SchedulerSettings(peers=str(tmp_path)).quick()

    found = measure_dead_http(settings, lambda text: None)

    assert set(found) == {"rose"}
    assert found["rose"].lost == 0
    assert 0 < found["rose"].sent_to_dead < found["rose"].requests


def test_every_way_is_measured_and_absent_routers_are_skipped(tmp_path):
    settings = attrs.evolve(SchedulerSettings(peers=str(tmp_path)).quick(), duration_s=0.1, closed_s=0.05)

    found = measure_gateway(settings, lambda text: None)

    assert set(found["gateway"]) == {"direct", "direct-generate", "direct-rose", "rose", "rose asking", "rose-gateway"}
    assert set(found["skipped"]) == {"vllm-router", "smg"}
    for row in found["gateway"].values():
        assert {"turns_per_s", "added_p50_ms", "added_p99_ms"} <= set(row)
    assert found["gateway_setting"]["num_engines"] == 4
