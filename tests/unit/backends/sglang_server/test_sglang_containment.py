"""Failures of SGLang's own calls end as refusals, on every rank alike."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from rose.backends.sglang_server import containment, hooks
from rose.backends.sglang_server.containment import CONTAINED, UnreadPayloadError, contain

OTHERS_OK = {"value": True}


class Reply(SimpleNamespace):
    """Stands for any of SGLang's replies."""


@pytest.fixture
def lost(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """SGLang's replies are there; returns what notes that weights were written behind ROSE's back."""
    module = ModuleType("sglang.srt.managers")
    outputs = {call.output: Reply for call in CONTAINED.values()}
    outputs |= {"ReleaseMemoryOccupationReqOutput": Reply, "ResumeMemoryOccupationReqOutput": Reply}
    module.io_struct = SimpleNamespace(**outputs)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.managers", module)
    noted: list[Any] = []
    monkeypatch.setattr(hooks, "lose_weights", noted.append)
    gather(monkeypatch)
    return noted


def gather(monkeypatch: pytest.MonkeyPatch, *others: Any) -> list[Any]:
    """Let a rank gather with others that said this; returns what it met in barriers."""
    met: list[Any] = []
    monkeypatch.setattr(hooks, "gather_over", lambda _group: lambda own: [own, *others])
    monkeypatch.setattr(containment, "_meet", lambda _manager, call: met.append(call) if call.has_barrier else None)
    return met


def manager(**fields: Any) -> Any:
    return SimpleNamespace(
        tp_cpu_group=None, _session=object(), scheduler=SimpleNamespace(_engine_paused=False), **fields
    )


def failing(_manager: Any, _request: Any) -> Any:
    message = "what SGLang would end of"
    raise ValueError(message)


def succeeding(_manager: Any, _request: Any) -> Any:
    return Reply(success=True, message="Success")


@pytest.mark.parametrize("name", list(CONTAINED))
def test_an_exception_is_a_refusal_and_its_rank_meets_the_others(
    name: str, lost: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    met = gather(monkeypatch, OTHERS_OK)
    reply = contain(name)(failing, manager(), None)
    assert reply.success is False
    assert "what SGLang would end of" in reply.message
    assert bool(met) is CONTAINED[name].has_barrier
    assert bool(lost) is CONTAINED[name].is_write, "half-written weights are no version"


def test_another_ranks_failure_is_told_by_all(lost: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    gather(monkeypatch, {"error": ["EngineError", "there"]})
    reply = contain("update_weights_from_tensor")(succeeding, manager(), None)
    assert reply.success is False
    assert "there" in reply.message
    assert lost


def test_a_success_passes_and_is_noted(lost: list[Any]) -> None:
    assert contain("update_weights_from_disk")(succeeding, manager(), None).message == "Success"
    assert lost
    lost.clear()
    assert contain("begin_weight_update")(succeeding, manager(), None).success
    assert not lost


def test_a_payload_that_one_rank_cannot_read_is_refused_before_any_write(
    lost: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ModuleType("sglang.srt.runtime_context")
    context.get_parallel = lambda: SimpleNamespace(tp_group=SimpleNamespace(cpu_group=None))  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "sglang.srt.runtime_context", context)
    gather(monkeypatch, {"error": ["EngineError", "no pickle"]})

    def reading(_manager: Any, _request: Any) -> Any:
        return containment.read_payload(lambda _worker, _payloads: "read", None, [])

    with pytest.raises(UnreadPayloadError, match="rank 1: no pickle"):
        reading(None, None)
    gather(monkeypatch)
    refused = contain("update_weights_from_tensor")(
        lambda m, r: containment.read_payload(failing, m, r), manager(), None
    )
    assert "nothing was written" in refused.message
    assert not lost
    assert containment.read_payload(lambda _worker, _payloads: "read", None, []) == "read"


@pytest.mark.parametrize(
    ("tags", "released", "is_idle", "problem"),
    [
        (["kv_cache"], set(), True, None),
        (None, set(), True, None),
        (["kv_cache"], set(), False, "only while no request runs"),
        (["kv_cache"], {"kv_cache"}, True, "released already"),
        (None, {"weights"}, True, "weights: released already"),
        (["heap"], set(), True, "no kind of memory"),
    ],
)
def test_what_cannot_be_released(tags: Any, released: set[str], is_idle: bool, problem: str | None) -> None:  # noqa: FBT001
    found = containment.release_problem(tags, released=released, is_idle=is_idle)
    assert (found is None) if problem is None else (found is not None and problem in found)


@pytest.mark.parametrize(
    ("tags", "released", "problem"),
    [
        (["kv_cache"], {"kv_cache"}, None),
        (["kv_cache"], set(), "kv_cache: not released"),
        (None, {"kv_cache"}, "cuda_graph, weights: not released"),
    ],
)
def test_what_cannot_be_resumed(tags: Any, released: set[str], problem: str | None) -> None:
    assert containment.resume_problem(tags, released=released) == problem


def test_a_refused_memory_call_touches_nothing_and_is_told_once(lost: list[Any]) -> None:
    del lost
    held = manager(offload_tags={"kv_cache"}, is_fully_idle=lambda *, ignore_waiting: not ignore_waiting)
    request = type("ResumeMemoryOccupationReqInput", (), {"tags": ["weights"]})()
    containment.resume_memory(failing, held, request)
    assert held.scheduler.rose_memory_refusal == "weights: not released"
    request.tags = ["kv_cache"]
    assert containment.resume_memory(succeeding, held, request).success
    assert held.scheduler.rose_memory_refusal == ""
