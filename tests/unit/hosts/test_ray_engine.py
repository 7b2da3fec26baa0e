"""An engine in an actor of its own: taken over, lost, made anew, fed from a relay."""

from __future__ import annotations

import asyncio

import pytest

from ray_parts import Cable, fake, install_fakes, until
from rose.errors import BackendUnavailableError, ConfigError, EngineError, EngineLostError, TransportError
from rose.hosts.ray.engine import RayEngine
from rose.hosts.ray.engine_host import EngineHost, portable
from rose.hosts.ray.specs import EngineSpec
from rose.testing import fake_update
from rose.types import EngineId, EngineRequest, FinishReason, RequestId, Sampling, TransportAddress, WeightVersion


@pytest.fixture(autouse=True)
def _fakes(tmp_path, monkeypatch):
    install_fakes(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))


def request(name: str = "r", num_tokens: int = 4) -> EngineRequest:
    sampling = Sampling(max_tokens=num_tokens, temperature=0.0, logprobs=False)
    return EngineRequest(request_id=RequestId(name), prompt_ids=(1, 2, 3), sampling=sampling)


async def opened(host: EngineHost) -> tuple[RayEngine, Cable]:
    cable = Cable(host)
    engine = RayEngine(EngineId("e"), cable)
    await engine.open()
    return engine, cable


async def tokens(engine: RayEngine, asked: EngineRequest) -> tuple[list[int], FinishReason | None]:
    made: list[int] = []
    reason = None
    async for chunk in engine.generate(asked):
        made += chunk.token_ids
        reason = chunk.finish_reason
    return made, reason


async def ended(engine: RayEngine, host: EngineHost) -> None:
    await engine.close()
    await host.close()


async def test_many_streams_need_no_more_reads_than_there_are_moments_with_tokens():
    host = EngineHost(fake("e", max_running=64))
    engine, cable = await opened(host)
    outcomes = await asyncio.gather(*(tokens(engine, request(f"r{i}", 20)) for i in range(50)))
    assert all(len(made) == 20 and reason is FinishReason.LENGTH for made, reason in outcomes)
    assert cable.calls.count("read") < 500  # of 1,000 tokens
    await ended(engine, host)


async def test_a_second_client_takes_over_and_the_first_is_told():
    host = EngineHost(fake("e"))
    first, _ = await opened(host)
    running = asyncio.create_task(tokens(first, request(num_tokens=2000)))
    await until(lambda: host._pumps, "the request runs")
    second, _ = await opened(host)
    assert (await tokens(second, request("other")))[1] is FinishReason.LENGTH
    with pytest.raises(EngineLostError, match="works for another pool"):
        await first.snapshot()
    with pytest.raises(EngineLostError, match="works for another pool"):
        await running
    assert (await second.snapshot()).num_running == 0
    await first.close()
    await ended(second, host)


async def test_a_cut_connection_ends_every_stream_and_every_later_call():
    host = EngineHost(fake("e"))
    engine, cable = await opened(host)
    running = [asyncio.create_task(tokens(engine, request(f"r{i}", 2000))) for i in range(3)]
    await until(lambda: len(host._pumps) == 3)
    cable.cut()
    for task in running:
        with pytest.raises(EngineLostError, match="the cable was cut"):
            await task
    with pytest.raises(EngineLostError, match="the cable was cut"):
        await engine.snapshot()
    assert not engine._streams
    await ended(engine, host)


async def test_a_read_that_fails_in_any_way_ends_the_streams():
    class Confused(EngineHost):
        async def read(self, client, after, wait_s):
            await asyncio.sleep(0.05)
            message = "what?"
            raise RuntimeError(message)

    host = Confused(fake("e"))
    engine, _ = await opened(host)
    with pytest.raises(EngineLostError, match=r"engine 'e' cannot be read: what?"):
        await tokens(engine, request())
    await ended(engine, host)


async def test_closing_a_stream_early_frees_the_engine():
    host = EngineHost(fake("e"))
    engine, _ = await opened(host)
    stream = engine.generate(request(num_tokens=4000))
    await anext(stream)
    await stream.aclose()
    await until(lambda: not host._pumps, "the request is gone")
    assert host._engine.result().aborted == ["r"]
    assert (await engine.snapshot()).num_running == 0
    await ended(engine, host)


async def test_a_lost_engine_is_made_anew_when_it_is_asked_what_it_is():
    host = EngineHost(fake("e", version="run:0"))
    engine, _ = await opened(host)
    await engine.stage(fake_update(WeightVersion("run", 4)))
    await engine.activate()
    card = await host.describe()
    assert (card.version, card.source) == (WeightVersion("run", 4), TransportAddress(name="memory"))
    host._engine.result().die()
    with pytest.raises(EngineLostError, match="was killed"):
        await engine.snapshot()
    card = await host.describe()
    assert (card.version, card.source) == (WeightVersion("run", 0), None)
    await ended(engine, host)


async def test_a_start_that_fails_is_told_and_tried_again():
    host = EngineHost(fake("e", backend="never-starts"))
    for _ in range(2):
        with pytest.raises(EngineError, match="RuntimeError: no such GPU"):
            await host.describe()
    await host.close()


async def test_updates_come_from_the_relay_and_from_the_publisher_while_it_is_away():
    relay = TransportAddress(name="memory", options=(("port", 7001),))
    is_up = True

    async def find() -> TransportAddress:
        if not is_up:
            message = "relay 'r' is gone"
            raise TransportError(message)
        return relay

    host = EngineHost(fake("e", relay="r"), relay=find)
    engine, _ = await opened(host)
    for n, is_up in enumerate((True, False)):  # noqa: B007 - find() reads it
        await engine.stage(fake_update(WeightVersion("run", n)))
        await engine.activate()
    used = [update.address for update in host._engine.result().updates]
    assert used == [relay, TransportAddress(name="memory")]
    assert (await host.describe()).source == TransportAddress(name="memory"), "what the pool knows is the publisher's"
    await ended(engine, host)


async def test_what_an_engine_cannot_do_is_said():
    host = EngineHost(fake("e"))
    engine, _ = await opened(host)
    with pytest.raises(EngineError, match=r"engine 'e' \(fake\) cannot weight_checksums"):
        await engine.weight_checksums()
    await ended(engine, host)


async def test_a_closed_client_calls_no_more():
    host = EngineHost(fake("e"))
    engine, cable = await opened(host)
    await engine.close()
    with pytest.raises(EngineLostError, match="engine 'e': this client was closed"):
        await engine.snapshot()
    assert "snapshot" not in cable.calls
    await host.close()


async def test_a_closed_host_starts_nothing_any_more():
    host = EngineHost(fake("e"))
    await host.close()
    with pytest.raises(EngineLostError, match="engine 'e' was closed"):
        await host.describe()


def test_a_name_that_differs_from_the_backends_is_refused():
    with pytest.raises(ConfigError, match=r"backend 'fake' calls it 'other'; give both the same name"):
        EngineSpec(engine_id="e", backend="fake", options={"engine_id": "other"}).make()


def test_errors_of_libraries_become_errors_that_every_process_can_read():
    class OfALibraryError(Exception):
        pass

    own = BackendUnavailableError("no vllm")
    assert portable(own) is own
    assert type(portable(OfALibraryError("oh"))) is EngineError
    assert str(portable(OfALibraryError("oh"))) == "OfALibraryError: oh"
    assert type(portable(UnicodeDecodeError("utf-8", b"", 0, 1, "oh"))) is ValueError
