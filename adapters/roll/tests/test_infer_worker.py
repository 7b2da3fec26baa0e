"""The worker over a real service of a pool of scripted engines; without Ray: what Ray calls are plain methods."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import worker_config

from rose.errors import ConfigError, RequestRefusedError, TransportError
from rose.frameworks import PoolPlace
from rose.testing import FakeEngine, Fault, FaultKind
from rose.types import EngineId, WeightVersion
from rose_roll.infer_worker import RoseFront, RoseInferWorker

pytestmark = pytest.mark.doubles
PARAMS: dict[str, Any] = {
    "max_tokens": 8, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "stop_token_ids": [1, 0], "repetition_penalty": 1.0, "n": 1,
    "stop": None, "logprobs": 0, "output_kind": 2, "include_stop_str_in_output": True,
}  # fmt: skip


@pytest.fixture
def make_front(make_site: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[RoseFront, Any]]:
    def make(*engines: FakeEngine, **config: Any) -> tuple[RoseFront, Any]:
        site = make_site(*engines)
        monkeypatch.setenv("ROSE_POOL", site.url)
        return RoseFront(worker_config(**config)), site

    return make


def payload(rid: str = "r", ids: tuple[int, ...] = (5, 6), **params: Any) -> dict[str, Any]:
    return {"rid": rid, "input_ids": list(ids), "sampling_params": {**PARAMS, **params}}


async def test_a_response_is_what_the_router_wants(make_front: Any) -> None:
    front, _ = make_front(FakeEngine(engine_id=EngineId("e0"), weight_version=WeightVersion("r", 3)))
    await front.initialize(SimpleNamespace())
    response = await front.generate_request(payload())
    assert sorted(response) == ["finish_reasons", "output_logprobs", "output_token_ids", "rose_spans"]
    assert response["finish_reasons"] == ["length"]
    assert [len(response[name][0]) for name in ("output_token_ids", "output_logprobs")] == [8, 8]
    assert response["rose_spans"] == [[{"start": 0, "end": 8, "version": "r:3", "step": None}]]


async def test_several_sequences_of_one_prompt(make_front: Any) -> None:
    front, site = make_front()
    response = await front.generate_request(payload(n=3, temperature=1.0))
    assert [len(one) for one in response["output_token_ids"]] == [8, 8, 8]
    assert len(response["finish_reasons"]) == len(response["output_logprobs"]) == 3
    assert sum(len(one.requests) for one in site.engines) == 3


async def test_an_abort_gives_what_was_drawn(make_front: Any) -> None:
    front, _ = make_front(FakeEngine(engine_id=EngineId("e0"), token_s=0.05))
    running = asyncio.create_task(front.generate_request(payload("r1", max_tokens=100)))
    other = asyncio.create_task(front.generate_request(payload("r2", max_tokens=6)))
    assert (await other)["finish_reasons"] == ["length"]  # so the first one has tokens too
    await front.abort_requests(["r1", "unknown"])
    response = await running
    assert response["finish_reasons"] == ["abort"]
    assert 0 < len(response["output_token_ids"][0]) < 100
    assert len(response["output_token_ids"][0]) == len(response["output_logprobs"][0])


async def test_a_turn_that_fails_for_good_raises_its_own_error(make_front: Any) -> None:
    refusing = Fault(kind=FaultKind.REFUSE)
    front, _ = make_front(FakeEngine(engine_id=EngineId("e0"), faults=[refusing]))
    with pytest.raises(RequestRefusedError):
        await front.generate_request(payload("r1"))


async def test_an_abort_before_the_first_token_is_no_error(make_front: Any) -> None:
    front, site = make_front(FakeEngine(engine_id=EngineId("e0"), first_token_s=60.0))
    running = asyncio.create_task(front.generate_request(payload("r1")))
    while not site.engines[0].requests:
        await asyncio.sleep(0.01)
    await front.abort_requests(["r1"])
    response = await running
    assert response["finish_reasons"] == ["abort"]
    assert response["output_token_ids"] == response["output_logprobs"] == response["rose_spans"] == [[]]


async def test_turns_of_an_environment_stay_on_their_engine(make_front: Any) -> None:
    front, site = make_front()
    ids: tuple[int, ...] = (5, 6)
    for turn in range(4):
        response = await front.generate_request(payload(f"r{turn}", ids))
        ids = (*ids, *response["output_token_ids"][0], 9)
    assert sorted(len(one.requests) for one in site.engines) == [0, 4]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_args": SimpleNamespace(lora_target="all", dtype=None, model_name_or_path=None)}, "lora_target"),
        ({"num_gpus_per_worker": 2}, "tensor_parallel_size: 1"),
    ],
)
async def test_settings_that_cannot_be_kept_end_the_start(make_front: Any, change: dict[str, Any], words: str) -> None:
    front, _ = make_front(**change)
    with pytest.raises(ConfigError, match=words):
        await front.initialize(SimpleNamespace())


async def test_a_pool_that_is_not_there_is_named_at_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROSE_POOL", "http://127.0.0.1:9")
    with pytest.raises(TransportError, match=r"127\.0\.0\.1:9"):
        await RoseFront(worker_config()).initialize(SimpleNamespace())


async def test_what_a_front_does_not_do_is_refused(make_front: Any) -> None:
    front, _ = make_front()
    with pytest.raises(ConfigError, match="top_k: 50"):
        await front.generate_request(payload(top_k=50))
    with pytest.raises(ConfigError, match="multi_modal_data"):
        await front.generate_request({**payload(), "multi_modal_data": {}})
    with pytest.raises(ConfigError, match="lora_target"):
        await front.add_lora(peft_config={})
    with pytest.raises(ConfigError, match="lora_target"):
        await front.broadcast_parameter(names=[], dtypes=[], shapes=[], group_name="g", is_lora=True)
    with pytest.raises(ConfigError, match="generate_opt_level: 1"):
        await front.generate(None)
    with pytest.raises(ConfigError, match="EnvAffinityRouter"):
        front.get_url()


async def test_a_prompt_that_fills_the_context_makes_no_empty_answer(make_front: Any) -> None:
    front, _ = make_front(FakeEngine(engine_id=EngineId("e0"), max_model_len=2))
    with pytest.raises(ConfigError, match="leaves no room"):
        await front.generate_request(payload())


async def test_states_cost_nothing_and_metrics_are_the_pools(make_front: Any) -> None:
    front, _ = make_front()
    await front.offload_states(include=["other"])
    await front.load_states()
    await front.load_states_partial([0])
    await front.offload_states_partial([0])
    await front.process_weights_after_loading()
    assert front.get_metrics().meta_info["metrics"]["rose/num_ready_engines"] == 2.0
    assert front.get_metrics(metric_names=["rose/num_engines"]).meta_info["metrics"] == {"rose/num_engines": 2.0}


async def test_broadcast_weights_are_published_when_all_are_there(
    make_front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, site = make_front()
    sent = {f"layer.{number}.weight": torch.full((4, 3), float(number)) for number in range(4)}
    _receive_from(monkeypatch, sent)
    monkeypatch.setattr("rose_roll.infer_worker.launch_name", lambda worker, purpose: "toy-1")
    for step in range(3):
        for bucket in (list(sent)[:2], list(sent)[2:]):
            await front.broadcast_parameter(
                names=bucket, dtypes=[torch.float32] * 2, shapes=[(4, 3)] * 2, group_name="g"
            )
        assert str(site.call(lambda: site.pool.version)) == ("None" if step == 0 else f"toy-1:{step - 1}")
        await front.load_states()
        assert str(site.call(lambda: site.pool.version)) == f"toy-1:{step}"
        sent["layer.2.weight"] += 1
    assert front.get_metrics().meta_info["metrics"]["rose/num_ready_engines"] == 2.0


async def test_weights_that_the_pool_could_not_bring_to_any_engine_are_asked_for_by_no_turn(
    make_front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    front, _ = make_front()
    sent = {"layer.0.weight": torch.ones(4, 3)}
    _receive_from(monkeypatch, sent)
    monkeypatch.setattr("rose_roll.infer_worker.launch_name", lambda worker, purpose: "toy-1")
    call = PoolPlace.call

    def without_sync(self: PoolPlace, method: str, path: str, *args: Any, **named: Any) -> Any:
        if path == "/v1/sync":
            message = "the store is away"
            raise ConfigError(message)
        return call(self, method, path, *args, **named)

    for _ in range(2):
        await front.broadcast_parameter(names=list(sent), dtypes=["float32"], shapes=[(4, 3)], group_name="g")
        await front.load_states()
        assert (await front._desk()).versions.newest == WeightVersion("toy-1", 0)
        monkeypatch.setattr(PoolPlace, "call", without_sync)


async def test_an_update_that_is_not_whole_is_never_published(make_front: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    front, site = make_front()
    sent = {f"layer.{number}.weight": torch.ones(4, 3) for number in range(2)}
    _receive_from(monkeypatch, sent)
    monkeypatch.setattr("rose_roll.infer_worker.launch_name", lambda worker, purpose: "toy-1")

    async def send(names: list[str]) -> None:
        await front.broadcast_parameter(
            names=names, dtypes=["float32"] * len(names), shapes=[(4, 3)] * len(names), group_name="g"
        )

    await send(list(sent))
    await front.load_states()
    await send(list(sent)[:1])
    with pytest.raises(Exception, match=r"layer\.1\.weight is missing"):
        await front.load_states()
    assert str(site.call(lambda: site.pool.version)) == "toy-1:0"
    await send(list(sent))
    await front.load_states()
    assert str(site.call(lambda: site.pool.version)) == "toy-1:1"


def test_ray_starts_a_front_again() -> None:
    options = RoseInferWorker._default_options
    assert options["max_restarts"] == -1
    assert options["max_task_retries"] == -1


def _receive_from(monkeypatch: pytest.MonkeyPatch, sent: dict[str, torch.Tensor]) -> None:
    """Stand for the group of broadcasts: tensors arrive in the order of the names."""
    names = iter(())

    def broadcast(tensor: torch.Tensor, src_rank: int, group_name: str, **_: Any) -> Any:
        nonlocal names
        del src_rank, group_name
        name = next(names, None)
        if name is None:
            names = iter(sent)
            name = next(names)
        tensor.copy_(sent[name])
        return SimpleNamespace(wait=lambda: None)

    from roll.utils.collective import collective

    monkeypatch.setattr(collective, "broadcast", broadcast)
    monkeypatch.setattr("roll.platforms.current_platform", SimpleNamespace(device_type="cpu"))
