"""The front over a pool's service: connection, store and publishers are real, engines are not."""

import asyncio
import contextlib
from types import SimpleNamespace

import pytest
import torch

from doubles import openrlhf_params
from harness import make_model
from rose import RolloutPool
from rose.backends.memory import MemoryTransport
from rose.errors import ConfigError, LayoutMismatchError, TransportError, TurnFailedError
from rose.frameworks import PoolPlace, PushReport
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.pool import SyncReport
from rose.pool.store_offer import StoreOffer
from rose.testing import FakeEngine, Fault, FaultKind
from rose.transfer.export import export_version
from rose.types import EngineId
from rose_openrlhf import workers
from rose_openrlhf.actor import FrontActor, FrontSettings, check_first, describe
from rose_openrlhf.flags import Options

workers.set_up()


@contextlib.asynccontextmanager
async def pool_of(*engines, has_store=True):
    store = MemoryTransport()
    with contextlib.closing(store):
        offer = StoreOffer(address=store.serve()) if has_store else None
        async with RolloutPool(engines) as pool, serve_pool(PoolService(pool, name="m", store=offer)) as url:
            yield url, pool, store


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("actor") / "model")


OPEN = []


@pytest.fixture(autouse=True)
async def closing():
    yield
    for one in OPEN:
        await one.close()
    OPEN.clear()


def front(url, model, run="openrlhf-test", **options):
    OPEN.append(make_front(url, model, run, **options))
    return OPEN[-1]


def make_front(url, model, run, agent=None, reward=None, **options):
    return FrontActor(
        FrontSettings(
            place=PoolPlace(url=url),
            options=Options(**{"retry_s": 0.5, "sync_timeout_s": 20.0, **options}),
            run=run,
            model=str(model),
            param_dtype="bf16",
            max_model_len=96,
            agent_func_path=agent,
            remote_rm_url=reward,
            device="cpu",
        )
    )


class Sender:
    """A group that hands over what the trainer sends."""

    def __init__(self, tensors):
        self.left = list(tensors)

    def receive(self, dtype, shape):
        tensor = self.left.pop(0)
        assert (tensor.dtype, tuple(tensor.shape)) == (dtype, tuple(shape))
        return tensor


def parameters(model):
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16)
    return {name: value.detach() for name, value in loaded.named_parameters()}


async def sync(one, tensors):
    one.member = Sender(tensors.values())
    for number, (name, tensor) in enumerate(tensors.items(), 1):
        await one.update_weight(name, tensor.dtype, tensor.shape, empty_cache=number == len(tensors))


async def published(store, folder):
    from safetensors.torch import load_file

    report = await asyncio.to_thread(export_version, store, folder)
    return report.version.n, {name: value for file in report.files for name, value in load_file(folder / file).items()}


async def test_the_checkpoint_is_version_0_and_syncs_follow(model, tmp_path):
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, pool, store):
        one = front(url, model)
        assert await one.open() == 0
        weights = parameters(model)
        number, found = await published(store, tmp_path / "0")
        assert number == 0
        assert all(found[name].equal(value) for name, value in weights.items())
        assert set(found) == set(weights)  # the names of a sync
        await sync(one, weights)  # nothing changed
        assert str(pool.snapshot().version) == "openrlhf-test:1"
        changed = {name: value + 1 for name, value in weights.items()}
        await sync(one, changed)
        number, found = await published(store, tmp_path / "2")
        assert number == 2
        assert all(found[name].equal(value) for name, value in changed.items())
        answer = await one.generate([5, 6], openrlhf_params(max_tokens=4))
        assert [str(span.version) for span in answer.rose.versions] == ["openrlhf-test:2"]
        assert one.runner.version() == 2  # what turns ask for at least


async def test_an_engine_that_fails_an_update_is_left_out_and_the_job_goes_on(model):
    engines = (
        FakeEngine(engine_id=EngineId("e0")),
        FakeEngine(engine_id=EngineId("e1"), faults=(Fault(kind=FaultKind.FENCE, request_index=1),)),
    )
    async with pool_of(*engines) as (url, _, __):
        one = front(url, model)
        await one.open()
        await sync(one, parameters(model))
        answers = [await one.generate([5, 6], openrlhf_params(max_tokens=4)) for _ in range(4)]
        assert {hop.engine_id for answer in answers for hop in answer.rose.hops} == {"e0"}


