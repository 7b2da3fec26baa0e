from __future__ import annotations

import json

import attrs
import pytest

from rose.errors import ConfigError
from rose.observe.turns import DeliveredTurn, RecordedTurn, TurnLog, read_turns
from rose.pool import RolloutPool
from rose.testing import FakeEngine, FakeUpdateSource
from rose.types import (
    EngineId,
    EngineKind,
    FinishReason,
    Hop,
    HopEnd,
    RouteReason,
    Sampling,
    Turn,
    TurnResult,
    VersionSpan,
    WeightVersion,
)

SPANS = (
    VersionSpan(version=WeightVersion("run", 3), start=0, end=2),
    VersionSpan(version=WeightVersion("run", 4), start=3, end=5),
)
HOPS = (
    Hop(engine_id=EngineId("e0"), reason=RouteReason.DEDICATED, num_tokens=2, ended=HopEnd.EVICTED),
    Hop(engine_id=EngineId("e1"), reason=RouteReason.REROUTED_EVICTED, num_tokens=3, ended=HopEnd.FINISHED),
)
RESULT = TurnResult(
    token_ids=(7, 8, 9, 10, 11),
    logprobs=(-0.5,) * 5,
    finish_reason=FinishReason.STOP,
    versions=SPANS,
    hops=HOPS,
)


def turn(trajectory_id="t0"):
    return Turn(trajectory_id=trajectory_id, group_id="g", prompt_ids=(1, 2), sampling=Sampling(max_tokens=5))


def recorded(trajectory_id="t0", number=0):
    return RecordedTurn(
        trajectory_id=trajectory_id,
        turn=number,
        group_id="g",
        num_tokens=5,
        finish_reason=FinishReason.STOP,
        versions=SPANS,
        hops=HOPS,
    )


def test_what_is_written_is_read_with_the_turns_counted(tmp_path):
    path = tmp_path / "turns.jsonl"
    for names in (["a", "b", "a"], ["a"]):
        with TurnLog(path) as log:
            for name in names:
                log.write(turn(name), RESULT)
    expected = [recorded("a", 0), recorded("b", 0), recorded("a", 1), recorded("a", 2)]
    assert list(read_turns(path)) == expected


def test_a_line_is_on_disk_once_its_turn_is_delivered(tmp_path):
    log = TurnLog(tmp_path / "turns.jsonl")
    log.write(turn(), RESULT)
    assert len(list(read_turns(tmp_path / "turns.jsonl"))) == 1
    log.close()
    log.close()


@pytest.mark.parametrize(("token", "version"), [(0, 3), (1, 3), (2, None), (3, 4), (4, 4)])
def test_which_version_made_a_token(token, version):
    assert recorded().version_of(token) == (None if version is None else WeightVersion("run", version))


@pytest.mark.parametrize("token", [-1, 5])
def test_a_token_that_the_turn_does_not_have(token):
    with pytest.raises(ConfigError, match=f"has 5 tokens; there is no token {token}"):
        recorded().version_of(token)


async def test_as_the_observer_of_a_pool(tmp_path):
    path = tmp_path / "turns.jsonl"
    with TurnLog(path) as log:
        async with RolloutPool(on_event=log) as pool:
            engine = FakeEngine(engine_id=EngineId("e0"))
            await pool.add_engine(engine, EngineKind.DEDICATED)
            source = FakeUpdateSource()
            source.publish()
            await pool.sync_weights(source)
            result = await pool.generate(turn())
    (found,) = read_turns(path)
    assert (found.trajectory_id, found.group_id, found.num_tokens) == ("t0", "g", 5)
    assert (found.versions, found.hops) == (result.versions, result.hops)
    assert found.version_of(4) == WeightVersion("fake", 0)


def test_other_events_are_not_taken_for_turns(tmp_path):
    with TurnLog(tmp_path / "turns.jsonl") as log:
        log(object())
    assert not isinstance(object(), DeliveredTurn)
    assert list(read_turns(tmp_path / "turns.jsonl")) == []


def plain(result):
    return attrs.asdict(result, value_serializer=lambda _i, _f, value: getattr(value, "value", value))


@pytest.mark.parametrize("form", ["one", "list", "lines"])
def test_results_as_json(tmp_path, form):
    path, data = tmp_path / "result.json", plain(RESULT)
    path.write_text(
        json.dumps([data, data] if form == "list" else data) + (f"\n{json.dumps(data)}" if form == "lines" else "")
    )
    first = next(iter(read_turns(path)))
    assert first == attrs.evolve(recorded(""), group_id="")
    assert [each.turn for each in read_turns(path)] == [0] if form == "one" else [0, 1]


def test_a_last_line_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "turns.jsonl"
    with TurnLog(path) as log:
        log.write(turn(), RESULT)
        log.write(turn(), RESULT)
    text = path.read_text()
    path.write_text(text[:-20])
    assert list(read_turns(path)) == [recorded()]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"a": 1}\n', "line 1: this is no turn with versions"),
        ('{"a": \n{"a": 1}\n', "line 1 is no JSON"),
        ("7\n", "line 1: this is no turn"),
        ('{"versions": [["run", 0, 1]], "num_tokens": 1, "finish_reason": "stop"}', "this is no turn"),
        ('{"versions": [], "num_tokens": 1, "finish_reason": "tired"}', "this is no turn"),
    ],
)
def test_what_is_no_turn_is_named_with_its_line(tmp_path, text, complaint):
    path = tmp_path / "turns.jsonl"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        list(read_turns(path))


def test_files_that_cannot_be_used(tmp_path):
    with pytest.raises(ConfigError, match="cannot read turns"):
        list(read_turns(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="cannot write turns"):
        TurnLog(tmp_path)
