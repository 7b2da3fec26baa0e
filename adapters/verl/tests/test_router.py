"""The router against veRL's own protocol, and the front's answers to control calls."""

import inspect

import pytest

from rose_verl.router import Door, RoseRouter

protocol = pytest.importorskip("verl.workers.rollout.router").RequestLoadBalancer


def methods(cls):
    return {name: one for name, one in vars(cls).items() if inspect.isfunction(one) and not name.startswith("_")}


def test_every_method_of_the_protocol_is_there_with_its_arguments():
    for name, wanted in methods(protocol).items():
        found = methods(RoseRouter)[name]
        asked = list(inspect.signature(wanted).parameters.values())
        given = list(inspect.signature(found).parameters.values())
        assert [(one.kind, one.default) for one in asked] == [(one.kind, one.default) for one in given], name
        named = [one.name for one in asked if one.kind is not inspect.Parameter.VAR_KEYWORD]
        assert named == [one.name for one in given if one.kind is not inspect.Parameter.VAR_KEYWORD]


def router(*names):
    return RoseRouter(
        {name: object() for name in names}, {"router_class": "rose_verl.router.RoseRouter"}, board="board"
    )


def test_turns_are_counted_and_named():
    one = router("a", "b")
    assert one.acquire_server("t1") == ("a", Door("board", "t1"))
    assert one.acquire_server("t1", prompt_ids=[1])[0] == "b"
    assert one.get_total_inflight() == 2
    one.release_server("a", request_id="t1")
    one.release_server("a")
    assert one.get_status() == {"servers": {"a": 0, "b": 1}, "total_inflight": 1, "active_servers": 2}
    assert one.clear_sticky_cache() == {"cleared_entries": 0, "server_loads": {"a": 0, "b": 1}}
    assert one.require_acquire_fields() == one.require_release_fields() == []


def test_fronts_come_and_go():
    one = router("a")
    one.acquire_server("t")
    one.remove_servers(["a"])
    one.release_server("a")
    with pytest.raises(RuntimeError, match="No available servers in load balancer"):
        one.acquire_server("t")
    one.add_servers({"c": object()})
    assert one.get_all_servers() == ["c"]
    assert one.acquire_server("t")[0] == "c"


def test_other_keys_in_the_yaml_are_refused():
    with pytest.raises(ValueError, match="slo_ttft_ms"):
        RoseRouter({}, {"router_class": "x", "slo_ttft_ms": 5})


def test_a_front_answers_every_call_that_a_replica_makes():
    """veRL's replica calls its servers by name; each name that it uses must be there."""
    import re

    from verl.workers.rollout import replica

    from rose_verl.replica import Front

    called = set(re.findall(r"server\.(\w+)\.remote", inspect.getsource(replica.RolloutReplica)))
    assert len(called) >= 8
    for name in called | {"generate", "update_weights", "execute_checkpoint_engine"}:
        assert callable(getattr(Front, name)), name


def test_the_client_takes_what_the_stock_client_takes():
    from verl.workers.rollout.llm_server import LLMServerClient

    from rose_verl.client import RoseClient

    asked = inspect.signature(LLMServerClient.generate).parameters
    given = inspect.signature(RoseClient.generate).parameters
    for name in ("request_id", "prompt_ids", "sampling_params"):
        assert asked[name].kind == given[name].kind
    assert any(
        one.kind is inspect.Parameter.VAR_KEYWORD for one in given.values()
    )  # media and whatever comes, to be refused
