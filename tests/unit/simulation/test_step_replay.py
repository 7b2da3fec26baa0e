from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_standins import CHUNK_TOKENS, SERVING, serve, some_arrivals, step_row

from rose.backends.paced import profile_named
from rose.simulation.run_record import ArrivalRecord
from rose.simulation.step_replay import EndedAnswer, ServedRequest, extra_guest_turns, replay_decodes, replay_steps

PROFILE = profile_named(SERVING)
DELAY_S = 0.001


def arrival(at_s: float, prompt_tokens: int, output_tokens: int) -> ArrivalRecord:
    return ArrivalRecord(at_s=at_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def log_of(*arrivals: ArrivalRecord):
    rows, works, answers = serve(arrivals, PROFILE)
    served = [
        ServedRequest(
            prompt_tokens=answer.arrival.prompt_tokens,
            output_tokens=answer.arrival.output_tokens,
            first_token_s=answer.first_s + DELAY_S,
        )
        for answer in answers
    ]
    return rows, works, served


@given(seed=st.integers(0, 10_000), num_requests=st.integers(1, 25))
def test_finds_what_every_step_computed(seed: int, num_requests: int) -> None:
    rows, works, served = log_of(*some_arrivals(num_requests, seed=seed))

    replay = replay_steps(rows, served)

    assert [step.work for step in replay.steps] == works
    assert [step.duration_s for step in replay.steps] == [row[1] for row in rows]
    assert replay.num_logged == len(rows)
    assert replay.first_token_delays_s == pytest.approx([DELAY_S] * num_requests)
    assert replay.gaps_s == pytest.approx([PROFILE.host_gap_s] * len(replay.gaps_s))


def test_stops_where_the_log_does_not_follow_from_the_requests() -> None:
    rows, works, served = log_of(arrival(0, 100, 5), arrival(0.02, 100, 5))
    rows[3][6] += 1

    replay = replay_steps(rows, served)

    assert [step.work for step in replay.steps] == works[:3]
    assert replay.num_logged == len(rows)


def test_gaps_are_counted_only_where_the_engine_had_work() -> None:
    rows, _, served = log_of(arrival(0, 100, 3), arrival(10, 100, 3))

    assert len(rows) == 6
    assert len(replay_steps(rows, served).gaps_s) == 4  # two in each request, none between the requests


def test_a_prompt_in_pieces_leaves_no_gap_uncounted() -> None:
    rows, works, served = log_of(arrival(0, 2 * CHUNK_TOKENS + 10, 1))

    replay = replay_steps(rows, served)

    assert [work.num_prefill_tokens for work in works] == [CHUNK_TOKENS, CHUNK_TOKENS, 10]
    assert [step.work for step in replay.steps] == works
    assert len(replay.gaps_s) == 2


def test_an_answer_that_is_shorter_than_logged_is_noticed() -> None:
    rows, _, served = log_of(arrival(0, 100, 5))

    replay = replay_steps(rows, [attrs.evolve(served[0], output_tokens=3)])

    assert len(replay.steps) == 3


def test_nothing_comes_of_an_empty_log() -> None:
    replay = replay_steps([], [ServedRequest(prompt_tokens=5, output_tokens=5, first_token_s=1.0)])

    assert (replay.steps, replay.gaps_s, replay.num_logged) == ((), (), 0)


@given(seed=st.integers(0, 10_000), num_requests=st.integers(1, 25))
def test_going_back_from_the_ends_finds_every_step_of_pure_decoding(seed: int, num_requests: int) -> None:
    rows, works, answers = serve(some_arrivals(num_requests, seed=seed), PROFILE)
    ended = [
        EndedAnswer(
            prompt_tokens=answer.arrival.prompt_tokens,
            output_tokens=answer.arrival.output_tokens,
            ended_s=answer.last_s + DELAY_S,
        )
        for answer in answers
    ]

    steps = replay_decodes(rows, ended[::-1])

    assert [step.work for step in steps] == [work for work in works if work.num_decodes and not work.num_prefill_tokens]


def test_going_back_leaves_out_steps_with_answers_that_are_not_known() -> None:
    rows, works, answers = serve([arrival(0, 100, 30), arrival(0.05, 50, 3)], PROFILE)
    first = EndedAnswer(prompt_tokens=100, output_tokens=30, ended_s=answers[0].last_s)

    steps = replay_decodes(rows, [first])

    assert [step.work for step in steps] == [w for w in works if w.num_decodes == 1 and not w.num_prefill_tokens]


def turns(order: str) -> tuple[list[list[float]], list[list[float]]]:
    """Return the logs of an owner O and a guest G that have had the device in this order; o has nothing to decode."""
    owner = [step_row(i, 0.9, 1 if name == "o" else 0, name == "O") for i, name in enumerate(order) if name in "oO"]
    return owner, [step_row(i, 0.9, 0, 1) for i, name in enumerate(order) if name == "G"]


@pytest.mark.parametrize(
    ("order", "extra", "contested"),
    [
        ("OGOGO", 0, 2),
        ("OGGOGO", 1, 2),
        ("OGGGO", 2, 1),
        ("OOOO", 0, 0),
        ("GGOGGG", 0, 0),
        ("OGGGoGO", 0, 1),
        ("", 0, 0),
    ],
)
def test_counts_the_turns_that_an_owner_missed(order: str, extra: int, contested: int) -> None:
    assert extra_guest_turns(*turns(order)) == (extra, contested)
