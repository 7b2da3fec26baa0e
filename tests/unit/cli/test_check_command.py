from __future__ import annotations

import asyncio
import contextlib
import json
import math
import threading

import pytest

from rose.backends.memory import MemoryTransport
from rose.cli.check_target import EngineEntry, fitted, make_engine, opened, weights_of
from rose.cli.main import main
from rose.errors import ConfigError, RequestRefusedError
from rose.interfaces.serving import ServingEngine
from rose.testing import FakeEngine, FakeTrainer
from rose.testing.conformance import SuiteConfig, check_names
from rose.transfer.publisher import Publisher
from rose.types import WeightVersion

CONFIG = """
weights = "numbers"
[engine]
backend = "{backend}"
options = {{token_s = 0.001, weight_version = "run:3"}}
[suite]
vocab_size = 1000
max_model_len = 4096
long_tokens = 64
quiet_s = 0.01
"""


class Deaf(FakeEngine):
    """Does not listen to aborts."""

    async def abort(self, request_id):
        pass


class Refuses(FakeEngine):
    async def generate(self, request):
        raise RequestRefusedError
        yield


class Started(FakeEngine):
    """Has to be started, and is not to be started twice."""

    num_starts = num_closes = 0

    async def start(self):
        type(self).num_starts += 1

    async def close(self):
        type(self).num_closes += 1


class Plain(ServingEngine):
    pass


@pytest.fixture
def config(tmp_path):
    def write(backend="rose.testing:FakeEngine", text=CONFIG):
        path = tmp_path / "engine.toml"
        path.write_text(text.format(backend=backend), encoding="utf-8")
        return str(path)

    return write


def test_a_sound_engine_is_exit_code_0(config, capsys):
    assert main(["check", config()]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [[name, "pass"] for name in check_names()]
    assert lines[-1] == f"{len(check_names())} pass, 0 fail, 0 cannot"


def test_a_failure_is_exit_code_2_and_says_what_was_seen(config, capsys):
    checks = ["abort_keeps_the_tokens", "abort_of_an_unknown_request_is_a_no_op"]
    assert main(["check", config(f"{__name__}:Deaf"), "--only", *checks]) == 2
    out = capsys.readouterr().out
    assert "abort_keeps_the_tokens                       fail" in out
    assert "An aborted stream ends with ABORTED" in out
    assert out.endswith("1 pass, 1 fail, 0 cannot\n")


def test_one_json_document(config, capsys):
    assert main(["check", config(f"{__name__}:Deaf"), "--json", "--only", "abort_keeps_the_tokens"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert (document["pass"], document["fail"], document["cannot"]) == (0, 1, 0)
    (row,) = document["checks"]
    assert (row["check"], row["verdict"]) == ("abort_keeps_the_tokens", "fail")
    assert row["why"]
    assert row["advice"]


def test_an_engine_that_passes_nothing_is_no_success(config, capsys):
    text = CONFIG.replace('weights = "numbers"', "")
    assert main(["check", config(text=text), "--only", "stage_changes_nothing"]) == 2
    assert "cannot" in capsys.readouterr().out


def test_the_names_of_the_checks(capsys):
    assert main(["check", "--list"]) == 0
    assert capsys.readouterr().out.split() == list(check_names())


def test_an_engine_that_must_be_started_is_started_once(config):
    assert main(["check", config(f"{__name__}:Started"), "--only", *check_names()[:4]]) == 0
    assert (Started.num_starts, Started.num_closes) == (1, 1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["htp://127.0.0.1:1"], "is no URL of an engine; those begin with http:// or https://"),
        (["/nowhere.toml"], "cannot read the configuration file /nowhere.toml"),
        ([], "arguments are required: URL|CONFIG"),
        (["http://127.0.0.1:9"], "failed"),
        (["CONFIG", "--only", "nothing"], "no check called nothing"),
        (["CONFIG", "--vocab-size", "1"], "--vocab-size must be an integer >= 2"),
        (["CONFIG", "--max-model-len", "8"], "--max-model-len must be"),
        (["CONFIG", "--weights", "ftp:there"], "--weights 'ftp:there' is neither"),
        (["CONFIG", "--lease", "seven"], "--lease 'seven' is no fencing token"),
        (["CONFIG", "--lease", "7"], "takes no lease"),
        (["CONFIG", "--token-file", "/nowhere"], "cannot read a token"),
    ],
)
def test_what_can_be_put_right_is_one_line(config, capsys, arguments, complaint):
    arguments = [config() if each == "CONFIG" else each for each in arguments]
    assert main(["check", *arguments]) == 2
    err = capsys.readouterr().err
    assert complaint in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("backend", "complaint"),
    [
        ("nothing", "no serving backend is called 'nothing'"),
        ("no_such_module:Engine", "cannot import 'no_such_module:Engine'"),
        ("rose.testing:Nothing", "names nothing"),
        ("rose.testing:FakeTrainer", "is not a subclass of ServingEngine"),
        (f"{__name__}:Plain", "cannot be made with these options"),
    ],
)
def test_backends_that_are_none(config, capsys, backend, complaint):
    assert main(["check", config(backend)]) == 2
    assert complaint in capsys.readouterr().err


