"""A pool that lost the job's weights ends the turns that wait for them."""

from __future__ import annotations

import asyncio

import attrs
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.errors import TransportError, TurnFailedError
from rose.frameworks import WeightsWatch
from rose.pool import EngineState, EngineView, PoolSnapshot, WaitReason
from rose.types import EngineKind, FinishReason, TurnResult, VersionSpan, WeightVersion

RESULT = TurnResult(token_ids=(7,), logprobs=(-0.5,), finish_reason=FinishReason.STOP, versions=(), hops=())
PARTIAL = TurnResult(token_ids=(5,), logprobs=(-0.1,), finish_reason=FinishReason.ABORTED, versions=(), hops=())
OURS, OTHERS = WeightVersion("ours", 3), WeightVersion("others", 9)


class Waiting:
    """A pool whose turns wait for their weights."""

    def __init__(self, *versions: WeightVersion | Exception | None, launch: str | None = "ours") -> None:
        self.versions, self.num_looks, self.now_s = list(versions), 0, 0.0
        self.answers = asyncio.Event()
        self.num_cancelled = 0
        self.told: list[str] = []
        self.states: list[tuple[EngineState, ...]] = [(EngineState.READY,)]
        self.waiting: dict[WaitReason, int] = {}
        self.done: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        self.watch = WeightsWatch(
            snapshot=self.snapshot,
            launch=launch,
            patience_s=60.0,
            pause_s=15.0,
            advice="begin again",
            tell=self.told.append,
            rest=self.rest,
            clock=lambda: self.now_s,
        )

    def is_watched(self) -> bool:
        return any(one.get_name() == "rose-weights-watch" for one in asyncio.all_tasks())

    async def run(self) -> TurnResult:
        return await self.watch.guard(asyncio.ensure_future(self.generate()))

    async def generate(self) -> TurnResult:
        try:
            await self.answers.wait()
        except asyncio.CancelledError as error:
            self.num_cancelled += 1
            vars(error)["partial"] = PARTIAL  # as pools do
            raise
        return RESULT

    async def snapshot(self) -> PoolSnapshot:
        self.num_looks += 1
        found = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        if isinstance(found, Exception):
            raise found
        states = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return PoolSnapshot(
            num_live_turns=2,
            num_waiting=sum(self.waiting.values()),
            waiting=self.waiting,
            engines=tuple(
                EngineView(engine_id=f"own{n}", kind=EngineKind.DEDICATED, state=state)
                for n, state in enumerate(states)
            ),
            version=found,
        )

    async def rest(self, seconds: float) -> None:
        self.now_s += seconds
        if self.now_s > 900:
            self.answers.set()
        await asyncio.sleep(0)


