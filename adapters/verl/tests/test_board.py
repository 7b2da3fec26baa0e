"""What processes of a job know of each other."""

import asyncio

from rose.frameworks import PoolPlace
from rose_verl import board as board_module
from rose_verl.board import Board
from rose_verl.settings import RoseOptions, Settings

SETTINGS = Settings(
    place=PoolPlace(url="http://127.0.0.1:1"),
    options=RoseOptions(),
    prompt_length=8,
    response_length=8,
    max_model_len=None,
    ignore_eos=False,
    dtype="bfloat16",
)


async def listen(board, name, heard):
    seen = 0
    while True:
        news = await board.news(name, seen)
        seen = news.seen
        heard.append(news)


async def test_a_note_is_acknowledged_when_every_desk_has_taken_it_in():
    board, heard = Board(SETTINGS, ack_s=5), {"a": [], "b": []}
    tasks = [asyncio.ensure_future(listen(board, name, found)) for name, found in heard.items()]
    await asyncio.sleep(0.01)
    await board.note(0, 10)
    for found in heard.values():
        assert found[-1].steps == {0: 10}
        assert found[-1].newest == 0
    await board.note(1, None)  # the same step's weights again
    assert heard["a"][-1].steps == {1: 10}
    for task in tasks:
        task.cancel()


async def test_an_announced_version_has_a_step_and_is_no_news_until_it_is_noted():
    board, heard = Board(SETTINGS, ack_s=5), []
    await board.note(0, 5)
    task = asyncio.ensure_future(listen(board, "a", heard))
    await asyncio.sleep(0.01)
    await board.announce(1, 6)
    await board.announce(2, None)  # the sync of version 1 has failed, and its weights are pushed again
    await asyncio.sleep(0.01)
    known = await board.known()
    assert (dict(known.steps), known.newest) == ({0: 5, 1: 6, 2: 6}, 0)
    assert [dict(news.steps) for news in heard] == [{0: 5}]
    await board.note(2, None)
    assert (dict(heard[-1].steps), heard[-1].newest) == ({2: 6}, 2)
    await board.note(3, 9)
    assert (dict(heard[-1].steps), (await board.known()).newest) == ({3: 9}, 3)
    task.cancel()


async def test_a_desk_that_comes_late_hears_everything():
    board = Board(SETTINGS)
    await board.note(0, 5)
    await board.note(1, 6)
    news = await board.news("late", 0)
    assert (dict(news.steps), news.newest) == ({0: 5, 1: 6}, 1)
    assert (await board.known()).steps == news.steps


async def test_a_desk_that_died_holds_a_note_up_once(monkeypatch):
    board = Board(SETTINGS, ack_s=0.05)
    await board.news("dead", 0)
    clock = asyncio.get_running_loop().time
    begun = clock()
    await board.note(0, 1)
    assert 0.05 <= clock() - begun < 1
    begun = clock()
    await board.note(1, 2)
    assert clock() - begun < 0.05


async def test_nothing_new_is_an_answer_after_a_while(monkeypatch):
    monkeypatch.setattr(board_module, "_POLL_S", 0.01)
    board = Board(SETTINGS)
    first = await board.news("a", 0)
    again = await asyncio.wait_for(board.news("a", first.seen), 1)
    assert again == first


async def test_aborts_are_counted_and_close_until_resumed():
    board, heard = Board(SETTINGS), []
    task = asyncio.ensure_future(listen(board, "a", heard))
    await asyncio.sleep(0.01)
    await board.abort()
    assert (heard[-1].num_aborts, heard[-1].is_open) == (1, False)
    await board.resume()
    assert (heard[-1].num_aborts, heard[-1].is_open) == (1, True)
    task.cancel()


async def test_the_run_is_one_for_the_job_and_another_for_the_next():
    board = Board(SETTINGS)
    assert await board.run() == await board.run() != await Board(SETTINGS).run()
    assert await board.settings() is SETTINGS