async def test_a_version_that_no_engine_took_is_asked_for_by_no_turn(model):
    """As when the pool's engines cannot reach the store for a moment: they stay as they are."""
    engine = FakeEngine(engine_id=EngineId("e0"))
    stage = engine.stage

    async def away(update):
        raise TransportError("the store is away")

    async with pool_of(engine) as (url, _, __):
        one = front(url, model)
        await one.open()
        engine.stage = away
        await sync(one, parameters(model))
        answer = await asyncio.wait_for(one.generate([5, 6], openrlhf_params(max_tokens=4)), 20)
        assert [str(span.version) for span in answer.rose.versions] == ["openrlhf-test:0"]
        engine.stage = stage
        await sync(one, parameters(model))
        answer = await one.generate([5, 6], openrlhf_params(max_tokens=4))
        assert [str(span.version) for span in answer.rose.versions] == ["openrlhf-test:2"]


async def test_another_jobs_weights_are_no_answer(model):
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, _, __):
        one = front(url, model)
        await one.open()
        await front(url, model, run="another").open()
        with pytest.raises(ConfigError, match=r"another:0, not of openrlhf-test .* a pool of its own"):
            await one.generate([5, 6], openrlhf_params(max_tokens=4))


async def test_a_sync_that_did_not_reach_the_pool_is_made_up_for(model, monkeypatch):
    calls, call = [], PoolPlace.call

    def broken_once(self, method, path, *args, **named):
        calls.append(path)
        if path == "/v1/sync" and calls.count(path) == 1:
            raise TransportError("the pool was away for a moment")
        return call(self, method, path, *args, **named)

    monkeypatch.setattr(PoolPlace, "call", broken_once)
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, _, __):
        one = front(url, model, retry_s=10.0)
        assert await one.open() == 0
        assert calls.count("/v1/sync") == 2
        answer = await asyncio.wait_for(one.generate([5, 6], openrlhf_params(max_tokens=4)), 20)
        assert [str(span.version) for span in answer.rose.versions] == ["openrlhf-test:0"]


async def test_a_sync_is_asked_for_again_for_as_long_as_the_flag_says(model, monkeypatch):
    calls, call = [], PoolPlace.call

    def broken(self, method, path, *args, **named):
        calls.append(path)
        if path == "/v1/sync":
            raise TransportError("the pool is away")
        return call(self, method, path, *args, **named)

    monkeypatch.setattr(PoolPlace, "call", broken)
    monkeypatch.setattr("rose.frameworks.push._REST_S", 0.4)
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, _, __):
        with pytest.raises(TransportError, match="the pool is away"):
            await front(url, model, retry_s=0.5).open()
    assert calls.count("/v1/sync") == 2


async def test_a_turn_does_not_wait_for_weights_that_the_pool_has_no_more(model):
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, _, __):
        one = front(url, model)
        await one.open()
        await sync(one, parameters(model))
        await front(url, model, run="another").open()
        with pytest.raises(
            TurnFailedError, match=r"the pool is at another:0, and has lost the weights of this job, openrlhf-test"
        ):
            await asyncio.wait_for(one.generate([5, 6], openrlhf_params(max_tokens=4)), 20)


async def test_a_pool_that_is_still_being_brought_to_the_first_weights_has_not_lost_them(model):
    slow, has_staged = FakeEngine(engine_id=EngineId("e0")), asyncio.Event()
    stage = slow.stage

    async def staged(update):
        await has_staged.wait()
        await stage(update)

    slow.stage = staged
    async with pool_of(slow) as (url, pool, _):
        one = front(url, model, sync_timeout_s=0.1, retry_s=0.1)
        assert await one.open() == 0  # training goes on without engines that take long
        waiting = asyncio.ensure_future(one.generate([5, 6], openrlhf_params(max_tokens=4)))
        done, _ = await asyncio.wait({waiting}, timeout=1.0)  # ten times as long as lost weights are waited for
        assert (done, pool.snapshot().num_waiting) == (set(), 1)
        has_staged.set()
        answer = await asyncio.wait_for(waiting, 20)
        assert [str(span.version) for span in answer.rose.versions] == ["openrlhf-test:0"]


async def test_weights_may_be_cast(model, tmp_path):
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, _, store):
        await front(url, model, weights_dtype="float32").open()
        _, found = await published(store, tmp_path / "0")
        assert {value.dtype for value in found.values()} == {torch.float32}


async def test_a_checkpoint_that_engines_have_is_not_sent(model):
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, pool, _):
        one = front(url, model, initial_weights="skip")
        assert await one.open() is None
        answer = await one.generate([5, 6], openrlhf_params(max_tokens=4))
        assert len(answer.outputs[0].token_ids) == 4
        assert pool.snapshot().version is None


