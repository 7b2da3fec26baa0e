"""Turns of clients: once a turn id, one outcome each, gone with their client."""

from __future__ import annotations

import asyncio

import pytest

from ray_parts import turn, until
from rose.errors import TurnFailedError
from rose.hosts.ray.outbox import Outbox
from rose.hosts.ray.sessions import Sessions
from rose.types import FinishReason, TurnResult

DONE = TurnResult(token_ids=(1,), logprobs=(), finish_reason=FinishReason.STOP, versions=(), hops=())


class Turns:
    """Stands in for a pool: turns end when the test says so."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.cancelled: list[str] = []
        self.gate = asyncio.Event()
        self.error: Exception | None = None

    async def generate(self, asked) -> TurnResult:
        self.asked.append(asked.trajectory_id)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.append(asked.trajectory_id)
            raise
        if self.error is not None:
            raise self.error
        return DONE


async def test_a_turn_id_runs_once_until_its_outcome_is_taken():
    turns = Turns()
    sessions = Sessions(turns.generate, timeout_s=60.0)
    for _ in range(3):
        epoch = sessions.submit("c", [("a", turn(1)), ("b", turn(2))])
    turns.gate.set()
    await until(lambda: turns.asked == ["t1", "t2"])
    first = await sessions.read("c", epoch, 0, 1.0)
    while first.upto < 2:
        first = await sessions.read("c", epoch, 0, 1.0)
    assert dict(first.outcomes) == {"a": DONE, "b": DONE}
    sessions.submit("c", [("a", turn(1))])
    again = await sessions.read("c", epoch, 0, 1.0)
    assert again == first, "what was not named is given again, and nothing ran anew"
    assert (await sessions.read("c", epoch, again.upto, 0.0)).outcomes == ()
    assert turns.asked == ["t1", "t2"]
    await sessions.close()


async def test_a_client_that_is_not_heard_of_loses_its_turns_and_hears_of_it():
    turns = Turns()
    sessions = Sessions(turns.generate, timeout_s=0.05)
    epoch = sessions.submit("c", [("a", turn(1))])
    reading = asyncio.create_task(sessions.read("c", epoch, 0, 0.15))
    await asyncio.sleep(0.1)
    assert turns.cancelled == [], "a read that waits is as good as a word"
    await reading
    await until(lambda: turns.cancelled == ["t1"])
    assert sessions.num_clients == 0
    delivery = await sessions.read("c", epoch, 5, 10.0)
    assert delivery.epoch != epoch
    assert (delivery.upto, delivery.outcomes) == (0, ())
    turns.gate.set()
    assert sessions.submit("c", [("b", turn(2))]) == delivery.epoch
    await until(lambda: sessions._sessions["c"].outbox.items)
    late = await sessions.read("c", epoch, 5, 10.0)
    assert late.outcomes == (("b", DONE),), "a number of an earlier session drops nothing of this one"
    await sessions.close()


@pytest.mark.parametrize("how", ["forget", "leave", "close"])
async def test_turns_are_cancelled_and_leave_no_outcome(how):
    turns = Turns()
    sessions = Sessions(turns.generate, timeout_s=60.0)
    sessions.submit("c", [("a", turn(1))])
    sessions.submit("d", [("a", turn(2))])
    await until(lambda: len(turns.asked) == 2)
    if how == "forget":
        sessions.forget("c", ["a", "never seen"])
        sessions.forget("nobody", ["a"])
    elif how == "leave":
        sessions.leave("c")
        sessions.leave("nobody")
    else:
        await sessions.close()
    await until(lambda: "t1" in turns.cancelled)
    assert ("t2" in turns.cancelled) == (how == "close")
    if how == "forget":
        assert (await sessions.read("c", None, 0, 0.0)).outcomes == ()
    await sessions.close()


@pytest.mark.parametrize(
    ("error", "kind"), [(TurnFailedError("no"), TurnFailedError), (OSError("disk"), TurnFailedError)]
)
async def test_errors_are_outcomes(error, kind):
    turns = Turns()
    turns.error = error
    turns.gate.set()
    sessions = Sessions(turns.generate, timeout_s=60.0)
    epoch = sessions.submit("c", [("a", turn(1))])
    await until(lambda: sessions._sessions["c"].outbox.items)
    ((turn_id, outcome),) = (await sessions.read("c", epoch, 0, 1.0)).outcomes
    assert (turn_id, type(outcome)) == ("a", kind)
    await sessions.close()


async def test_an_outbox_gives_again_what_was_not_named():
    outbox: Outbox[str] = Outbox()
    assert await outbox.read(0, 0.0) == (0, ())
    waiting = asyncio.create_task(outbox.read(0, 10.0))
    await asyncio.sleep(0)
    outbox.put("a")
    assert await waiting == (1, ("a",))
    outbox.put("b")
    assert await outbox.read(0, 0.0) == (2, ("a", "b"))
    assert await outbox.read(1, 0.0) == (2, ("b",))
    assert await outbox.read(2, 0.0) == (2, ())
    assert outbox.items == ()
