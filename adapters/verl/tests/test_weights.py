"""A rank's pushes to a pool's real service: what engines get, what the board hears, what veRL logs."""

import contextlib

import pytest
import torch

import rose
from here import Here
from rose.backends.memory import MemoryTransport
from rose.errors import ConfigError, LayoutMismatchError, TransferError, TransportError
from rose.frameworks import PoolPlace
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.pool.store_offer import StoreOffer
from rose.testing import FakeEngine, Fault, FaultKind
from rose.types import EngineId, WeightVersion
from rose_verl.board import Board
from rose_verl.engines import CarriedWeights, carrying
from rose_verl.settings import RoseOptions, Settings
from rose_verl.weights import Pusher


@contextlib.asynccontextmanager
async def job(*engines):
    store = MemoryTransport()
    store.serve("127.0.0.1", 0, token="t")  # noqa: S106
    async with rose.RolloutPool(list(engines)) as pool:
        service = PoolService(pool, name="policy", store=StoreOffer(address=store.address()))
        async with serve_pool(service, "127.0.0.1:0") as url:
            settings = Settings(
                place=PoolPlace(url=url),
                options=RoseOptions(sync_timeout_s=10.0),
                prompt_length=8,
                response_length=8,
                max_model_len=None,
                ignore_eos=False,
                dtype="bfloat16",
            )
            board = Board(settings, ack_s=0.2)
            pusher = Pusher(Here(board), settings, await board.run())
            try:
                yield board, pusher
            finally:
                pusher._push.close()
                store.close()


def tensors(step):
    return {"w": torch.full((4, 4), float(step)), "b": torch.arange(3.0)}


async def test_full_tensors_are_cut_coded_and_counted():
    one, two = FakeEngine(engine_id=EngineId("a")), FakeEngine(engine_id=EngineId("b"))
    async with job(one, two) as (board, pusher):
        first = await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
        again = await pusher.push(iter(tensors(1).items()), 1, is_tied=False)
        same = await pusher.push(iter(tensors(1).items()), None, is_tied=False)
        run = await board.run()
        assert one.weight_version == two.weight_version == WeightVersion(run, 2)
        assert dict((await board.known()).steps) == {0: 0, 1: 1, 2: 1}
        assert first["rose/changed_fraction"] == 1.0
        assert again["rose/changed_fraction"] == pytest.approx(16 / 19)
        assert (same["rose/changed_fraction"], same["rose/version"]) == (0.0, 2.0)
        assert first["rose/bytes_dense"] == 2 * 19  # they travel in the engines' type
        assert (again["rose/engines_updated"], again["rose/engines_failed"]) == (2.0, 0.0)


async def test_the_board_knows_the_step_before_an_engine_has_the_version():
    heard = []

    class Engine(FakeEngine):
        async def activate(self):
            news = await board.known()
            heard.append((dict(news.steps), news.newest))
            return await super().activate()

    async with job(Engine()) as (board, pusher):
        await pusher.push(iter(tensors(0).items()), 4, is_tied=False)
        await pusher.push(iter(tensors(1).items()), 5, is_tied=False)
        await pusher.push(iter(tensors(1).items()), None, is_tied=False)
    assert heard == [({0: 4}, None), ({0: 4, 1: 5}, 0), ({0: 4, 1: 5, 2: 5}, 1)]


async def test_an_engine_that_does_not_take_weights_is_named_and_nothing_stops(told):
    bad = FakeEngine(
        engine_id=EngineId("bad"), faults=[Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=n) for n in (1, 2)]
    )
    async with job(bad, FakeEngine(engine_id=EngineId("good"))) as (board, pusher):
        await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
        figures = await pusher.push(iter(tensors(1).items()), 1, is_tied=False)
        assert figures["rose/engines_failed"] == 1.0
        assert (await board.known()).newest == 1
    assert any(level == "ERROR" and text.startswith("engine bad did not take") for level, text in told)
    assert any("gathered by the trainer" in text for _, text in told)


async def test_an_engine_that_is_no_longer_there_is_named_once(told):
    dying = FakeEngine(engine_id=EngineId("dying"))
    async with job(dying, FakeEngine(engine_id=EngineId("well"))) as (_, pusher):
        await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
        dying.die()
        for step in (1, 2, 3):
            await pusher.push(iter(tensors(step).items()), step, is_tied=False)
    assert sum(text.startswith("left the pool") and text.endswith(": dying") for _, text in told) == 1


async def test_first_weights_that_no_engine_takes_end_the_job():
    bad = FakeEngine(engine_id=EngineId("bad"), faults=[Fault(kind=FaultKind.CORRUPT_UPDATE)])
    async with job(bad) as (board, pusher):
        with pytest.raises(TransferError, match=r"bad: .*rollout\.dtype"):
            await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
        assert (await board.known()).newest is None