async def test_what_a_front_needs_is_asked_for_at_once(model):
    async with pool_of(FakeEngine(engine_id=EngineId("e0")), has_store=False) as (url, _, __):
        with pytest.raises(ConfigError, match="keeper"):
            await make_front(url, model, "r").open()
        assert not [task for task in asyncio.all_tasks() if task.get_name() == "rose-pool"]  # the connection was left


async def test_no_engine_that_can_hold_the_weights_ends_the_job_before_it_begins(model):
    broken = FakeEngine(engine_id=EngineId("e0"), faults=(Fault(kind=FaultKind.FENCE, request_index=0),))
    async with pool_of(broken) as (url, _, __):
        with pytest.raises(ConfigError, match=r"give --rose\.weights_dtype\. Engine e0 says: "):
            await front(url, model).open()


@pytest.mark.parametrize(("text", "said"), [
    (None, "FileNotFoundError: .*agent.py"),
    ("x = 1", "AssertionError: Agent module must contain AgentExecutor class"),
    ("x = 1\nimport nothing_of_this_name", r"ModuleNotFoundError: .* \(line 2\)$"),
    ("x = = 1", r"SyntaxError: .* \(agent\.py, line 1\)$"),
])  # fmt: skip
async def test_an_agent_that_cannot_be_loaded_is_named(text, said, model, tmp_path):
    path = tmp_path / "agent.py"
    if text is not None:
        path.write_text(text)
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, _, __):
        with pytest.raises(ConfigError, match=rf"--train\.agent_func_path \S+ cannot be loaded: {said}") as caught:
            await front(url, model, agent=str(path)).open()
        assert "\n" not in str(caught.value)


async def test_a_reward_or_a_checkpoint_that_cannot_be_loaded_is_named(model, tmp_path):
    async with pool_of(FakeEngine(engine_id=EngineId("e0"))) as (url, _, __):
        with pytest.raises(
            ConfigError, match=r"--reward\.remote_url .*nowhere\.py.* cannot be loaded: FileNotFoundError"
        ):
            await front(url, model, reward=[str(tmp_path / "nowhere.py")]).open()
        with pytest.raises(ConfigError, match=r"--actor\.model_name_or_path \S+nowhere cannot be loaded: OSError"):
            await front(url, tmp_path / "nowhere").open()


def test_of_hundreds_of_tensors_that_do_not_fit_a_few_are_named():
    errors = {"e0": LayoutMismatchError("; ".join(f"layer {n} is unknown" for n in range(100)))}
    with pytest.raises(ConfigError, match=r"says: layer 0 is unknown; layer 1 .*; layer 2 is unknown; and 97 more$"):
        check_first(report_of(errors=errors))


def test_a_store_that_no_engine_reaches_is_no_wrong_model():
    away = TransportError("the store at 127.0.0.1:7000 cannot be reached")
    with pytest.raises(
        ConfigError, match=r"\[transport\] listen .* Engine e0 says: the store at 127\.0\.0\.1:7000"
    ) as caught:
        check_first(report_of(errors={"e0": away}))
    assert "same model" not in str(caught.value)


def test_a_wrong_model_is_told_beside_an_engine_that_is_away():
    errors = {"e0": TransportError("away"), "e1": LayoutMismatchError("layer 0 is unknown")}
    with pytest.raises(ConfigError, match=r"same model.*Engine e1 says: layer 0 is unknown"):
        check_first(report_of(errors=errors))


def test_a_first_sync_that_failed_as_a_whole_is_told_in_its_own_words():
    with pytest.raises(TransportError, match="the pool is away"):
        check_first(PushReport(publish=None, problem="the pool is away", error=TransportError("the pool is away")))


def report_of(*, errors=(), activations=()):
    return PushReport(publish=None, sync=SyncReport(activations=dict(activations), unchanged=(), errors=dict(errors)))


def test_a_line_a_push():
    late = SimpleNamespace(version="r:1", sync=None, problem="not after 3 s", error=None, is_with_nobody=False)
    assert describe(late) == "weights r:1: published; not after 3 s"
    check_first(late)  # engines that are slow may still come
    done = SimpleNamespace(
        version="r:1",
        sync=SimpleNamespace(activations={"a": 1}, unchanged=()),
        problem="",
        errors={"b": TransportError("x")},
        error=None,
        is_with_nobody=False,
    )
    assert describe(done) == "weights r:1: 1 engines have them; not b (TransportError)"
    check_first(done)