def test_options_are_read_as_the_constructor_wants_them():
    engine = make_engine(EngineEntry(backend="rose.testing:FakeEngine", options={"weight_version": "run:7"}))
    assert engine.weight_version == WeightVersion("run", 7)
    with pytest.raises(ConfigError, match=r"engine.options.weight_version: a weight version is written run:n"):
        make_engine(EngineEntry(backend="rose.testing:FakeEngine", options={"weight_version": "seven"}))


def test_an_engine_of_one_options_class_takes_its_fields():
    options = {"model": "m", "max_num_seqs": 4, "initial_version": "run:0"}
    engine = make_engine(EngineEntry(backend="vllm-inprocess", options=options))
    assert (engine.options.model, engine.options.max_num_seqs, engine.engine_id) == ("m", 4, "check")
    assert engine.options.initial_version == WeightVersion("run", 0)
    with pytest.raises(ConfigError, match="max_num_seq: unknown key"):
        make_engine(EngineEntry(backend="vllm-inprocess", options={"model": "m", "max_num_seq": 4}))


def test_long_streams_fit_into_the_model():
    assert fitted(SuiteConfig(max_model_len=128)).long_tokens == 122
    assert fitted(SuiteConfig(max_model_len=4096)).long_tokens == 256
    assert fitted(SuiteConfig()).long_tokens == 256
    with pytest.raises(ConfigError, match="no room"):
        fitted(SuiteConfig(max_model_len=32, prompt=(1,) * 20))


async def test_an_engine_that_serves_nothing_is_left_to_the_checks():
    async with opened(EngineEntry(backend=f"{__name__}:Refuses")) as opener:
        assert isinstance(await opener(), Refuses)


async def test_updates_come_from_a_store(monkeypatch):
    store = MemoryTransport()
    options = dict(store.serve().options)
    monkeypatch.setenv("ROSE_UPSTREAM_TOKEN", str(options["token"]))
    publisher = Publisher(FakeTrainer(), store, run="job")
    where = f"memory:{options['host']}:{options['port']}"
    try:
        async with weights_of(where) as updater:
            assert updater is not None
            with pytest.raises(ConfigError, match="nothing is published"):
                await updater(FakeEngine())
            await asyncio.to_thread(publisher.publish_sync)
            for known in (None, WeightVersion("job", 0)):
                update = await updater(FakeEngine(weight_version=known))
                assert update.target == WeightVersion("job", 0)
    finally:
        store.close()


_OF_SERVERS = (
    "one_logprob_a_token",
    "abort_keeps_the_tokens",
    "requests_wait_while_paused",
    "an_over_long_prompt_is_refused",
    "a_continuation_takes_the_rest_of_the_budget",
    "snapshot_counts_requests",
    "streams_survive_an_activation",
)


