"""Live weight updates of real SGLang servers: bit-exact, over all ranks alike, gentle on requests in flight, and hard to break."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import pickle
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from sglang_server_process import SglangServer

from rose.backends.memory import MemoryTransport
from rose.backends.sglang.updates import SglangUpdates
from rose.errors import (
    CorruptUpdateError,
    EngineBusyError,
    EngineError,
    EngineFencedError,
    RoseError,
    TransferError,
    VersionConflictError,
)
from rose.testing.checkpoint import CheckpointTrainer
from rose.transfer.layout import TargetLayout
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import plan_update, read_manifest
from rose.transfer.sums import trainer_sums
from rose.types import Activation, WeightUpdate, WeightVersion

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1200),
]

RUN = "live"
PROMPTS = ((5, 6, 7, 8), (100, 3, 128, 64, 2), tuple(range(2, 80)))
NUM_ACTS = 200


class Site:
    """One server, the trainer that publishes to it, and the client of its updates."""

    def __init__(self, server: SglangServer, model: Path, tp_size: int) -> None:
        self.server, self.tp_size = server, tp_size
        self.updates = SglangUpdates(server, tp_size)
        self.trainer = CheckpointTrainer(model)
        self.transport = MemoryTransport()
        self.transport.serve()

    async def begin(self) -> None:
        """Publish version 0, which the server has loaded, cut as the server holds it."""
        state = await self.updates.begin(f"{RUN}:0")
        assert state.version == WeightVersion(RUN, 0)
        layout: TargetLayout = await self.updates.target_layout()
        assert len(layout.ranks) == self.tp_size
        self.publisher = Publisher(self.trainer, self.transport, run=RUN, targets=[layout])
        self.publisher.publish_sync()

    def publish(self, fraction: float = 0.01, *, anchor: bool = False) -> PublishReport:
        """Change the weights and publish them."""
        self.trainer.step(fraction)
        return self.publisher.publish_sync(anchor=anchor)

    async def update(self) -> WeightUpdate:
        """Return how the server reaches the newest version."""
        update = plan_update(self.transport, (await self.updates.state()).version)
        assert update is not None
        return update

    async def sync(self, **how: Any) -> Activation:
        """Bring the server to the newest version."""
        await self.updates.stage(await self.update())
        return await self.updates.activate(**how)

    async def greedy(self) -> list[list[int]]:
        """Return what the server answers to all prompts."""
        return [(await self.server.generate(prompt, 24))["output_ids"] for prompt in PROMPTS]

    async def flush(self) -> None:
        """Drop the cache; the server refuses until it has noticed that its last request is over."""
        async with asyncio.timeout(30):
            while True:
                with contextlib.suppress(EngineError):
                    await self.server.post("/flush_cache", {})
                    return
                await asyncio.sleep(0.05)

    async def check_bits(self) -> None:
        """Compare every tensor of the server with the trainer's."""
        assert await self.updates.weight_sums() == trainer_sums(self.trainer)


def make_model(folder: Path) -> Path:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from rose.testing.models import make_qwen3  # noqa: PLC0415 - after the skip

    return make_qwen3(folder / "model", vocab=129, heads=4, kv_heads=2, max_positions=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=[1, 2], ids=["tp1", "tp2"])
