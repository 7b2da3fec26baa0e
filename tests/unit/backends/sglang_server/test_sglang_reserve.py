"""Slots held back from SGLang's pool, and the word that ranks share."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang_stand_in import Req, Scheduler, make_room, release_kv, stepping_for

from rose.backends.sglang_server.agreement import Ranks, Word
from rose.backends.sglang_server.kv_reserve import KvReserve, held_tokens

POOL = 60


def total(scheduler: Scheduler, reserve: KvReserve) -> int:
    """What SGLang's own leak check adds up, held slots counted as a session's."""
    in_use = sum(len(req.slots) for req in scheduler.running_batch.reqs)
    cached = scheduler.tree_cache.evictable_size()
    free = scheduler.token_to_kv_pool_allocator.available_size()
    assert reserve.num_used == in_use
    return in_use + cached + free + held_tokens(scheduler.token_to_kv_pool_allocator)


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("hold"), st.integers(0, POOL + 5)),
            st.tuples(st.just("run"), st.integers(1, 20)),
            st.tuples(st.just("end"), st.booleans()),
            st.tuples(st.just("flush"), st.none()),
        ),
        max_size=40,
    )
)
def test_no_slot_is_lost_or_given_twice(acts: list[tuple[str, int | bool | None]]) -> None:
    scheduler = Scheduler(POOL)
    reserve = KvReserve(scheduler, make_room)
    allocator, cache = scheduler.token_to_kv_pool_allocator, scheduler.tree_cache
    for act, argument in acts:
        reqs = scheduler.running_batch.reqs
        if act == "hold":
            wanted = min(int(argument or 0), POOL)
            missing = reserve.resize(int(argument or 0))
            assert reserve.num_held == wanted - missing
            assert not missing or not (allocator.available_size() or cache.slots), (
                "slots are missing while some are free"
            )
        elif act == "run" and allocator.available_size() >= int(argument or 0):
            scheduler.run(Req(str(len(reqs))), int(argument or 0))
        elif act == "end" and reqs:
            release_kv(reqs.pop(), cache, checkpoint=bool(argument))
        elif act == "flush" and not reqs:
            num_held = reserve.num_held
            allocator.free_slots, cache.slots = list(range(1, POOL + 1)), []
            reserve.retake()
            assert reserve.num_held == num_held
        assert total(scheduler, reserve) == POOL


def test_pages_are_held_whole() -> None:
    scheduler = Scheduler(POOL)
    scheduler.page_size = 16
    reserve = KvReserve(scheduler, make_room)
    assert reserve.resize(17) == 0
    assert reserve.num_held == 32


def test_a_shared_prefix_takes_more_victims_than_it_seems() -> None:
    """What ended requests leave cached is dropped first; victims are asked for again until it is enough."""
    scheduler = Scheduler(POOL)
    stepping = stepping_for(scheduler)
    for rid in ("a", "b", "c"):
        scheduler.run(Req(rid, prompt=20))
    assert stepping.set_kv_budget(30) == 30
    assert [rid for rid, _ in scheduler.sent] == ["a", "b"] or [rid for rid, _ in scheduler.sent] == ["c", "b"]
    assert stepping.num_kv_tokens_used == 20


WORDS = st.builds(
    Word,
    may_step=st.booleans(),
    takes_inputs=st.booleans(),
    chunk_tokens=st.integers(0, 1 << 20),
    kv_budget_tokens=st.none() | st.integers(0, 1 << 40),
    possible_tokens=st.none() | st.integers(0, 1 << 40),
    is_drained=st.booleans(),
)


@given(WORDS)
def test_a_word_is_the_same_on_every_rank(word: Word) -> None:
    assert Word.of(word.numbers()) == word


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_decides(rank: int) -> None:
    assert Ranks(SimpleNamespace(world_size=2, rank_in_group=rank)).is_first == (rank == 0)
