"""Whose turn it is."""

from rose_verl.fields import Answer
from rose_verl.trajectories import PrefixBook, Trajectories


def answer(num_tokens=2, step=4):
    spans = [[0, num_tokens, step]]
    return Answer(
        token_ids=[0] * num_tokens,
        log_probs=None,
        stop_reason="completed",
        num_preempted=0,
        extra_fields={"version_spans": spans, "hops": [["e", "dedicated", num_tokens, "finished"]]},
    )


def test_a_trajectory_keeps_its_group_and_what_was_told_of_its_turns():
    known = Trajectories()
    first = known.get("t", [1, 2])
    fields = first.add([1, 2], answer())
    second = known.get("t", [1, 2, 0, 0, 9])
    assert second.group_id == known.get("u", [1, 2]).group_id
    second.add([1, 2, 0, 0, 9], answer(num_tokens=1, step=5))
    assert [turn["version_spans"] for turn in fields["rose_turns"]] == [[[2, 4, 4]], [[5, 6, 5]]]


def test_only_so_many_are_kept():
    known = Trajectories(max_known=2)
    first = known.get("a", [1])
    for name in ("b", "c"):
        known.get(name, [1])
    assert known.get("a", [1]) is not first


def test_the_longest_known_beginning_tells_the_trajectory():
    book = PrefixBook()
    book.note("short", [1, 2])
    book.note("long", [1, 2, 3, 4])
    assert book.take([1, 2, 3, 4, 5]) == "long"
    assert book.take([1, 2, 9]) == "short"
    assert book.take([1, 2, 9]) not in {"short", "long"}  # a trajectory goes on once


def test_unknown_tokens_are_a_new_trajectory_each():
    book = PrefixBook()
    book.note("a", [5, 6, 7])
    assert book.take([5, 6]) != "a"
    assert book.take([8]) != book.take([8])


def test_the_book_forgets_the_oldest():
    book = PrefixBook(max_known=1)
    book.note("a", [1])
    book.note("b", [2, 3])
    assert book.take([1, 5]) != "a"
    assert book.take([2, 3, 4]) == "b"
    assert not book._ids
    assert not book._lengths
