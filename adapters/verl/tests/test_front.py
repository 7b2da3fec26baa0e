"""A front in a real Ray actor, as veRL's own router reaches it."""

import asyncio

import pytest

NUM_TURNS = 1100  # Ray's default bound on an actor's calls is 1000


def silent_board(ray):
    """A board on which nothing is ever said, so that turns stay under way; it only counts aborts."""

    class Silent:  # in here, so that Ray sends it along: its workers cannot import a test
        def __init__(self):
            self.num_asked = self.num_aborts = 0

        async def settings(self):
            self.num_asked += 1
            await asyncio.Event().wait()

        async def abort(self):
            self.num_aborts += 1

        async def counts(self):
            return self.num_asked, self.num_aborts

    return ray.remote(Silent).remote()


@pytest.fixture
def ray():
    import ray

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_an_abort_reaches_a_front_that_is_full_of_turns(ray):
    from rose_verl.replica import make_front

    board = silent_board(ray)
    front = make_front(board, is_aborting=True)
    turns = [front.generate.remote(request_id=str(n), prompt_ids=[n], sampling_params={}) for n in range(NUM_TURNS)]
    while not ray.get(board.counts.remote())[0]:
        assert not ray.wait(turns, timeout=0.1)[0]
    assert ray.wait([front.abort_all_requests.remote()], timeout=60)[0]
    assert ray.get(board.counts.remote())[1] == 1