@contextlib.contextmanager
def in_the_background(serve):
    """Run an asynchronous context manager's server beside the command line, which has a loop of its own; gives what it gives."""
    ready, done, given = threading.Event(), threading.Event(), []

    async def hold():
        async with serve() as value:
            given.append(value)
            ready.set()
            await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=asyncio.run, args=(hold(),))
    thread.start()
    try:
        assert ready.wait(10)
        yield given[0]
    finally:
        done.set()
        thread.join()


def test_an_openai_compatible_server_by_its_url(capsys):
    pytest.importorskip("aiohttp")
    from rose.testing.openai_server import serve_openai  # noqa: PLC0415 - needs aiohttp

    fake = FakeEngine(token_s=0.001, max_model_len=512)
    with in_the_background(lambda: serve_openai(fake, max_model_len=512)) as (url, _):
        assert main(["check", url, "--json", "--long-tokens", "48", "--only", *_OF_SERVERS]) == 0
    rows = {row["check"]: row for row in json.loads(capsys.readouterr().out)["checks"]}
    assert rows["an_over_long_prompt_is_refused"]["verdict"] == "pass", (
        "the server says how long its model's prompts may be"
    )
    assert rows["requests_wait_while_paused"]["verdict"] == "cannot"
    assert {row["verdict"] for row in rows.values()} == {"pass", "cannot"}


def test_an_sglang_server_by_its_url(capsys):
    pytest.importorskip("aiohttp")
    from rose.testing.sglang_server import serve_sglang  # noqa: PLC0415 - needs aiohttp

    fake = FakeEngine(token_s=0.001, max_model_len=512)
    with in_the_background(lambda: serve_sglang(fake)) as (url, server):
        arguments = [
            "check",
            url,
            "--json",
            "--long-tokens",
            "48",
            "--only",
            *_OF_SERVERS,
            "unknown_token_ids_are_refused",
        ]
        assert main(arguments) == 0
    rows = {row["check"]: row["verdict"] for row in json.loads(capsys.readouterr().out)["checks"]}
    assert {name for name, verdict in rows.items() if verdict == "cannot"} == {"streams_survive_an_activation"}
    assert set(rows.values()) == {"pass", "cannot"}
    assert server.died is None


@pytest.mark.parametrize("lease", [True, False])
def test_an_executors_engine_under_a_lease(lease, tmp_path, capsys):
    pytest.importorskip("aiohttp")
    from rose.clocks import MonotonicClock  # noqa: PLC0415
    from rose.coserving.ledger import Ledger  # noqa: PLC0415
    from rose.hosts.http.executor_lease import LeaseGate  # noqa: PLC0415
    from rose.hosts.http.executor_rollout import RolloutSupervisor  # noqa: PLC0415
    from rose.hosts.http.executor_service import RolloutService  # noqa: PLC0415
    from rose.hosts.http.server import bind, make_app, parse_place, served  # noqa: PLC0415
    from rose.policies.admission import Budget  # noqa: PLC0415

    ledger = Ledger.create(tmp_path / "ledger")
    ledger.publish_budget(Budget(fencing_token=7, expires_s=math.inf, is_granted=True))

    async def start():
        return FakeEngine(token_s=0.001)

    @contextlib.asynccontextmanager
    async def serve():
        async with RolloutSupervisor(start) as supervisor:
            await supervisor.wait_until_up()
            async with (
                RolloutService(supervisor, LeaseGate([ledger], MonotonicClock())) as service,
                served(make_app(service.routes()), bind(parse_place("127.0.0.1:0"), ())) as url,
            ):
                yield url

    names = ["abort_keeps_the_tokens", "snapshot_counts_requests", "a_closed_gate_holds_steps_back"]
    with in_the_background(serve) as url:
        code = main(["check", url, "--only", *names, *(["--lease", "7"] if lease else [])])
    said = capsys.readouterr()
    if lease:
        assert (code, said.out.splitlines()[-1]) == (0, "3 pass, 0 fail, 0 cannot")
    else:
        assert code == 2
        assert "name the lease's fencing token (--lease)" in said.err
