"""Weight commands over the ranks of an engine: all of them end alike, and nothing is written unless all are ready."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from sglang_ranks import RUN, Ranks, bits_of

from rose.backends.sglang_server.weights import FENCED
from rose.backends.wire import update_to_wire
from rose.errors import TransferError
from rose.transfer.relay import read_manifest
from rose.types import WeightUpdate


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path, request.param)
    yield made
    made.close()


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path, 2)
    yield made
    made.close()


def begun(ranks: Ranks) -> Ranks:
    assert ranks.ask("open", version=f"{RUN}:0") == [{"value": None}] * len(ranks.ranks)
    return ranks


def poll(ranks: Ranks) -> list[Any]:
    for _ in range(2000):
        answers = ranks.ask("poll")
        if all("error" in answer or answer["value"]["is_done"] for answer in answers):
            return answers
        time.sleep(0.002)
    pytest.fail("never done")


def stage(ranks: Ranks) -> list[Any]:
    ranks.ask("stage", update=update_to_wire(ranks.update()))
    return poll(ranks)


def errors(answers: list[Any]) -> set[str]:
    assert all("error" in answer for answer in answers), answers
    return {answer["error"][0] for answer in answers}


def damage(ranks: Ranks) -> None:
    """Flip a bit in a blob of the newest version."""
    manifest = read_manifest(ranks.transport, ranks.update().manifest_keys[-1])
    key = manifest.blobs[0].key
    whole = bytes(ranks.transport.get(key))
    ranks.transport.delete([key])
    ranks.transport.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))


def test_updates_arrive_bit_by_bit(ranks: Ranks) -> None:
    begun(ranks)
    for fraction in (0.1, 1.0, 0.1):
        version = ranks.publish(fraction)
        assert all(answer["value"]["is_done"] for answer in stage(ranks))
        assert {answer["value"]["version"] for answer in ranks.ask("activate")} == {str(version)}
        assert ranks.holds_the_trainers_bits()
        assert all(loop.done[-2:] == [f"label {version}", "part"] for loop in ranks.loops)


def test_staging_changes_nothing(ranks: Ranks) -> None:
    begun(ranks)
    before = [bits_of(model.q).copy() for model in ranks.models]
    version = ranks.publish(1.0)
    stage(ranks)
    assert all(np.array_equal(bits, bits_of(model.q)) for bits, model in zip(before, ranks.models, strict=True))
    states = [answer["value"] for answer in ranks.ask("state")]
    assert {state["version"] for state in states} == {f"{RUN}:0"}
    assert {state["staged"] for state in states} == {str(version)}


def test_a_damaged_update_leaves_nothing_staged(ranks: Ranks) -> None:
    begun(ranks)
    ranks.publish()
    damage(ranks)
    answers = stage(ranks)
    assert "CorruptUpdateError" in {answer["error"][0] for answer in answers if "error" in answer}
    assert errors(ranks.ask("activate")) == {"TransferError"}
    assert {answer["value"]["version"] for answer in ranks.ask("state")} == {f"{RUN}:0"}
    assert all("part" not in loop.done for loop in ranks.loops)


def test_nothing_is_written_when_one_rank_is_not_ready(two: Ranks) -> None:
    begun(two)
    two.publish(1.0)
    stage(two)
    two.ranks[1].drop()
    before = bits_of(two.models[0].q).copy()
    assert errors(two.ask("activate")) == {"TransferError"}
    assert np.array_equal(before, bits_of(two.models[0].q))
    assert [rank.is_fenced for rank in two.ranks] == [False, False]
    stage(two)
    two.ask("activate")
    assert two.holds_the_trainers_bits()


def test_a_stage_that_runs_is_forgotten_when_it_is_dropped(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says at its end what it has staged; the drop comes behind that."""
    begun(two)
    two.publish()
    may_go, rank = threading.Event(), two.ranks[0]
    opened = rank._open
    stage_now = opened.subscriber.stage

    def slow(update: WeightUpdate) -> None:
        may_go.wait(10.0)
        stage_now(update)

    monkeypatch.setattr(opened.subscriber, "stage", slow)
    rank.begin_stage(two.update())
    rank.drop()
    may_go.set()
    while not rank.poll()["is_done"]:
        time.sleep(0.001)
    assert rank.state()["staged"] is None
    with pytest.raises(TransferError, match="call stage first"):
        rank.check_ready(None)


def test_nothing_is_written_when_ranks_staged_different_versions(two: Ranks) -> None:
    begun(two)
    two.publish()
    first = two.update()
    two.publish()
    for rank, update in zip(two.ranks, (first, two.update()), strict=True):
        rank.begin_stage(update)
    poll(two)
    assert errors(two.ask("activate")) == {"TransferError"}
    assert [str(rank.version) for rank in two.ranks] == [f"{RUN}:0"] * 2