async def site(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("sglang")
    model = make_model(folder)
    async with SglangServer.started(model, folder, tp_size=request.param) as server:
        made = Site(server, model, request.param)
        await made.begin()
        yield made
        made.transport.close()


def damage(site: Site, update: WeightUpdate) -> tuple[str, bytes]:
    """Flip a bit in a blob of the update's last version; returns the blob as it was."""
    key = read_manifest(site.transport, update.manifest_keys[-1]).blobs[0].key
    whole = bytes(site.transport.get(key))
    put(site, key, whole[:-1] + bytes([whole[-1] ^ 1]))
    return key, whole


def put(site: Site, key: str, blob: bytes) -> None:
    site.transport.delete([key])
    site.transport.put(key, blob)


@pytest.mark.parametrize("tp_size", [1, 2], ids=["tp1", "tp2"])
async def test_updated_server_equals_a_fresh_one_on_the_trainers_checkpoint(tmp_path: Path, tp_size: int) -> None:
    """After sparse and dense updates: every tensor, SGLang's own checksums and greedy tokens."""
    model = make_model(tmp_path)
    codecs = []
    async with SglangServer.started(model, tmp_path, tp_size=tp_size) as server:
        site = Site(server, model, tp_size)
        await site.begin()
        before = await site.greedy()
        for fraction in (0.01, 0.01, 1.0, 0.01):
            report = site.publish(fraction)
            activation = await site.sync()
            assert activation.version == report.version
            assert activation.is_verified
            codecs.append(max(report.codec_elements, key=lambda codec: report.codec_elements[codec]))
        await site.check_bits()
        checksums, tokens = await site.updates.server_checksums(), await site.greedy()
        site.transport.close()
    assert codecs == ["sparse", "sparse", "dense", "sparse"]
    assert tokens != before, "were the weights of no effect on tokens, equal tokens would prove nothing"

    saved = site.trainer.save(tmp_path / "saved")
    async with SglangServer.started(saved, tmp_path, tp_size=tp_size) as server:
        fresh = Site(server, saved, tp_size)
        assert await fresh.updates.server_checksums() == checksums
        assert await fresh.greedy() == tokens


async def test_a_dense_load_of_the_same_weights_has_the_same_checksums(site: Site, tmp_path: Path) -> None:
    """SGLang's own loader, on the same server; for ROSE the weights are no version then, until an anchor comes."""
    site.publish()
    await site.sync()
    sparse = await site.updates.server_checksums()
    tokens = await site.greedy()
    saved = site.trainer.save(tmp_path / "saved")
    await site.server.post("/update_weights_from_disk", {"model_path": str(saved), "flush_cache": False})
    await site.flush()
    assert await site.updates.server_checksums() == sparse
    assert await site.greedy() == tokens
    assert (await site.updates.state()).is_fenced
    site.publish()
    assert (await site.sync()).is_verified
    assert not (await site.updates.state()).is_fenced
    await site.check_bits()


async def test_requests_go_on_over_an_update(site: Site) -> None:
    """Staging and activation while requests run: none is lost or cut, and their tokens are told apart by version."""
    old = (await site.updates.state()).version
    running = [asyncio.create_task(site.server.generate((9, 9, number), 600)) for number in range(3)]
    await asyncio.sleep(0.3)
    report = site.publish()
    activation = await site.sync()
    for answer in await asyncio.gather(*running):
        assert len(answer["output_ids"]) == 600
        spans = [(s["version"], s["start"], s["end"]) for s in answer["meta_info"]["weight_versions"]]
        assert [version for version, _, _ in spans] == [str(old), str(report.version)]
        assert spans[0][2] == spans[1][1] > 0
        assert spans[1][2] == 600
        assert answer["meta_info"]["num_retractions"] == 0
    assert activation.pause_s < 5


async def test_requests_in_flight_are_computed_anew_on_request(site: Site) -> None:
    running = [asyncio.create_task(site.server.generate((9, 8, number), 600)) for number in range(3)]
    await asyncio.sleep(0.3)
    report = site.publish()
    await site.sync(keeps_kv=False)
    for answer in await asyncio.gather(*running):
        assert len(answer["output_ids"]) == 600
        assert answer["meta_info"]["weight_versions"][-1]["version"] == str(report.version)
        assert answer["meta_info"]["num_retractions"] == 1
    # The rest is what the new weights make of the whole prefix.
    answer = running[0].result()
    num_old = answer["meta_info"]["weight_versions"][0]["end"]
    prefix = [9, 8, 0, *answer["output_ids"][:num_old]]
    await site.flush()
    rest = await site.server.generate(prefix, 16)
    assert rest["output_ids"] == answer["output_ids"][num_old : num_old + 16]


async def test_no_request_meets_a_prefix_of_older_weights(site: Site) -> None:
    """Neither one that was cached, nor one that a request leaves which was in flight, nor one that is waiting."""
    prompt = list(range(10, 110))
    await site.server.generate(prompt, 4)
    assert (await site.server.generate(prompt, 4))["meta_info"]["cached_tokens"] == 99
    in_flight = asyncio.create_task(site.server.generate([*prompt, 7], 300))
    crowd = [asyncio.create_task(site.server.generate((3, number), 300)) for number in range(10)]
    await asyncio.sleep(0.2)
    waiting = asyncio.create_task(site.server.generate(prompt, 4))
    await asyncio.sleep(0.05)
    site.publish(1.0)
    await site.sync()
    waited = await waiting
    await asyncio.gather(in_flight, *crowd)
    answer = await site.server.generate([*prompt, 7], 24)
    assert answer["meta_info"]["cached_tokens"] <= 100, "only what the waiting request computed may be met"
    assert (await site.server.generate(prompt, 4))["meta_info"]["cached_tokens"] == 99, "prefixes are cached again"
    await site.flush()
    again = await site.server.generate(prompt, 4)
    assert again["output_ids"] == waited["output_ids"]
    await site.flush()
    assert (await site.server.generate([*prompt, 7], 24))["output_ids"] == answer["output_ids"]


async def test_damaged_updates_are_refused_before_any_write(site: Site) -> None:
    bits, tokens = await site.updates.server_checksums(), await site.greedy()
    before = (await site.updates.state()).version
    site.publish()
    update = await site.update()
    key, whole = damage(site, update)
    with pytest.raises(CorruptUpdateError):
        await site.updates.stage(update)
    with pytest.raises(TransferError, match="no update is staged"):
        await site.updates.activate()
    assert await site.updates.server_checksums() == bits
    assert (await site.updates.state()).version == before
    assert await site.greedy() == tokens
    put(site, key, whole)
    await site.sync()
    await site.check_bits()


async def test_what_would_end_a_server_is_refused(site: Site) -> None:
    """SGLang's own calls with bad payloads, formats and memory commands: 400, no rank hangs, the server answers on."""
    bits = await site.updates.server_checksums()
    good = base64.b64encode(pickle.dumps([])).decode()
    bad = base64.b64encode(b"no pickle").decode()
    await site.server.post("/begin_weight_update", {"selector": "all"})
    one_bad = [good] * (site.tp_size - 1) + [bad]
    for payloads, load_format in (([bad] * site.tp_size, None), (one_bad, None), ([good] * site.tp_size, "no.such")):
        body = {"serialized_named_tensors": payloads, "load_format": load_format, "flush_cache": False}
        with pytest.raises(EngineError, match="400"):
            await site.server.post("/update_weights_from_tensor", body)
    await site.server.post("/end_weight_update", {})
    with pytest.raises(EngineError, match="not released"):
        await site.server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    running = asyncio.create_task(site.server.generate((4, 4), 400))
    await asyncio.sleep(0.3)
    with pytest.raises(EngineError, match="only while no request runs"):
        await site.server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
    assert len((await running)["output_ids"]) == 400
    await released(site)
    await site.server.post("/resume_memory_occupation", {"tags": ["kv_cache"]})
    assert await site.updates.server_checksums() == bits
    site.publish()
    await site.sync()
    await site.check_bits()


async def released(site: Site) -> None:
    """Release the KV cache; SGLang counts a request as running until the step after its answer."""
    async with asyncio.timeout(10.0):
        while True:
            with contextlib.suppress(EngineError):
                await site.server.post("/release_memory_occupation", {"tags": ["kv_cache"]})
                return
            await asyncio.sleep(0.02)


class Acts:
    """What a careless user does to a server, one act at a time, with what must come of it."""

    def __init__(self, site: Site, seed: int) -> None:
        self.site, self.draw = site, random.Random(seed)
        self.running: list[asyncio.Task[Any]] = []
        self.staged: WeightVersion | None = None

    async def generate(self) -> None:
        """Begin a request that runs beside what follows."""
        self.running = [task for task in self.running if not task.done()]
        if len(self.running) < 4:
            num_tokens = self.draw.randrange(1, 200)
            self.running.append(asyncio.create_task(self.checked(num_tokens)))

    async def checked(self, num_tokens: int) -> None:
        answer = await self.site.server.generate([self.draw.randrange(2, 128) for _ in range(9)], num_tokens)
        assert len(answer["output_ids"]) == num_tokens
        assert answer["meta_info"]["weight_versions"][-1]["end"] == num_tokens

    async def stage(self) -> None:
        report = self.site.publish(self.draw.choice((0.0, 0.001, 0.01)))
        await self.site.updates.stage(await self.site.update())
        self.staged = report.version

    async def stage_damaged(self) -> None:
        self.site.publish(0.01)
        update = await self.site.update()
        key, whole = damage(self.site, update)
        with pytest.raises(CorruptUpdateError):
            await self.site.updates.stage(update)
        put(self.site, key, whole)
        self.staged = None

    async def stage_wrong(self) -> None:
        """An update that does not lead where it says."""
        update = await self.site.update() if self.staged else None
        if update is not None:
            wrong = WeightUpdate(
                target=WeightVersion(RUN, 10**6), manifest_keys=update.manifest_keys, address=update.address
            )
            with pytest.raises(VersionConflictError):
                await self.site.updates.stage(wrong)
            self.staged = None

    async def drop(self) -> None:
        await self.site.updates.drop()
        self.staged = None

    async def activate(self) -> None:
        if self.staged is None:
            with pytest.raises(TransferError):
                await self.site.updates.activate()
            return
        activation = await self.site.updates.activate(keeps_kv=self.draw.random() < 0.7)
        assert activation.version == self.staged
        assert (await self.site.updates.state()).version == self.staged
        self.staged = None

    async def activate_while_staging(self) -> None:
        """A client that is gone has left a stage under way; what comes of an activation then is one of two things."""
        self.site.publish(0.01)
        update = await self.site.update()
        stage = asyncio.create_task(self.site.updates.stage(update))
        await asyncio.sleep(self.draw.random() * 0.02)
        stage.cancel()
        await asyncio.gather(stage, return_exceptions=True)
        with contextlib.suppress(EngineBusyError, TransferError):
            await self.site.updates.activate()
        assert not (await self.site.updates.state()).is_fenced
        while (await self.site.updates.state()).is_busy:
            await asyncio.sleep(0.01)
        self.staged = (await self.site.updates.state()).staged

    async def fence(self) -> None:
        """Lose the weights; a delta is refused, an anchor brings them back."""
        if self.draw.random() < 0.7:
            return
        before = (await self.site.updates.state()).version
        await self.site.updates.fence()
        self.site.publish(0.01)
        delta = plan_update(self.site.transport, before)
        assert delta is not None
        with pytest.raises(RoseError) as refused:
            await self.site.updates.stage(delta)
        assert isinstance(refused.value, (EngineFencedError, VersionConflictError))
        await self.site.sync()
        self.staged = None


@pytest.mark.parametrize("seed", [0])
async def test_two_hundred_acts(site: Site, seed: int) -> None:
    """Random acts in one server's life, requests beside them: it lives, and its weights are a published version bit by bit."""
    acts = Acts(site, seed)
    choices = [acts.generate] * 6 + [acts.stage] * 5 + [acts.activate] * 5
    choices += [acts.stage_damaged, acts.stage_wrong, acts.drop, acts.activate_while_staging, acts.fence]
    for number in range(NUM_ACTS):
        await acts.draw.choice(choices)()
        if number % 40 == 39:
            site.publish(0.01)
            await site.sync()
            acts.staged = None
            await site.check_bits()
    await asyncio.gather(*acts.running)
    site.publish(0.01)
    await site.sync(is_verified=True)
    await site.check_bits()
    await site.flush()
    assert site.server.is_alive
