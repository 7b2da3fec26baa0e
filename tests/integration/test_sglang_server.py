"""One life of a real SGLang server, with what a client may do to it; at its end, its death."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import psutil
import pytest
import pytest_asyncio

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

import rose
from rose.backends.memory import MemoryTransport
from rose.backends.sglang import LaunchedSglang, SglangEngine
from rose.errors import EngineBusyError, EngineLostError, RequestRefusedError, TransferError
from rose.interfaces.serving import PauseMode
from rose.testing.checkpoint import CheckpointTrainer
from rose.testing.contracts.streams import Stream, collect, reading, until
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.sums import trainer_sums
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, WeightVersion
from sglang_real import MAX_CONTEXT, VOCAB_SIZE, make_model, make_options

pytestmark = [pytest.mark.sglang, pytest.mark.asyncio(loop_scope="module")]

NUM_ACTS = 200
ABORTED, STOP, LENGTH = FinishReason.ABORTED, FinishReason.STOP, FinishReason.LENGTH


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LaunchedSglang]:
    pytest.importorskip("transformers", reason="transformers is not installed: pip install 'rose-rl[demo]'")
    folder = tmp_path_factory.mktemp("sglang")
    options = make_options(folder, make_model(folder / "model"), initial_version=WeightVersion("life", 0))
    engine = LaunchedSglang(options)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def is_idle(engine) -> bool:
    found = await engine.snapshot()
    return found.num_running + found.num_waiting == 0


def schedulers(engine: LaunchedSglang) -> list[psutil.Process]:
    """Return the processes in which models of the server run."""
    children = psutil.Process(engine.pid).children(recursive=True)
    return [child for child in children if "scheduler" in " ".join(child.cmdline())]


@contextlib.asynccontextmanager
async def client_of(engine: LaunchedSglang, **options) -> AsyncIterator[SglangEngine]:
    other = SglangEngine(engine.url, engine_id="other", **options)
    try:
        yield other
    finally:
        await other.close()


async def test_what_just_fits_is_made_to_the_last_token(server, new_request):
    num_tokens = 6
    asked = new_request(num_tokens, prompt=(5,) * (MAX_CONTEXT - num_tokens))
    stream = await collect(server, asked)
    assert len(stream.token_ids) == num_tokens
    assert stream.finish_reason is LENGTH
    with pytest.raises(RequestRefusedError, match=f"more than the {MAX_CONTEXT}"):
        await collect(server, new_request(num_tokens, prompt=(5,) * (MAX_CONTEXT - num_tokens + 1)))


async def test_another_client_learns_all_it_needs_from_the_server(server, new_request):
    async with client_of(server) as other:
        with pytest.raises(RequestRefusedError, match=rf"\[0, {VOCAB_SIZE}\)"):
            await collect(other, new_request(prompt=(VOCAB_SIZE,)))
        here, there = [await collect(engine, new_request()) for engine in (server, other)]
        assert here.token_ids == there.token_ids
        assert set(there.versions) == {WeightVersion("life", 0)}
        assert (await other.snapshot()).max_context_tokens == MAX_CONTEXT


async def test_log_probs_are_those_of_the_model_at_any_temperature(server, new_request):
    seen: dict[float, dict[int, float]] = {1.0: {}, 3.0: {}}
    for temperature, found in seen.items():
        asked = [new_request(1, temperature=temperature) for _ in range(60)]
        for stream in await asyncio.gather(*(collect(server, each) for each in asked)):
            found[stream.token_ids[0]] = stream.logprobs[0]
    common = set(seen[1.0]) & set(seen[3.0])
    assert common
    assert all(math.isclose(seen[1.0][token], seen[3.0][token], abs_tol=0.05) for token in common)


async def test_a_pool_uses_it(server):
    async with rose.RolloutPool([server]) as pool:
        turns = [
            rose.Turn(
                trajectory_id=f"t{i}",
                group_id="g",
                prompt_ids=(5, 6, 7, i),
                sampling=Sampling(max_tokens=20, ignore_eos=True),
            )
            for i in range(10, 18)
        ]
        results = await asyncio.gather(*(pool.generate(turn) for turn in turns))
    assert {len(result.token_ids) for result in results} == {20}
    assert {span.version for result in results for span in result.versions} == {WeightVersion("life", 0)}
    assert all(len(result.hops) == 1 for result in results)


@attrs.define
class Actor:
    """Does one thing after another to an engine, at random."""

    engine: LaunchedSglang
    random: random.Random
    trainer: CheckpointTrainer
    transport: MemoryTransport
    publisher: Publisher
    running: dict[RequestId, tuple[EngineRequest, Stream, asyncio.Task[None]]] = attrs.field(factory=dict)
    done: list[tuple[EngineRequest, Stream]] = attrs.field(factory=list)
    num_refused: int = 0
    num_left: int = 0
    num_updates: int = 0
    count: int = 0

    @classmethod
    async def of(cls, engine: LaunchedSglang, seed: int) -> Actor:
        """Return one whose trainer has published, as version 0, what the engine has loaded."""
        trainer, transport = CheckpointTrainer(Path(engine.options.model)), MemoryTransport()
        transport.serve()
        publisher = Publisher(trainer, transport, run="life", targets=[await engine.target_layout()])
        publisher.publish_sync()
        return cls(engine, random.Random(seed), trainer, transport, publisher)

    async def stage(self) -> None:
        self.trainer.step(0.01)
        self.publisher.publish_sync()
        update = plan_update(self.transport, self.engine.weight_version)
        assert update is not None
        await self.engine.stage(update)

    async def update(self) -> None:
        await self.stage()
        assert (await self.engine.activate()).version == self.engine.weight_version
        self.num_updates += 1

    async def stage_wrongly(self) -> None:
        """Stage what leads from a version that the engine does not have."""
        await self.stage()
        update = plan_update(self.transport, self.engine.weight_version)
        assert update is not None
        manifests = update.manifest_keys[-1:]
        if len(update.manifest_keys) > 1:
            with pytest.raises(TransferError):
                await self.engine.stage(attrs.evolve(update, manifest_keys=manifests))

    def request(self, prompt: tuple[int, ...] | None = None, **sampling) -> EngineRequest:
        self.count += 1
        ids = tuple(self.random.randrange(2, VOCAB_SIZE) for _ in range(self.random.randrange(1, 200)))
        options = {
            "max_tokens": self.random.choice((1, 5, 50, 250)),
            "temperature": self.random.choice((0.0, 1.0)),
            **sampling,
        }
        return EngineRequest(
            request_id=RequestId(f"act-{self.count}"), prompt_ids=prompt or ids, sampling=Sampling(**options)
        )

    async def submit(self) -> None:
        stops = tuple(self.random.sample(range(2, VOCAB_SIZE), self.random.choice((0, 0, 20))))
        asked = self.request(
            stop_token_ids=stops, ignore_eos=self.random.random() < 0.7, logprobs=self.random.random() < 0.5
        )
        stream = Stream()
        task = asyncio.create_task(stream.read(self.engine.generate(asked)))
        self.running[asked.request_id] = (asked, stream, task)

    async def abort(self) -> None:
        for name in self.random.sample(sorted(self.running), min(2, len(self.running))):
            await self.engine.abort(name)

    async def leave(self) -> None:
        for name in self.random.sample(sorted(self.running), min(1, len(self.running))):
            _, stream, task = self.running.pop(name)
            is_left = not task.done()
            task.cancel()
            await asyncio.wait({task})
            self.num_left += is_left
            assert is_left or stream.finish_reason is not None

    async def refuse(self) -> None:
        wrong = self.random.choice(
            (
                self.request(prompt=(5, VOCAB_SIZE)),
                self.request(prompt=(5,) * 1000),
                self.request(max_tokens=MAX_CONTEXT + 1),
                self.request(stop_token_ids=(VOCAB_SIZE + 5,)),
                self.request(temperature=1.0, seed=3),
            )
        )
        with pytest.raises(RequestRefusedError):
            await collect(self.engine, wrong)
        self.num_refused += 1

    async def flush(self) -> None:
        with contextlib.suppress(EngineBusyError):
            await self.engine.reset_prefix_cache()

    async def act(self) -> None:
        acts = (
            *[self.submit] * 8,
            *[self.abort] * 3,
            *[self.leave] * 2,
            *[self.refuse] * 2,
            *[self.engine.resume] * 3,
            *[self.update] * 2,
            self.stage_wrongly,
            lambda: self.engine.pause(PauseMode.KEEP),
            lambda: self.engine.pause(PauseMode.ABORT),
            self.engine.snapshot,
            self.flush,
            lambda: self.engine.abort(RequestId("unknown")),
        )
        await self.random.choice(acts)()
        await asyncio.sleep(self.random.choice((0.0, 0.0, 0.01, 0.05)))

    async def finish(self) -> None:
        await self.engine.resume()
        for asked, stream, task in self.running.values():
            await task
            self.done.append((asked, stream))


def check_one_result(asked: EngineRequest, stream: Stream) -> None:
    """Check that a stream ended once, with what was asked for or what an end of its kind may have."""
    sampling, ids = asked.sampling, stream.token_ids
    assert [chunk.finish_reason is not None for chunk in stream.chunks].count(True) == 1
    assert stream.chunks[-1].finish_reason is not None
    assert len(ids) <= sampling.max_tokens
    assert len(stream.logprobs) == (len(ids) if sampling.logprobs else 0)
    assert {version.run for version in stream.versions} <= {"life"}
    assert [version.n for version in stream.versions] == sorted(version.n for version in stream.versions)
    assert not set(ids[:-1]) & set(sampling.stop_token_ids), "it went on behind a stop id"
    if stream.finish_reason is LENGTH:
        assert len(ids) == sampling.max_tokens
    elif stream.finish_reason is STOP:
        assert ids[-1] in sampling.stop_token_ids or not sampling.ignore_eos
    else:
        assert stream.finish_reason is ABORTED


async def test_after_random_acts_it_lives_and_each_request_has_one_result(server, new_request):
    actor = await Actor.of(server, 7)
    async with asyncio.timeout(240):
        for _ in range(NUM_ACTS):
            await actor.act()
        await actor.finish()
        await until(lambda: is_idle(server))
    for asked, stream in actor.done:
        check_one_result(asked, stream)
    ends = {stream.finish_reason for _, stream in actor.done}
    assert {ABORTED, LENGTH, STOP} <= ends
    assert len(actor.done) + actor.num_left > NUM_ACTS / 5
    assert actor.num_refused > 5
    await asyncio.sleep(1.0)  # idle, the server checks that its memory is all there, and ends when it is not
    found = await server.snapshot()
    assert (found.num_running, found.num_waiting, found.kv_used_tokens) == (0, 0, 0)
    assert len((await collect(server, new_request(30))).token_ids) == 30
    assert actor.num_updates > 5
    await actor.update()
    assert await server.weight_sums() == trainer_sums(actor.trainer)
    assert "leak" not in server.log_path.read_text()


async def test_a_scheduler_that_hangs_is_lost_in_the_stated_time(server, new_request):
    async with client_of(server, timeout_s=2.0) as other, reading(other, new_request(400)) as stream:
        await stream.has_tokens(3)
        stopped = schedulers(server)
        assert stopped
        for process in stopped:
            process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        try:
            with pytest.raises(EngineLostError):
                await stream.finish()
            assert (
                time.monotonic() - stopped_s < 1.0 + 2.0 + 1.0
            )  # a heartbeat a second, its timeout, and some for the machine
        finally:
            for process in stopped:
                process.send_signal(signal.SIGCONT)
    assert len((await collect(server, new_request(5))).token_ids) == 5


async def test_what_clients_are_kept_from_ends_a_server_and_that_is_seen(server, new_request):
    async with client_of(server, timeout_s=2.0, vocab_size=10**6) as other, reading(other, new_request(400)) as stream:
        await stream.has_tokens(3)
        sent_s = time.monotonic()
        with pytest.raises(EngineLostError):
            await collect(other, new_request(prompt=(VOCAB_SIZE,)))
        with pytest.raises(EngineLostError):
            await stream.finish()
        assert time.monotonic() - sent_s < 1.0 + 2.0 + 2.0
    keeper_pid = server.pid
    closed_s = time.monotonic()
    await server.close()
    assert time.monotonic() - closed_s < 5.0
    assert not psutil.pid_exists(keeper_pid)
    with pytest.raises(EngineLostError):
        await server.snapshot()
