"""A pool that lost the job's weights ends the turns that wait for them."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.errors import TransportError, TurnFailedError
from rose.frameworks import WeightsWatch
from rose.types import FinishReason, TurnResult, WeightVersion

RESULT = TurnResult(token_ids=(7,), logprobs=(-0.5,), finish_reason=FinishReason.STOP, versions=(), hops=())
OURS, OTHERS = WeightVersion("ours", 3), WeightVersion("others", 9)


class Waiting:
    """A pool whose turns wait for their weights."""

    def __init__(self, *versions: WeightVersion | Exception | None, is_due: bool = True) -> None:
        self.versions, self.num_looks, self.now_s = list(versions), 0, 0.0
        self.answers = asyncio.Event()
        self.num_cancelled = 0
        self.told: list[str] = []
        self.watch = WeightsWatch(
            version=self.version,
            launch="ours",
            is_due=lambda: is_due,
            patience_s=60.0,
            pause_s=15.0,
            advice="begin again",
            tell=self.told.append,
            rest=self.rest,
            clock=lambda: self.now_s,
        )

    async def run(self) -> TurnResult:
        return await self.watch.guard(asyncio.ensure_future(self.generate()))

    async def generate(self) -> TurnResult:
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return RESULT

    async def version(self) -> WeightVersion | None:
        self.num_looks += 1
        found = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        if isinstance(found, Exception):
            raise found
        return found

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


async def test_before_the_first_weights_nothing_is_lost() -> None:
    pool = Waiting(None, is_due=False)
    await pool.run()
    assert pool.num_looks == 0


async def test_a_cancelled_caller_cancels_the_turn_and_nothing_is_left() -> None:
    pool = Waiting(OURS)
    task = asyncio.create_task(pool.run())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.num_cancelled == 1
    await pool.watch.close()
    assert not [one for one in asyncio.all_tasks() if one.get_name() == "rose-weights-watch"]
