from __future__ import annotations

from rose_roll.trajectories import Trajectories


def test_a_prompt_goes_on_with_the_longest_sequence_that_it_begins_with() -> None:
    known = Trajectories(prefix="w")
    first, second = known.find([1, 2]), known.find([1, 2])
    assert first != second, "twins are two trajectories"
    known.end(first, [1, 2, 7])
    known.end(second, [1, 2, 7, 8])
    assert known.find([1, 2, 7, 8, 9]) == second
    assert known.find([1, 2, 7, 5]) == first
    assert known.find([1, 2, 7, 5]) not in {first, second}, "a sequence is gone on with once"


def test_memory_is_bounded() -> None:
    known = Trajectories(prefix="w", max_sequences=3)
    names = [known.find([number]) for number in range(5)]
    for number, name in enumerate(names):
        known.end(name, [number] * (number + 1))
    assert known.find([4] * 9) == names[4]
    assert known.find([0] * 9) not in names