def test_a_rank_that_fails_half_way_fences_all(two: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(two)
    two.publish(1.0)
    stage(two)
    sink = two.ranks[1]._opened.sink  # type: ignore[union-attr]

    def broken(*_: Any) -> None:
        raise OSError

    with monkeypatch.context() as patched:
        patched.setattr(sink, "write_dense", broken)
        patched.setattr(sink, "write_sparse", broken)
        assert errors(two.ask("activate")) == {"EngineFencedError"}
    assert [rank.is_fenced for rank in two.ranks] == [True, True]
    assert all(loop.done[-2:] == [f"label {FENCED}", "part"] for loop in two.loops)
    two.ask("stage", update=update_to_wire(two.update()))  # an anchor, since no version is known
    assert all("value" in answer for answer in poll(two))
    two.ask("activate")
    assert two.holds_the_trainers_bits()
    assert two.loops[0].done[-2] == f"label {two.ranks[0].version}"


def test_a_refusal_before_the_first_write_fences_nobody(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    begun(ranks)
    ranks.publish()
    stage(ranks)
    for rank in ranks.ranks:
        subscriber = rank._opened.subscriber  # type: ignore[union-attr]
        monkeypatch.setattr(subscriber, "activate", lambda *, verify: (_ for _ in ()).throw(MemoryError("full")))
    assert errors(ranks.ask("activate")) == {"EngineError"}
    assert not any(rank.is_fenced for rank in ranks.ranks)
    assert all(loop.done == [f"label {RUN}:0"] for loop in ranks.loops)


def test_a_rank_whose_bits_are_found_damaged_fences_all(two: Ranks) -> None:
    """The audit that comes before a stage sees one rank's weights only."""
    begun(two)
    for _ in range(16):
        two.publish()
        stage(two)
        two.ask("activate")
    two.models[1].q.data.view(-1)[0] += 1
    two.publish()
    assert "CorruptUpdateError" in {answer["error"][0] for answer in stage(two) if "error" in answer}
    two.ask("state")
    assert [rank.is_fenced for rank in two.ranks] == [True, True]
    assert all(loop.done[-1] == f"label {FENCED}" for loop in two.loops)


def test_activation_waits_for_the_thread(ranks: Ranks) -> None:
    begun(ranks)
    ranks.publish()
    stage(ranks)
    for rank in ranks.ranks:
        rank._begin(lambda: time.sleep(0.5))
    assert errors(ranks.ask("activate")) == {"EngineBusyError"}
    poll(ranks)
    ranks.ask("activate")
    assert ranks.holds_the_trainers_bits()


def test_a_failure_is_told_when_every_rank_is_done(two: Ranks) -> None:
    begun(two)
    release = threading.Event()
    two.ranks[0]._begin(lambda: 1 / 0)
    two.ranks[1]._begin(lambda: release.wait(20))
    time.sleep(0.1)
    assert two.ask("poll") == [{"value": {"is_done": False}}] * 2
    release.set()
    assert "error" in poll(two)[0]


def test_kv_of_requests_in_flight_is_dropped_on_request(ranks: Ranks) -> None:
    begun(ranks)
    ranks.publish()
    stage(ranks)
    ranks.ask("activate", keeps_kv=False)
    assert all(loop.done[-1] == "recompute" for loop in ranks.loops)


def test_opening_again_keeps_what_is_known(ranks: Ranks) -> None:
    begun(ranks)
    version = ranks.publish()
    stage(ranks)
    ranks.ask("activate")
    ranks.ask("open", version=f"{RUN}:0")
    assert {answer["value"]["version"] for answer in ranks.ask("state")} == {str(version)}
    assert all(loop.done[-2:] == [f"label {version}", "part"] for loop in ranks.loops)


def test_a_rank_that_cannot_open_closes_the_others(two: Ranks) -> None:
    two.models[1].q.data.view(-1)[:] = 0  # not what the checkpoint has
    answers = two.ask("open", version=None)
    assert [answer.get("error", [None])[0] for answer in answers] == [None, "LayoutMismatchError"]
    assert not any(rank.is_open for rank in two.ranks)


def test_foreign_writes_fence(ranks: Ranks) -> None:
    begun(ranks)
    for engine in ranks.engines:
        engine.lose()
        engine.lose()
    assert all(loop.done == [f"label {RUN}:0", f"label {FENCED}"] for loop in ranks.loops)
    assert {answer["value"]["is_fenced"] for answer in ranks.ask("state")} == {True}
    assert ranks.engines[0].told() == {"version": None, "is_fenced": True}


def test_what_was_written_before_anybody_asked_is_no_version(ranks: Ranks) -> None:
    for engine in ranks.engines:
        engine.lose()
    assert all(loop.done == [] for loop in ranks.loops), "nothing is ROSE's yet"
    ranks.ask("open", version=f"{RUN}:0")
    assert {answer["value"]["is_fenced"] for answer in ranks.ask("state")} == {True}
    assert all(loop.done == [f"label {FENCED}"] for loop in ranks.loops)


def test_released_weights_are_not_touched(ranks: Ranks) -> None:
    begun(ranks)
    for command in ("stage", "sums", "activate"):
        answers = [engine.answer(json.dumps({"command": command}), is_released=True) for engine in ranks.engines]
        assert all("EngineBusyError" in answer and "wake it first" in answer for answer in answers)
    assert {answer["value"]["staged"] for answer in ranks.ask("state")} == {None}


@pytest.mark.parametrize("text", ["", "{", "[]", '{"command": 3}', '{"command": "dance"}', '{"command": "stage"}'])
def test_bad_commands_are_answered(ranks: Ranks, text: str) -> None:
    answers = ranks.answer(text)
    assert all('"error"' in answer for answer in answers)


def test_commands_before_open_say_what_to_do(ranks: Ranks) -> None:
    assert "call begin first" in ranks.ask("layout")[0]["error"][1]
    assert errors(ranks.ask("activate")) == {"TransferError"}
    assert errors(ranks.ask("poll")) == {"TransferError"}
