"""Plain data of turns, results and readings; the messages of the direct path."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.backends.remote import wire as engine_wire
from rose.errors import EngineBusyError, RequestRefusedError, TurnFailedError, VersionUnavailableError
from rose.pool import EngineAccount, PoolSnapshot, WaitReason, direct
from rose.pool.sources import chunks_from
from rose.pool.wire import (
    error_from_plain,
    error_to_plain,
    from_plain,
    result_from_wire,
    to_plain,
    turn_from_wire,
    turn_to_wire,
)
from rose.types import (
    AnyVersion,
    AtLeast,
    EngineAddress,
    EngineId,
    EngineKind,
    EngineRequest,
    Exactly,
    FinishReason,
    Hop,
    HopEnd,
    RequestId,
    RouteReason,
    Sampling,
    Turn,
    TurnResult,
    UnseenIds,
    VersionSpan,
    WeightVersion,
)

_ids = st.lists(st.integers(0, 200_000), min_size=1, max_size=20)
_turns = st.builds(
    Turn,
    trajectory_id=st.text(min_size=1),
    group_id=st.text(min_size=1),
    prompt_ids=_ids,
    sampling=st.builds(
        Sampling,
        max_tokens=st.integers(1, 9),
        temperature=st.floats(0, 2),
        stop_token_ids=st.lists(st.integers(0, 9)),
        logprobs=st.booleans(),
        seed=st.none() | st.integers(),
    ),
    versions=st.builds(AnyVersion) | st.builds(AtLeast, st.integers(0, 9)) | st.builds(Exactly, st.integers(0, 9)),
    deadline_s=st.none() | st.floats(0.1, 1e6),
)
HOP = Hop(engine_id=EngineId("e"), reason=RouteReason.AFFINITY, num_tokens=2, ended=HopEnd.FINISHED)


def crossed(data: Any) -> Any:
    return json.loads(json.dumps(data))


@given(_turns)
def test_a_turn_crosses(turn: Turn) -> None:
    assert turn_from_wire(crossed(turn_to_wire(turn))) == turn


@given(_turns)
def test_what_is_submitted_is_the_turn_without_its_prompt(turn: Turn) -> None:
    message = crossed(direct.submit_to_wire("7", turn))
    turn_id, got, ahead = direct.submit_from_wire(message)
    assert (turn_id, ahead) == ("7", None)
    for version in (None, WeightVersion("r", 3)):
        ahead = direct.Ahead(engine_id=EngineId("e"), version=version)
        assert direct.submit_from_wire(crossed(direct.submit_to_wire("7", turn, ahead)))[2] == ahead
    assert (len(got.prompt_ids), got.versions, got.deadline_s) == (len(turn.prompt_ids), turn.versions, turn.deadline_s)
    assert (got.trajectory_id, got.group_id) == (turn.trajectory_id, turn.group_id)
    assert got.sampling.max_tokens == turn.sampling.max_tokens
    assert got.sampling.stop_token_ids == turn.sampling.stop_token_ids


def test_a_result_and_readings_cross() -> None:
    span = VersionSpan(version=WeightVersion("r", 1), start=0, end=2)
    result = TurnResult(
        token_ids=(1, 2), logprobs=(-0.5, -1.0), finish_reason=FinishReason.STOP, versions=(span,), hops=(HOP,)
    )
    assert result_from_wire(crossed(to_plain(result))) == result
    _, _, summary = crossed(direct.settled_to_wire("7", result))
    assert direct.result_from(summary, [1, 2, 3], [-0.5, -1.0, -9.0]) == result
    account = EngineAccount(kind=EngineKind.BORROWED, num_tokens=3)
    assert from_plain(EngineAccount, crossed(to_plain(account))) == account
    snapshot = PoolSnapshot(
        num_live_turns=1, num_waiting=1, waiting={WaitReason.KV: 1}, engines=(), version=WeightVersion("r", 1)
    )
    assert from_plain(PoolSnapshot, crossed(to_plain(snapshot))) == snapshot


def test_a_start_crosses_and_hides_what_engines_ask_for() -> None:
    address = EngineAddress(name="remote", options=(("url", "http://x"), ("token", "secret")))
    start = direct.Start(
        turn_id="7",
        attempt=3,
        request_id=RequestId("p-3"),
        engine_id="e",
        reason=RouteReason.REROUTED_STALLED,
        address=address,
        max_tokens=9,
        num_kept=2,
        hops=(HOP,),
        run="r",
        version=WeightVersion("r", 4),
        versions=AtLeast(4),
    )
    assert direct.start_from_wire(crossed(direct.start_to_wire(start))) == start
    assert "secret" not in repr(start)


def test_errors_keep_their_types_and_hops() -> None:
    failed = error_from_plain(crossed(error_to_plain(TurnFailedError("given up", (HOP,)))))
    assert isinstance(failed, TurnFailedError)
    assert failed.hops == (HOP,)
    assert type(error_from_plain(crossed(error_to_plain(EngineBusyError("later"))))) is EngineBusyError


@pytest.mark.parametrize("is_retryable", [False, True])
def test_a_missing_version_says_across_whether_to_ask_again(is_retryable: bool) -> None:  # noqa: FBT001 - a case
    error = VersionUnavailableError("not there", (HOP,))
    error.is_retryable = is_retryable
    back = error_from_plain(crossed(error_to_plain(error)))
    assert isinstance(back, VersionUnavailableError)
    assert (back.is_retryable, back.hops, str(back)) == (is_retryable, (HOP,), "not there")
    assert engine_wire.status_of(back) == 409


@pytest.mark.parametrize(
    "data",
    [None, [], {"prompt_ids": [1]}, {"sampling": {}}, {"prompt_ids": [1], "sampling": {"max_tokens": 1}, "x": 1}],
)
def test_what_is_no_turn(data: Any) -> None:
    with pytest.raises(RequestRefusedError, match="this is no turn"):
        turn_from_wire(data)


@given(st.lists(st.tuples(st.none() | st.integers(0, 3), st.integers(1, 4)), max_size=8), st.integers(0, 32))
def test_chunks_cover_each_token_once_under_its_version(parts: list[tuple[int | None, int]], start: int) -> None:
    versions = [n for n, count in parts for _ in range(count)]
    spans: list[VersionSpan] = []
    for place, n in enumerate(versions):
        if n is not None:
            spans.append(VersionSpan(version=WeightVersion("r", n), start=place, end=place + 1))
    ids, logprobs = list(range(len(versions))), [-float(place) for place in range(len(versions))]
    chunks = chunks_from(ids, logprobs, spans, start)
    assert [token for chunk in chunks for token in chunk.token_ids] == ids[start:]
    assert [value for chunk in chunks for value in chunk.logprobs] == logprobs[start:]
    assert [chunk.version and chunk.version.n for chunk in chunks for _ in chunk.token_ids] == versions[start:]


def test_unseen_ids_are_counted_and_added_to() -> None:
    assert len(UnseenIds(3) + (1, 2)) == 5  # noqa: RUF005 - its own operator
    with pytest.raises(ValueError, match="prompt_ids"):
        Turn(trajectory_id="t", group_id="g", prompt_ids=UnseenIds(0), sampling=Sampling(max_tokens=1))  # type: ignore[arg-type]


def test_a_prepared_prompt_is_sent_as_it_is_once() -> None:
    prompt = tuple(range(100))
    request = EngineRequest(request_id=RequestId("r"), prompt_ids=prompt, sampling=Sampling(max_tokens=3, seed=1))
    plain = engine_wire.request_to_json(request)
    prepared = engine_wire.PreparedIds(2)
    prepared.prepare(prompt)
    assert prepared.take(prompt) == prepared.take(prompt)
    engine_wire.PREPARED.prepare(prompt)
    assert engine_wire.request_to_json(request) == plain
    assert engine_wire.request_from_wire(json.loads(plain)) == request
    assert json.loads(plain) == engine_wire.request_to_wire(request)
