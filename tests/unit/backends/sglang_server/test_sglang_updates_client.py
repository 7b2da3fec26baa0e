"""The client of weight commands, against real commands on ranks of this process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from sglang_ranks import RUN, Ranks

from rose.backends.sglang.updates import SglangUpdates
from rose.errors import (
    BlobNotFoundError,
    EngineError,
    EngineFencedError,
    EngineLostError,
    EngineUnsupportedError,
    TransferError,
    VersionConflictError,
)
from rose.transfer.relay import read_manifest
from rose.transfer.sums import trainer_sums
from rose.types import WeightVersion


@pytest.fixture(params=[1, 2], ids=["tp1", "tp2"])
def ranks(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Ranks]:
    made = Ranks(tmp_path, request.param)
    yield made
    made.close()


def client(ranks: Ranks) -> SglangUpdates:
    return SglangUpdates(ranks, len(ranks.ranks))


class Answers:
    """A server that answers what it is told."""

    def __init__(self, answer: Mapping[str, Any] | Exception) -> None:
        self.answer = answer

    async def post(self, _path: str, _body: Mapping[str, Any]) -> Mapping[str, Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def get(self, path: str) -> Mapping[str, Any]:
        raise NotImplementedError(path)


async def test_a_whole_update(ranks: Ranks) -> None:
    updates = client(ranks)
    state = await updates.begin(f"{RUN}:0")
    assert (state.version, state.is_fenced, state.staged, state.is_busy) == (WeightVersion(RUN, 0), False, None, False)
    version = ranks.publish()
    await updates.stage(ranks.update())
    assert (await updates.state()).staged == version
    activation = await updates.activate()
    assert activation.version == (await updates.state()).version == version
    assert activation.is_verified
    assert activation.fetched_bytes > 0
    assert activation.pause_s > 0
    assert ranks.holds_the_trainers_bits()
    assert await updates.weight_sums() == trainer_sums(ranks.trainer)
    assert set(await updates.weight_checksums()) == ({"q", "norm"} if len(ranks.ranks) == 1 else {"norm"})
    labels = [body["new_version"] for path, body in ranks.posts if path == "/update_weight_version"]
    assert labels == [f"{RUN}:0", str(version)]
    layout = await updates.target_layout()
    assert [set(rank) for rank in layout.ranks] == [{"q", "norm"}] * len(ranks.ranks)


async def test_refusals_keep_their_types(ranks: Ranks) -> None:
    updates = client(ranks)
    with pytest.raises(TransferError, match="call begin first"):
        await updates.target_layout()
    await updates.begin(f"{RUN}:0")
    with pytest.raises(TransferError, match="no update is staged"):
        await updates.activate()
    ranks.publish()
    update = ranks.update()
    ranks.transport.delete([read_manifest(ranks.transport, update.manifest_keys[-1]).blobs[0].key])
    with pytest.raises(BlobNotFoundError):
        await updates.stage(update)
    await updates.fence()
    with pytest.raises((EngineFencedError, VersionConflictError)):
        await updates.stage(update)
    state = await updates.state()
    assert state.is_fenced
    assert state.version is None


async def test_a_dropped_update_is_not_activated(ranks: Ranks) -> None:
    updates = client(ranks)
    await updates.begin(f"{RUN}:0")
    ranks.publish()
    await updates.stage(ranks.update())
    await updates.drop()
    with pytest.raises(TransferError, match="no update is staged"):
        await updates.activate()


async def test_a_cancelled_activation_is_seen_to_its_end(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    updates = client(ranks)
    await updates.begin(f"{RUN}:0")
    version = ranks.publish()
    await updates.stage(ranks.update())
    post = ranks.post

    async def slow(path: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        await asyncio.sleep(0.2)
        return await post(path, body)

    monkeypatch.setattr(ranks, "post", slow)
    activation = asyncio.create_task(updates.activate())
    await asyncio.sleep(0.05)
    activation.cancel()
    with pytest.raises(asyncio.CancelledError):
        await activation
    assert ranks.ranks[0].version == version
    assert ranks.posts[-1] == ("/update_weight_version", {"new_version": str(version), "abort_all_requests": False})


async def test_a_server_without_the_plugin_says_what_to_install() -> None:
    with pytest.raises(EngineUnsupportedError, match="install rose-rl"):
        await SglangUpdates(Answers(EngineError("400: Unsupported action='rose {}'")), 1).begin(None)


@pytest.mark.parametrize("error", [EngineLostError("gone"), EngineError("500: other")])
async def test_other_failures_pass(error: EngineError) -> None:
    with pytest.raises(type(error)) as raised:
        await SglangUpdates(Answers(error), 1).begin(None)
    assert raised.value is error


@pytest.mark.parametrize("message", ["Success.", "[]", json.dumps({"ranks": [{"value": None}]})])
async def test_answers_that_are_none_are_errors(message: str) -> None:
    """Also one of fewer ranks than the engine has."""
    with pytest.raises(EngineError):
        await SglangUpdates(Answers({"message": message}), 2).state()


async def test_ranks_at_two_versions_count_as_fenced() -> None:
    rows = [{"value": {"version": v, "is_fenced": False, "staged": None, "is_busy": False}} for v in ("a:1", "a:2")]
    state = await SglangUpdates(Answers({"message": json.dumps({"ranks": rows})}), 2).state()
    assert state.is_fenced
    assert state.version is None
