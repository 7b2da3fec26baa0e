"""A pool that lost the job's weights ends the turns that wait for them."""

import asyncio

import pytest

from doubles import result
from rose.errors import TransportError, TurnFailedError
from rose.types import AtLeast, Sampling, Turn, WeightVersion
from rose_openrlhf.watch import WeightsWatch

TURN = Turn(
    trajectory_id="t",
    group_id="g",
    prompt_ids=(1,),
    sampling=Sampling(max_tokens=4, temperature=1.0),
    versions=AtLeast(3),
)
OURS, OTHERS = WeightVersion("ours", 3), WeightVersion("others", 9)


class Waiting:
    """A pool whose turns wait for their weights."""

    def __init__(self, *versions, is_due=True):
        self.versions, self.num_looks, self.now_s = list(versions), 0, 0.0
        self.answers = asyncio.Event()
        self.num_cancelled = 0
        self.watch = WeightsWatch(
            generate=self.generate,
            version=self.version,
            launch="ours",
            is_due=lambda: is_due,
            patience_s=60.0,
            pause_s=15.0,
            rest=self.rest,
            clock=lambda: self.now_s,
        )

    async def generate(self, _):
        try:
            await self.answers.wait()
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        return result("ab")

    async def version(self):
        self.num_looks += 1
        found = self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]
        if isinstance(found, Exception):
            raise found
        return found

    async def rest(self, seconds):
        self.now_s += seconds
        if self.now_s > 900:
            self.answers.set()
        await asyncio.sleep(0)


@pytest.mark.parametrize(("found", "said"), [(None, "no version"), (OTHERS, "others:9")])
async def test_turns_that_wait_for_lost_weights_end(found, said):
    pool = Waiting(OURS, found)
    ended = await asyncio.gather(*(pool.watch.run(TURN) for _ in range(2)), return_exceptions=True)
    assert [type(error) for error in ended] == [TurnFailedError] * 2
    assert f"the pool is at {said}, and had no weights of ours for 60 s (--rose.retry_s)" in str(ended[0])
    assert pool.now_s == 90.0  # seen once, lost at the second look, and 60 s of patience
    assert pool.num_cancelled == 2


@pytest.mark.parametrize("found", [(OURS,), (None, None, None, OURS), (TransportError("away"),)])
async def test_turns_go_on_while_the_pool_has_their_weights_or_gets_them_back(found):
    assert (await Waiting(*found).watch.run(TURN)).token_ids == (97, 98)


async def test_before_the_first_weights_nothing_is_lost():
    pool = Waiting(None, is_due=False)
    await pool.watch.run(TURN)
    assert pool.num_looks == 0


async def test_a_cancelled_caller_cancels_the_turn_and_nothing_is_left():
    pool = Waiting(OURS)
    task = asyncio.create_task(pool.watch.run(TURN))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert pool.num_cancelled == 1
    await pool.watch.close()
    assert not [one for one in asyncio.all_tasks() if one.get_name() == "rose-weights-watch"]
