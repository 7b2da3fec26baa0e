"""Commands to an SGLang engine: both halves of them, over a stand-in of the server's route."""

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
from rose.backends.sglang.calls import call
from rose.backends.sglang_server.co_serving import settings_from, why_not
from rose.backends.sglang_server.commands import ATTRIBUTE, Commands, answer, find, plain
from rose.backends.sglang_server.wire import COMMAND_PREFIX, PATH
from rose.errors import ConfigError, EngineError, EngineUnsupportedError


@attrs.define
class Server:
    """The route of commands of a server with one rank."""

    scheduler: Scheduler = attrs.field(factory=Scheduler)
    caps: list[int] = attrs.field(factory=list)
    has_plugin: bool = True
    is_stepped: bool = True

    def __attrs_post_init__(self) -> None:
        def set_cap(num: int) -> int:
            self.caps.append(num)
            return num

        if self.is_stepped:
            setattr(self.scheduler, ATTRIBUTE, Commands(stepping_for(self.scheduler), set_cap))

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        assert path == PATH
        if not self.has_plugin:
            message = "Unsupported action='rose'"
            raise EngineError(message)
        found = find(body["action"].removeprefix(COMMAND_PREFIX))
        text = "{}" if found is None else answer(self.scheduler, *found)
        return {"success": True, "message": json.dumps(json.loads(text), allow_nan=False)}

    async def get(self, path: str) -> Any:
        raise AssertionError(path)


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
        ("set_gate", {"is_open": 1}, "is_open is true or false, not 1"),
        ("set_kv_budget", {"num_tokens": True}, "num_tokens is a whole number"),
        ("set_kv_budget", {"num_tokens": -1}, "num_tokens is a whole number"),
        ("set_kv_budget", {}, "num_tokens"),
    ):
        with pytest.raises(EngineError, match=message):
            await call(server, name, **arguments)
    assert await commands.rose_snapshot(server) == before


@pytest.mark.parametrize("text", ["no json", "[1]", "3", '{"command": "open"}', '{"command": ["wake"]}', "{}"])
def test_what_is_no_command_of_the_step_loop_is_left_to_others(text: str) -> None:
    assert find(text) is None


async def test_a_server_that_cannot_be_stepped_says_so() -> None:
    with pytest.raises(EngineUnsupportedError, match="--disable-overlap-schedule"):
        await commands.set_gate(Server(is_stepped=False), is_open=True)


async def test_a_server_without_the_plugin_says_what_to_do() -> None:
    with pytest.raises(EngineUnsupportedError, match="install rose-rl"):
        await commands.set_gate(Server(has_plugin=False), is_open=True)


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
        ('{"device": {"kind": "cuda", "path": "/p", "memory": "kvcached"}}', "set it to 'sleep'"),
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