@pytest.mark.parametrize(("found", "said"), [(None, "no version"), (OTHERS, "others:9")])
async def test_turns_that_wait_for_lost_weights_end(found: WeightVersion | None, said: str) -> None:
    pool = Waiting(OURS, found)
    ended = await asyncio.gather(*(pool.run() for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in ended] == [TurnFailedError] * 2
    assert f"is at {said}, and has lost the weights of this job, ours: it was started anew" in str(ended[0])
    assert str(ended[0]).endswith("; begin again")
    assert pool.told == [str(ended[0])], "once, however many turns there are"
    assert pool.now_s == 90.0  # seen once, lost at the second look, and 60 s of patience
    assert pool.num_cancelled == 2


@pytest.mark.parametrize("found", [(OURS,), (None, None, None, OURS), (TransportError("away"),)])
async def test_turns_go_on_while_the_pool_has_their_weights_or_gets_them_back(
    found: tuple[WeightVersion | Exception | None, ...],
) -> None:
    assert await Waiting(*found).run() == RESULT


@pytest.mark.parametrize("found", [None, OTHERS])
async def test_a_pool_that_is_only_being_brought_to_the_first_weights_has_lost_nothing(
    found: WeightVersion | None,
) -> None:
    assert await Waiting(found).run() == RESULT


async def test_tokens_of_weights_and_a_word_of_the_adapter_tell_that_the_pool_had_them() -> None:
    pool = Waiting(None)
    made = attrs.evolve(RESULT, versions=(VersionSpan(version=OURS, start=0, end=1),))
    done: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
    done.set_result(made)
    assert await pool.watch.guard(done) == made
    with pytest.raises(TurnFailedError):
        await pool.run()
    pool = Waiting(None)
    assert not pool.watch.note(OTHERS)
    assert await pool.run() == RESULT
    pool = Waiting(None)
    assert pool.watch.note(OURS)
    with pytest.raises(TurnFailedError):
        await pool.run()


async def test_where_the_launch_is_not_known_a_pool_without_any_weights_has_lost_them() -> None:
    assert await Waiting(OURS, OTHERS, launch=None).run() == RESULT
    with pytest.raises(
        TurnFailedError, match=r"no version, and has lost the weights of this job: it was started anew; b"
    ):
        await Waiting(OURS, None, launch=None).run()


async def test_an_answer_that_is_not_understood_does_not_end_the_watch() -> None:
    """As of a pool that was started anew with another release."""
    with pytest.raises(TurnFailedError):
        await Waiting(OURS, KeyError("snapshot"), None).run()


async def test_patience_goes_on_from_turn_to_turn() -> None:
    pool = Waiting(OURS, None)
    first = asyncio.ensure_future(pool.run())
    while pool.num_looks < 4:
        await asyncio.sleep(0)
    first.cancel()
    await asyncio.wait({first})
    while pool.is_watched():
        await asyncio.sleep(0)
    with pytest.raises(TurnFailedError):
        await pool.run()
    assert pool.now_s <= 30.0 + 60.0 + 2 * 15.0  # first seen lost, patience, and the rests in which turns end and begin


async def test_patience_begins_anew_with_each_loss() -> None:
    pool = Waiting(OURS, None, None, OURS, None)
    with pytest.raises(TurnFailedError):
        await pool.run()
    assert pool.now_s == 5 * 15.0 + 60.0  # lost for good at the fifth look


async def test_a_watch_that_was_closed_looks_no_more() -> None:
    pool = Waiting(OURS)
    task = asyncio.create_task(pool.run())
    while not pool.num_looks:
        await asyncio.sleep(0)
    await pool.watch.close()
    assert not pool.is_watched()
    pool.answers.set()
    assert await task == RESULT


async def test_a_turn_that_is_ended_keeps_its_tokens() -> None:
    with pytest.raises(TurnFailedError) as caught:
        await Waiting(OURS, None).run()
    assert caught.value.partial == PARTIAL


async def test_a_cancelled_caller_cancels_the_turn_and_nothing_is_left() -> None:
    pool = Waiting(OURS)
    task = asyncio.create_task(pool.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    assert vars(caught.value)["partial"] == PARTIAL
    assert pool.num_cancelled == 1
    await pool.watch.close()
    assert not pool.is_watched()
    await pool.watch.close()


async def test_a_caller_that_is_cancelled_when_its_turn_is_ended_is_cancelled() -> None:
    pool = Waiting(OURS, None)
    task = asyncio.create_task(pool.run())
    pool.watch.tell = lambda _: bool(task.cancel())
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_turn_that_was_done_when_the_others_were_ended_has_its_result() -> None:
    pool = Waiting(OURS, None)
    pool.watch.tell = lambda _: pool.done.set_result(RESULT)
    ended = await asyncio.gather(pool.run(), pool.watch.guard(pool.done), return_exceptions=True)
    assert isinstance(ended[0], TurnFailedError)
    assert ended[1] == RESULT


async def test_a_turn_that_ended_in_the_moment_of_its_caller_s_cancellation_keeps_its_tokens() -> None:
    gone = TransportError("gone")
    gone.partial = PARTIAL
    for end, kept in (
        (lambda done: done.set_result(RESULT), RESULT),
        (lambda done: done.set_exception(gone), PARTIAL),
        (lambda done: done.set_exception(TransportError("gone")), None),
    ):
        pool = Waiting(OURS)
        task = asyncio.create_task(pool.watch.guard(pool.done))
        await asyncio.sleep(0)
        end(pool.done)
        task.cancel()
        with pytest.raises(asyncio.CancelledError) as caught:
            await task
        assert vars(caught.value).get("partial") == kept
        await pool.watch.close()


async def test_a_turn_s_own_error_is_its_caller_s() -> None:
    pool = Waiting(OURS)
    pool.done.set_exception(TransportError("gone"))
    with pytest.raises(TransportError, match="gone"):
        await pool.watch.guard(pool.done)


LOST, READY, UPDATING = EngineState.LOST, EngineState.READY, EngineState.UPDATING


async def test_that_every_engine_is_lost_is_told_once_an_outage_and_ends_nothing() -> None:
    pool = Waiting(OURS)
    pool.waiting = {WaitReason.NO_READY_ENGINE: 2}
    pool.states = [(READY, LOST), (LOST, LOST), (LOST, LOST), (UPDATING, LOST), (LOST, LOST), (LOST, LOST)]
    assert await asyncio.gather(pool.run(), pool.run()) == [RESULT] * 2
    assert len(pool.told) == 2, "one for each outage"
    assert pool.told[0] == pool.told[1]
    assert pool.told[0].startswith(
        "no engine of the pool takes turns, and 2 wait (own0 is lost, own1 is lost; the pool's log says why)"
    )


@pytest.mark.parametrize(
    ("states", "waiting"),
    [
        ((LOST, UPDATING), {WaitReason.NO_READY_ENGINE: 2}),
        ((LOST, EngineState.JOINING), {WaitReason.NO_READY_ENGINE: 2}),
        ((READY,), {WaitReason.SLOTS: 2}),
        ((LOST,), {}),
    ],
)
async def test_turns_that_an_engine_will_take_are_no_outage(
    states: tuple[EngineState, ...], waiting: dict[WaitReason, int]
) -> None:
    pool = Waiting(OURS)
    pool.states, pool.waiting = [states], waiting
    assert await pool.run() == RESULT
    assert pool.told == []


async def test_a_pool_without_engines_says_so() -> None:
    pool = Waiting(OURS)
    pool.states, pool.waiting = [()], {WaitReason.NO_READY_ENGINE: 1}
    assert await pool.run() == RESULT
    assert "1 wait (it has none;" in pool.told[0]
