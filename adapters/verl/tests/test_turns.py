"""Turns of a job over a pool's real service, with scripted engines behind it: what agent loops get, whatever happens meanwhile."""

import asyncio
import contextlib

import attrs
import pytest

import rose
from here import Here
from rose.backends.memory import MemoryTransport
from rose.errors import RequestRefusedError, TransportError, TurnFailedError
from rose.frameworks import PoolPlace
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.testing import FakeEngine, FakeTrainer, Fault, FaultKind
from rose.transfer.publisher import Publisher
from rose.types import EngineId
from rose_verl import desk as desk_module
from rose_verl.board import Board
from rose_verl.router import Door
from rose_verl.settings import RoseOptions, Settings
from rose_verl.turns import run_turn

STOCK = {"temperature": 1.0, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
NO_MEDIA = {"image_data": None, "video_data": None, "audio_data": None, "mm_processor_kwargs": {}}
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


class Job(Here):
    """The board of a job whose trainer publishes to the pool."""

    def __init__(self, board, pool, store, publisher):
        super().__init__(board)
        self._pool, self._store, self._publisher = pool, store, publisher

    async def push(self, step):
        """What the trainer's rank 0 does after a step."""
        await self._actor.note(await self.bring(step), step)

    async def bring(self, step):
        """All of it but the note."""
        version = (await asyncio.to_thread(self._publisher.publish_sync)).version
        await self._actor.announce(version.n, step)
        await self._pool.sync_weights(self._store)
        return version.n


@contextlib.asynccontextmanager
async def job(*engines, **options):
    """A pool over engines, and its job, whose step 7 all engines hold."""
    async with (
        rose.RolloutPool(list(engines)) as pool,
        serve_pool(PoolService(pool, name="policy"), "127.0.0.1:0") as url,
    ):
        settings = Settings(
            place=PoolPlace(url=url),
            options=RoseOptions(**options),
            prompt_length=16,
            response_length=12,
            max_model_len=None,
            ignore_eos=False,
            dtype="float32",
        )
        board, store = Board(settings, ack_s=0.5), MemoryTransport()
        publisher = Publisher(FakeTrainer(), store, run=await board.run())
        one = Job(board, pool, store, publisher)
        await one.push(7)
        try:
            yield one
        finally:
            await leave(publisher)


async def leave(publisher):
    """End what a process keeps until its end."""
    for desk in desk_module._desks.values():
        if desk._listener is not None:
            desk._listener.cancel()
        if desk._pool is not None:
            await desk._pool.close()
    desk_module._desks.clear()
    await asyncio.to_thread(publisher.close)


def engine(name="e0", **fields):
    return FakeEngine(engine_id=EngineId(name), **fields)


async def turn(board, prompt=(1, 2, 3), trajectory="t", params=STOCK, *, is_resumed=True):
    return await run_turn(board, trajectory, list(prompt), params, NO_MEDIA, is_resumed=is_resumed)


async def test_a_turn_comes_back_as_it_is_wanted():
    async with job(engine()) as board:
        output = await turn(board)
        assert len(output.token_ids) == len(output.log_probs) == 12
        assert (output.stop_reason, output.num_preempted, output.routed_experts) == ("completed", 0, None)
        fields = output.extra_fields
        assert (fields["global_steps"], fields["min_global_steps"], fields["max_global_steps"]) == (7, 7, 7)
        assert fields["version_spans"] == [[0, 12, 7]]
        assert fields["rose_turns"] == [{"version_spans": [[3, 15, 7]], "hops": fields["hops"]}]


async def test_log_probs_that_were_not_asked_for_are_none():
    async with job(engine()) as board:
        output = await turn(board, params={**STOCK, "logprobs": False})
        assert output.log_probs is None
        assert len(output.token_ids) == 12


async def test_the_pool_hears_the_trajectory_and_the_group():
    one, two = engine("e0"), engine("e1")
    async with job(one, two) as board:
        first = await turn(board, params={**STOCK, "max_tokens": 2})
        for n in range(3):
            more = [1, 2, 3, *first.token_ids, 9 + n]
            await turn(board, more, params={**STOCK, "max_tokens": 2})
        served = [one for one in (one, two) if one.requests]
        assert len(served) == 1  # a trajectory stays where its prefix is


async def test_engines_that_miss_an_update_get_no_turns_of_the_step():
    behind = engine("behind", faults=[Fault(kind=FaultKind.CORRUPT_UPDATE, request_index=n) for n in (1, 2, 3)])
    async with job(behind, engine("ahead")) as board:
        outputs = await asyncio.gather(*(turn(board, (1, 2, n), f"u{n}") for n in range(6)))
        assert {output.extra_fields["hops"][-1][0] for output in outputs} == {"ahead", "behind"}
        await board.push(8)
        outputs = await asyncio.gather(*(turn(board, (1, 2, n), f"t{n}") for n in range(6)))
        assert {output.extra_fields["hops"][-1][0] for output in outputs} == {"ahead"}
        assert {output.extra_fields["global_steps"] for output in outputs} == {8}


async def test_a_turn_waits_for_the_newest_version_that_was_noted():
    async with job(engine()) as board:
        await turn(board, trajectory="warm")
        await board._actor.note(1, 8)  # the trainer has pushed it; no engine has it yet
        waiting = asyncio.ensure_future(turn(board))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await board.push(8)
        assert (await waiting).extra_fields["min_global_steps"] == 8


async def test_tokens_of_weights_that_are_with_the_engines_and_not_yet_noted_have_their_step():
    async with job(engine()) as board:
        await turn(board, trajectory="warm")
        number = await board.bring(8)
        output = await turn(board)
        assert output.extra_fields["version_spans"] == [[0, 12, 8]]
        assert desk_module.desk_of(board)._newest == 0  # other engines may lack it
        await board._actor.note(number, 8)
        assert desk_module.desk_of(board)._newest == 1


async def test_a_lost_connection_is_made_anew_and_the_turn_runs_again(monkeypatch):
    async with job(engine()) as board:
        await turn(board, trajectory="warm")
        held = desk_module.desk_of(board)._pool
        lost = await held.get()

        async def fail(_):
            message = "gone"
            raise TransportError(message)

        monkeypatch.setattr(lost, "generate", fail)
        assert len((await turn(board)).token_ids) == 12
        assert await held.get() is not lost


async def test_a_dead_engine_costs_nothing():
    dying = engine("dying", faults=[Fault(kind=FaultKind.DIE, after_tokens=3)])
    async with job(dying, engine("well")) as board:
        outputs = await asyncio.gather(*(turn(board, (1, 2, n), f"t{n}") for n in range(6)))
        assert all(len(output.token_ids) == len(output.log_probs) == 12 for output in outputs)
        assert {hop[0] for output in outputs for hop in output.extra_fields["hops"]} == {"dying", "well"}


async def test_tokens_of_weights_that_the_job_did_not_note_are_an_error():
    async with job(engine()) as board:
        desk_module.desk_of(board)._newest = None
        board._actor._steps.clear()
        board._actor._noted.clear()
        with pytest.raises(TurnFailedError, match="did not publish: verl-"):
            await turn(board)


async def test_a_pool_that_was_started_anew_ends_the_turns_that_it_can_never_finish(monkeypatch, told):
    monkeypatch.setattr(desk_module, "_WATCH_S", 0.1)
    async with job(engine()) as board:
        await turn(board)
        place, desk = (await board.settings.remote()).place, desk_module.desk_of(board)
    desk_module._desks[asyncio.get_running_loop()] = desk
    async with (
        rose.RolloutPool([engine()]) as pool,
        serve_pool(PoolService(pool, name="policy"), place.url.removeprefix("http://")),
    ):
        found = await asyncio.gather(*(turn(board, trajectory=f"t{n}") for n in range(3)), return_exceptions=True)
        assert {type(one) for one in found} == {TurnFailedError}
        assert "started anew" in str(found[0])
        assert "from its last checkpoint" in str(found[0])
        assert [text for level, text in told if level == "ERROR"] == [str(found[0])]  # once, not for every turn
        desk._listener.cancel()
        await desk._pool.close()
    desk_module._desks.clear()


async def test_what_a_pool_has_not_is_refused_and_the_next_turn_is_well():
    async with job(engine()) as board:
        with pytest.raises(RequestRefusedError, match="top_k"):
            await turn(board, params={**STOCK, "top_k": 4})
        with pytest.raises(RequestRefusedError, match="image_data"):
            await run_turn(board, "t", [1], STOCK, {"image_data": [1]}, is_resumed=True)
        assert (await turn(board)).token_ids


async def test_a_cancelled_turn_is_cancelled_at_its_engine():
    slow = engine(token_s=0.05)
    async with job(slow) as board:
        task = asyncio.ensure_future(turn(board))
        while not slow.requests:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        for _ in range(100):
            if slow.aborted:
                break
            await asyncio.sleep(0.02)
        assert slow.aborted
        assert desk_module.desk_of(board).num_turns == 0


async def test_a_turn_that_is_cancelled_before_the_board_has_answered_leaves_no_task_behind():
    class Silent:
        async def settings(self):
            await asyncio.Event().wait()

    before = asyncio.all_tasks()
    board = Here(Silent())
    task = asyncio.ensure_future(turn(board))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    desk = desk_module._desks.pop(asyncio.get_running_loop())
    desk._listener.cancel()  # the one task that a desk keeps
    await asyncio.sleep(0.05)
    assert asyncio.all_tasks() == before


async def test_an_abort_ends_turns_with_what_they_have_and_a_resumed_one_is_whole():
    slow = engine(token_s=0.02)
    async with job(slow) as board:
        await turn(board, trajectory="warm", params={**STOCK, "max_tokens": 1})
        partial = asyncio.ensure_future(turn(board, trajectory="a", is_resumed=False))
        whole = asyncio.ensure_future(turn(board, trajectory="b"))
        await asyncio.sleep(0.12)
        await board.abort.remote()
        ended = await partial
        assert ended.stop_reason == "aborted"
        assert 0 < len(ended.token_ids) < 12
        assert len(ended.log_probs) == len(ended.token_ids)
        late = asyncio.ensure_future(turn(board, trajectory="c"))
        await asyncio.sleep(0.1)
        assert not whole.done()  # both wait for the resume
        assert not late.done()
        await board.push(8)
        await board.resume.remote()
        joined = await whole
        assert joined.stop_reason == "completed"
        assert len(joined.token_ids) == len(joined.log_probs) == 12
        spans = joined.extra_fields["version_spans"]
        assert [step for _, _, step in spans] == [7, 8]
        assert spans[0][1] == spans[1][0]
        assert spans[1][1] == 12
        assert (joined.extra_fields["min_global_steps"], joined.extra_fields["max_global_steps"]) == (7, 8)
        assert (await late).extra_fields["global_steps"] == 8


async def test_a_caller_that_is_cancelled_during_an_abort_is_cancelled():
    slow = engine(token_s=0.05)
    async with job(slow) as board:
        await turn(board, trajectory="warm", params={**STOCK, "max_tokens": 1})
        task = asyncio.ensure_future(turn(board, trajectory="a", is_resumed=False))
        while len(slow.requests) < 2:
            await asyncio.sleep(0.01)
        news = attrs.evolve(await board.known.remote(), num_aborts=1, is_open=False)
        desk_module.desk_of(board)._take(news, is_own=True)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_an_abort_before_a_turn_has_begun_is_no_cancellation_of_its_caller(monkeypatch):
    async with job(engine()) as board:
        await turn(board, trajectory="warm")
        desk = desk_module.desk_of(board)
        get = desk._pool.get

        async def get_and_abort():
            pool = await get()
            news = await board.known.remote()
            asyncio.get_running_loop().call_soon(
                lambda: desk._take(attrs.evolve(news, num_aborts=1, is_open=False), is_own=True)
            )
            return pool

        monkeypatch.setattr(desk._pool, "get", get_and_abort)
        ended = await turn(board, trajectory="a", is_resumed=False)
        assert (ended.stop_reason, ended.token_ids) == ("aborted", [])


async def test_a_door_runs_a_turn_from_the_callers_process():
    import pickle

    async with job(engine()) as board:
        door = Door(board, "t")
        output = await door.generate.remote(
            request_id="fresh", prompt_ids=[1, 2], sampling_params=dict(STOCK), image_data=None, video_data=None
        )
        assert len(output.token_ids) == 12
    assert pickle.loads(pickle.dumps(Door(None, "t"))) == Door(None, "t")  # noqa: S301 - our own


async def test_a_pool_that_is_away_is_an_error_in_time(monkeypatch):
    connect = PoolPlace.connect
    monkeypatch.setattr(PoolPlace, "connect", lambda self: connect(self, timeout_s=0.5))
    board = Board(
        Settings(
            place=PoolPlace(url="http://127.0.0.1:9"),
            options=RoseOptions(),
            prompt_length=8,
            response_length=8,
            max_model_len=None,
            ignore_eos=False,
            dtype="float32",
        )
    )
    with pytest.raises(TransportError):
        await turn(Here(board))
    desk_module._desks.clear()
