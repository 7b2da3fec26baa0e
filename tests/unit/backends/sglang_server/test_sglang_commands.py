"""Commands to an SGLang engine: both halves of them, over a stand-in of the server's two routes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
from sglang_stand_in import Req, Scheduler, stepping_for

from rose.backends.sglang import commands
from rose.backends.sglang_server.co_serving import settings_from, why_not
from rose.backends.sglang_server.commands import KEY, Commands, plain
from rose.errors import ConfigError, EngineError, EngineUnsupportedError


@attrs.define
class Server:
    """The two routes of a server with one rank."""

    scheduler: Scheduler = attrs.field(factory=Scheduler)
    rose: Any = attrs.field(init=False)
    caps: list[int] = attrs.field(factory=list)
    has_plugin: bool = True

    def __attrs_post_init__(self) -> None:
        def set_cap(num: int) -> int:
            self.caps.append(num)
            return num

        self.rose = Commands(stepping_for(self.scheduler), set_cap)

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        assert path == "/set_internal_state"
        assert all(isinstance(value, int) for value in body["server_args"].values()), "SGLang takes numbers only"
        outcomes = [self.rose.take(key) for key in body["server_args"] if key.startswith(KEY)]
        return [self.has_plugin and all(outcomes)]

    async def get(self, path: str) -> Any:
        assert path == "/server_info"
        state = {"rose": self.rose.state()} if self.has_plugin else {}
        return json.loads(json.dumps({"internal_states": [state]}, allow_nan=False))


async def test_commands_reach_the_engine_and_their_values_come_back() -> None:
    server = Server()
    await commands.set_gate(server, is_open=False)
    assert not (await commands.rose_snapshot(server))["is_gate_open"]
    assert await commands.set_kv_budget(server, 40) == 40
    assert await commands.set_running_cap(server, 3) == 3
    assert server.caps == [3]
    assert await commands.step_log(server) == []
    assert await commands.pacing_report(server) == {}


async def test_a_wrong_command_is_an_error_here_and_changes_nothing_there() -> None:
    server = Server()
    before = await commands.rose_snapshot(server)
    for name, arguments, message in (
        ("frob", {}, "there is no command 'frob'; there are pacing_report,"),
        ("set_gate", {"is_open": 1}, "is_open is true or false, not 1"),
        ("set_kv_budget", {"num_tokens": True}, "num_tokens is a whole number"),
        ("set_kv_budget", {"num_tokens": -1}, "num_tokens is a whole number"),
        ("set_kv_budget", {}, "num_tokens"),
    ):
        with pytest.raises(EngineError, match=message):
            await commands.rose_call(server, name, **arguments)
    assert await commands.rose_snapshot(server) == before
    assert not server.rose.take(KEY + "no json")


async def test_another_client_s_answer_is_not_taken_for_one_s_own() -> None:
    server = Server()
    answers = iter([{"id": "other", "value": 1}])

    class Late(Server):
        async def get(self, path: str) -> Any:
            info = await super().get(path)
            stale = next(answers, None)
            if stale is not None:
                info["internal_states"][0]["rose"]["set_kv_budget"] = stale
            return info

    late = Late(server.scheduler)
    assert await commands.set_kv_budget(late, 7) == 7


async def test_a_server_without_the_plugin_says_what_to_do() -> None:
    with pytest.raises(EngineUnsupportedError, match="install rose-rl"):
        await commands.set_gate(Server(has_plugin=False), is_open=True)


async def test_a_long_answer_is_given_once() -> None:
    server = Server()
    server.rose.take(KEY + json.dumps({"command": "step_log", "id": "x"}))
    assert "step_log" in (await server.get("/server_info"))["internal_states"][0]["rose"]
    assert "step_log" not in (await server.get("/server_info"))["internal_states"][0]["rose"]


async def test_the_snapshot_counts_requests_and_memory() -> None:
    server = Server()
    server.scheduler.run(Req("a", prompt=10))
    server.scheduler.waiting_queue.append(Req("b"))
    snapshot = await commands.rose_snapshot(server)
    assert (snapshot["num_running"], snapshot["num_waiting"], snapshot["kv_used_tokens"]) == (1, 1, 10)


def test_numbers_that_are_none_become_null() -> None:
    assert plain({"a": (math.nan, 1.5, [math.inf])}) == {"a": [None, 1.5, [None]]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "ROSE_SGLANG_SETTINGS is not JSON"),
        ("[]", "ROSE_SGLANG_SETTINGS is a JSON object, not list"),
        ('{"rolle": "alone"}', "rolle"),
        ('{"device": {"kind": "cuda", "path": "/p"}}', "set it to 'sleep'"),
        (
            '{"role": "serving", "device": {"kind": "host", "path": "/p"}, "ledger": "/l", "admission": {"role": "decode"}}',
            "a disaggregated SGLang is not co-served",
        ),
    ],
)
def test_wrong_settings_are_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings_from(text)


def test_no_settings_share_no_device() -> None:
    assert settings_from(None).device is None


@pytest.mark.parametrize(
    ("scheduler", "parallel", "message"),
    [
        ({"enable_overlap": True}, {}, "--disable-overlap-schedule"),
        ({}, {"pp_size": 2}, "--pp-size 1"),
        ({}, {"attn_dp_enabled": True}, "without --enable-dp-attention"),
        ({"disaggregation_mode": SimpleNamespace(value="decode")}, {}, "disaggregated"),
    ],
)
def test_schedulers_that_cannot_be_stepped_are_told_apart(
    scheduler: dict[str, Any], parallel: dict[str, Any], message: str
) -> None:
    own = {"enable_overlap": False, "disaggregation_mode": SimpleNamespace(value="null")}
    ranks = {"pp_size": 1, "attn_dp_enabled": False}
    assert why_not(SimpleNamespace(**own), SimpleNamespace(**ranks)) is None
    problem = why_not(SimpleNamespace(**(own | scheduler)), SimpleNamespace(**(ranks | parallel)))
    assert problem is not None
    assert message in problem
