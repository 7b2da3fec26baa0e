"""What a relay's memory holds, whatever comes in whichever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rose.transfer.cluster_memory import Attempt, RelayFullError, RelayMemory

_MAX_BYTES = 100
_names = st.sampled_from(["rank-0/blob-0", "rank-0/blob-1", "rank-1/blob-0", "manifest"])
_keys = st.builds(lambda run, n, attempt, name: f"{run}/{n}/{attempt}/{name}",
                  st.sampled_from("ab"), st.integers(0, 3), st.integers(0, 1), _names)  # fmt: skip
_others = st.sampled_from(["of-no-run", "a/cells/1f", "b/cells/2e"])
_steps = st.lists(st.tuples(_keys | _others, st.integers(0, 60)), max_size=40)


def _sizes(memory: RelayMemory, keys: list[str]) -> int:
    return sum(len(memory.get(key) or b"") for key in keys)


@given(_steps)
def test_memory_keeps_its_promises(steps: list[tuple[str, int]]) -> None:
    memory = RelayMemory(_MAX_BYTES)
    for key, size in steps:
        memory.mark_complete(key)
        memory.discard(key)
        newest, before = memory.newest_complete, memory.keys()
        own, had_room = memory.attempt_of(key), memory.has_room(size, key)
        kept = () if newest is None else (newest, Attempt(newest.run_index, -1, 0))
        try:
            is_kept = memory.admit(key, bytes(size))
        except RelayFullError:
            is_kept = False
            assert own in kept
            assert _sizes(memory, [k for k in before if memory.attempt_of(k) in kept]) + size > _MAX_BYTES
        after = memory.keys()
        assert memory.held_bytes == _sizes(memory, after) <= _MAX_BYTES
        assert is_kept == (memory.get(key) is not None)
        gone = [k for k in before if k not in after]
        assert all(memory.attempt_of(k) not in kept for k in gone), "the newest complete version is whole"
        if own not in kept:
            assert all(memory.attempt_of(k) <= own for k in gone), "no newer version makes room for an older one"
        if newest is None or own >= newest:
            assert all(memory.attempt_of(k) != own for k in gone), "a version that comes does not push itself out"
        left = [k for k in after if k != key and memory.attempt_of(k) not in kept]
        assert all(memory.attempt_of(g) <= memory.attempt_of(k) for g in gone for k in left), "the oldest go first"
        assert not gone or is_kept, "nothing makes room in vain"
        assert is_kept == had_room, "it said so before"


@given(_steps)
def test_a_given_up_attempt_leaves_nothing(steps: list[tuple[str, int]]) -> None:
    memory = RelayMemory(10_000)
    for key, size in steps:
        memory.admit(key, bytes(size))
    memory.discard_attempt("a/1/0")
    left = memory.keys()
    assert memory.held_bytes == _sizes(memory, left)
    assert set(left) == {key for key, _ in steps if not key.startswith("a/1/0/")}