async def test_a_version_that_the_pool_could_not_bring_to_any_engine_is_asked_for_by_no_turn(monkeypatch, told):
    call = PoolPlace.call

    def without_sync(self, method, path, *args, **named):
        if path == "/v1/sync":
            message = "the pool is away"
            raise TransportError(message)
        return call(self, method, path, *args, **named)

    monkeypatch.setattr("rose.frameworks.push._REST_S", 60.0)  # more than the half minute that it is asked again
    one = FakeEngine(engine_id=EngineId("a"))
    async with job(one) as (board, pusher):
        await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
        with monkeypatch.context() as away:
            away.setattr(PoolPlace, "call", without_sync)
            figures = await pusher.push(iter(tensors(1).items()), 1, is_tied=False)
        known = await board.known()
        assert (known.newest, dict(known.steps), figures["rose/version"]) == (0, {0: 0, 1: 1}, 1.0)
        assert any(level == "ERROR" and text.endswith("no turn asks for it: the pool is away") for level, text in told)
        await pusher.push(iter(tensors(2).items()), 2, is_tied=False)
        assert (await board.known()).newest == one.weight_version.n == 2


async def test_first_weights_that_the_pool_could_not_bring_to_any_engine_end_the_job(monkeypatch):
    async with job(FakeEngine()) as (board, pusher):
        call = PoolPlace.call

        def without_sync(self, method, path, *args, **named):
            if path == "/v1/sync":
                message = "the store is away"
                raise ConfigError(message)
            return call(self, method, path, *args, **named)

        monkeypatch.setattr(PoolPlace, "call", without_sync)
        with pytest.raises(TransferError, match=r"the first weights \(the store is away\)"):
            await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
        assert (await board.known()).newest is None


async def test_first_weights_whose_store_no_engine_reaches_name_the_address(monkeypatch):
    async def away(update):
        message = "the store at 127.0.0.1:7000 cannot be reached"
        raise TransportError(message)

    one = FakeEngine()
    monkeypatch.setattr(one, "stage", away)
    monkeypatch.setattr("rose.frameworks.push._REST_S", 60.0)  # more than the half minute that it is asked again
    async with job(one) as (_, pusher):
        with pytest.raises(TransferError, match=r"127\.0\.0\.1:7000 cannot be reached\); .*\[transport\] listen"):
            await pusher.push(iter(tensors(0).items()), 0, is_tied=False)


async def test_a_store_that_is_gone_says_that_the_job_is_to_begin_again():
    async with job(FakeEngine()) as (_, pusher):
        await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
    with pytest.raises(TransportError, match="start the job again, from its last checkpoint"):
        await pusher.push(iter(tensors(1).items()), 1, is_tied=False)


async def test_tensors_that_change_their_shape_are_an_error_that_names_them():
    async with job(FakeEngine()) as (_, pusher):
        await pusher.push(iter(tensors(0).items()), 0, is_tied=False)
        with pytest.raises(LayoutMismatchError, match="w is"):
            await pusher.push(iter({"w": torch.zeros(2), "b": torch.zeros(3)}.items()), 1, is_tied=False)
        await pusher.push(iter(tensors(2).items()), 2, is_tied=False)  # and the next one is well


class Base:
    """As much of veRL's training engine as matters."""

    def __init__(self, module):
        self.module = module
        self.num_gathers = 0

    def get_per_tensor_param(self, **_):
        def gathered():
            self.num_gathers += 1
            yield from self.module.state_dict().items()

        return gathered(), None


async def test_an_engine_that_carries_itself_is_read_without_a_gather(monkeypatch):
    fsdp_utils = pytest.importorskip("verl.utils.fsdp_utils")
    monkeypatch.setattr(fsdp_utils, "fsdp_version", lambda _: 2)
    model = torch.nn.Linear(3, 2)
    engine = carrying(Base)(model)
    async with job(FakeEngine()) as (_, pusher):
        for step in range(2):
            weights, adapter = engine.get_per_tensor_param(base_sync_done=True)
            assert adapter is None
            figures = await pusher.push(weights, step, is_tied=False)
            with torch.no_grad():
                model.weight[0] += 1
        assert engine.num_gathers == 0
        assert figures["rose/changed_fraction"] == pytest.approx(3 / 8)
        assert dict(CarriedWeights(iter([("x", 1)]), engine)) == {"x": 1}
        monkeypatch.setattr(fsdp_utils, "fsdp_version", lambda _: 1)
        weights, _ = engine.get_per_tensor_param()
        with pytest.raises(ConfigError, match="no longer be published shard by shard"):
            await pusher.push(weights, 2, is_tied=False)
