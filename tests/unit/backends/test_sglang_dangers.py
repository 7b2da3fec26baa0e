"""What the engine does about the dangers of an SGLang server: over the fake one, which has them."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose import registry
from rose.backends.openai.client import OpenAiClient
from rose.backends.sglang import SglangEngine, updating
from rose.backends.sglang import engine as engine_module
from rose.backends.sglang.calls import call
from rose.backends.sglang.client import SglangClient
from rose.backends.sglang.control import SglangControl
from rose.errors import (
    EngineBusyError,
    EngineFencedError,
    EngineLostError,
    EngineUnsupportedError,
    RequestRefusedError,
    TransferError,
)
from rose.interfaces.serving import PauseMode
from rose.testing import FakeEngine, fake_update
from rose.testing.contracts.streams import collect, reading, until
from rose.testing.sglang_server import serve_sglang
from rose.types import Activation, EngineId, EngineRequest, FinishReason, RequestId, Sampling, WeightVersion

SOON_S = 0.2


@contextlib.asynccontextmanager
async def opened(*, fake=None, timeout_s=5.0, version=None, **options):
    """Give an engine, the fake server that it is a client of, and the fake engine in that."""
    fake = fake or FakeEngine(token_s=0.002, max_model_len=512)
    async with asyncio.timeout(20), serve_sglang(fake, **options) as (url, server):
        engine = SglangEngine(url, timeout_s=timeout_s, version=version)
        try:
            yield engine, server, fake
        finally:
            await engine.close()


_numbers = iter(range(10**6))


def request(max_tokens=400, prompt=(1, 2, 3), **sampling):
    options = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest(
        request_id=RequestId(f"r{next(_numbers)}"),
        prompt_ids=prompt,
        sampling=Sampling(max_tokens=max_tokens, **options),
    )


async def test_the_server_is_asked_once_how_many_token_ids_there_are():
    async with opened() as (engine, server, _):
        for _ in range(2):
            with pytest.raises(RequestRefusedError, match=r"\[0, 1000\)"):
                await collect(engine, request(prompt=(1000,)))
        assert server.calls.count("/generate") == 1
        assert server.died is None


async def test_the_fake_server_dies_of_what_real_ones_die_of():
    async with opened(timeout_s=0.3) as (engine, server, _):
        engine._vocab_size = 10**6
        with pytest.raises(EngineLostError):
            await collect(engine, request(prompt=(1000,)))
        assert "IndexError" in server.died


async def test_a_server_that_lingers_is_lost_in_the_stated_time(monkeypatch):
    monkeypatch.setattr(engine_module, "_BEAT_S", 0.1)
    async with opened(timeout_s=0.3) as (engine, server, _):
        async with reading(engine, request()) as stream:
            await stream.has_tokens(3)
            server.die("a scheduler exception")
            died_s = time.monotonic()
            with pytest.raises(EngineLostError):
                await stream.finish()
            assert time.monotonic() - died_s < 0.1 + 0.3 + SOON_S
            assert len(stream.token_ids) >= 3
        with pytest.raises(EngineLostError):
            await engine.snapshot()


async def test_a_request_that_waits_for_a_dead_server_is_lost_too(monkeypatch):
    monkeypatch.setattr(engine_module, "_BEAT_S", 0.1)
    async with opened(timeout_s=0.3) as (engine, server, _):
        await engine.snapshot()
        server.die("a scheduler exception")
        with pytest.raises(EngineLostError):
            await collect(engine, request())


async def test_no_server_at_all_is_lost():
    engine = SglangEngine("http://127.0.0.1:9", timeout_s=1.0)
    with pytest.raises(EngineLostError):
        await collect(engine, request())
    with pytest.raises(EngineLostError):
        await engine.snapshot()
    await engine.close()
    with pytest.raises(EngineLostError, match="closed"):
        await engine.snapshot()


async def test_an_abort_before_the_scheduler_has_the_request_is_a_cut():
    async with opened() as (engine, server, fake):
        await engine.pause(PauseMode.KEEP)
        asked = request()
        async with reading(engine, asked) as stream:
            await until(lambda: bool(server._requests))
            await engine.abort(asked.request_id)
            await stream.finish()
        assert stream.finish_reason is FinishReason.ABORTED
        assert "/abort_request" not in server.calls
        await until(lambda: not server._requests)
        await engine.resume()
        assert fake.requests == []


async def test_an_abort_while_paused_ends_the_stream_now():
    async with opened() as (engine, server, _):
        asked = request()
        async with reading(engine, asked) as stream:
            await stream.has_tokens(3)
            await engine.pause(PauseMode.KEEP)
            await engine.abort(asked.request_id)
            await stream.finish()
        assert stream.finish_reason is FinishReason.ABORTED
        await engine.resume()
        await until(lambda: not server._requests)


async def test_an_abort_that_is_not_answered_is_finished_by_a_cut(monkeypatch):
    monkeypatch.setattr(engine_module, "_ABORT_S", 0.2)
    async with opened() as (engine, server, _):
        asked = request()
        async with reading(engine, asked) as stream:
            await stream.has_tokens(1)
            next(iter(server._requests.values())).was_abort_sent = True  # so the real one would ignore this one
            await engine.abort(asked.request_id)
            await stream.finish()
        assert stream.finish_reason is FinishReason.ABORTED
        await until(lambda: not server._requests)


async def test_an_abort_names_one_request_only():
    async with opened() as (engine, _, _):
        first, second = (
            EngineRequest(request_id=RequestId(name), prompt_ids=(1,), sampling=Sampling(max_tokens=100))
            for name in ("g1", "g1-a")
        )
        async with reading(engine, first) as one, reading(engine, second) as other:
            await one.has_tokens(1)
            await other.has_tokens(1)
            await engine.abort(first.request_id)
            await one.finish()
            await other.finish()
        assert one.finish_reason is FinishReason.ABORTED
        assert other.finish_reason is FinishReason.LENGTH


async def test_a_pause_that_aborts_ends_all_wherever_they_are():
    async with opened() as (engine, server, _):
        async with reading(engine, request()) as running:
            await running.has_tokens(3)
            await engine.pause(PauseMode.KEEP)
            async with reading(engine, request()) as waiting:
                await until(lambda: len(server._requests) == 2)
                await engine.pause(PauseMode.ABORT)
                await asyncio.gather(running.finish(), waiting.finish())
        assert running.finish_reason is waiting.finish_reason is FinishReason.ABORTED
        assert len(running.token_ids) == len(set(enumerate(running.token_ids))) >= 3
        assert waiting.token_ids == ()
        assert (await engine.snapshot()).is_paused
        await engine.resume()
        assert len((await collect(engine, request(4))).token_ids) == 4


async def test_the_repeated_token_of_an_abort_is_not_handed_out():
    async with opened() as (engine, _, _):
        whole = (await collect(engine, request())).token_ids
        async with reading(engine, request()) as stream:
            await stream.has_tokens(3)
            await engine.pause(PauseMode.ABORT)
            await stream.finish()
        assert stream.token_ids == whole[: len(stream.token_ids)]


async def test_an_abort_over_which_the_server_fails_has_ended_the_request():
    async with opened(drops_aborts=True) as (engine, server, _), reading(engine, request()) as stream:
        await stream.has_tokens(3)
        await engine.pause(PauseMode.ABORT)
        await stream.finish()
        assert stream.finish_reason is FinishReason.ABORTED
        assert len(stream.token_ids) >= 3
        assert not server._requests


async def test_while_paused_neither_health_nor_old_loads_are_believed():
    async with opened() as (engine, server, _):
        async with reading(engine, request()) as stream:
            await stream.has_tokens(1)
            await engine.pause(PauseMode.ABORT)
            found = await engine.snapshot()
        assert found.is_paused
        assert (found.num_running, found.kv_used_tokens) == (0, 0)
        assert "/health" not in server.calls


async def test_a_stop_id_that_the_server_ignores_ends_the_request_there_too():
    async with opened() as (engine, server, _):
        free = (await collect(engine, request(8))).token_ids
        stream = await collect(engine, request(stop_token_ids=(free[3],)))
        assert stream.token_ids == free[: free.index(free[3]) + 1]
        assert stream.finish_reason is FinishReason.STOP
        await until(lambda: not server._requests)


async def test_a_busy_server_is_busy():
    async with opened() as (engine, _, fake):
        fake.set_busy(is_busy=True)
        with pytest.raises(EngineBusyError):
            await collect(engine, request())


async def test_labels_of_a_server_whose_version_was_given():
    async with opened(version="grpo:4") as (engine, _, _):
        assert engine.weight_version == WeightVersion("grpo", 4)
        assert (await engine.snapshot()).weight_version == WeightVersion("grpo", 4)
        assert set((await collect(engine, request(4))).versions) == {WeightVersion("grpo", 4)}


async def test_its_address_makes_another_client_of_the_same_server():
    async with opened(version="grpo:4") as (engine, _, _):
        address = engine.address()
        other = registry.serving_engine(address.name, **dict(address.options))
        try:
            assert (await other.snapshot()).weight_version == WeightVersion("grpo", 4)
        finally:
            await other.close()


async def test_a_prefix_reset_needs_an_idle_server():
    async with opened() as (engine, _, fake):
        async with reading(engine, request()) as stream:
            await stream.has_tokens(1)
            with pytest.raises(EngineBusyError, match="try again later"):
                await engine.reset_prefix_cache()
        await until(lambda: fake.num_in_flight == 0)
        await engine.reset_prefix_cache()
        assert fake.num_prefix_resets == 1


async def test_abilities_need_the_package():
    async with opened() as (engine, _, _):
        for call in (
            engine.set_kv_budget(3),
            engine.set_gate(is_open=True),
            engine.sleep(),
            engine.stage(fake_update(WeightVersion("a", 1))),
        ):
            with pytest.raises(EngineUnsupportedError, match=r"rose-rl|cannot update"):
                await call
        assert not engine.is_asleep


async def test_a_command_that_the_package_does_not_know():
    async with opened(has_package=True) as (engine, _, _):
        with pytest.raises(TransferError, match="unknown command 'dance'"):
            await call(engine._client, "dance")


async def test_asleep_pauses_and_resumes_are_not_sent():
    async with opened(has_package=True) as (engine, server, _):
        await engine.sleep()
        server.calls.clear()
        await engine.pause(PauseMode.KEEP)
        await engine.resume()
        assert server.calls == []
        with pytest.raises(EngineBusyError, match="asleep"):
            await collect(engine, request())
        woken = await engine.wake()
        assert not woken.is_stale
        assert woken.restored_bytes > 0


async def test_weights_that_do_not_come_back_fence_the_engine(monkeypatch):
    fake = FakeEngine(weight_version=WeightVersion("run", 1))
    async with opened(fake=fake, has_package=True) as (engine, _, _):
        updates = Updates(fake, engine._control)
        monkeypatch.setattr(updating, "SglangUpdates", lambda http, num_ranks: updates)
        await engine.sleep(keeps_weights=False)
        woken = await engine.wake()
        assert woken.is_stale
        assert woken.version is None
        assert updates.is_fenced
        with pytest.raises(EngineFencedError):
            await collect(engine, request())


async def test_another_start_of_the_server_is_not_paused():
    async with opened() as (engine, _, _), serve_sglang(FakeEngine()) as (other, _):
        await engine.pause(PauseMode.KEEP)
        client = OpenAiClient(other, engine_id=EngineId("e"), token=None, timeout_s=5.0)
        engine._control._client = SglangClient(client)
        assert engine._control.paused is PauseMode.KEEP
        await engine._control.beat()
        assert engine._control.paused is None
        await client.close()


class Updates:
    """Carries updates to a fake engine."""

    def __init__(self, fake, control: SglangControl) -> None:
        self.fake, self.control = fake, control
        self.begun, self.fails, self.paused_at = [], None, []
        self.version, self.is_fenced, self.update = fake.weight_version, False, None

    @property
    def staged(self):
        return None if self.update is None else self.update.target

    async def begin(self, label):
        self.begun.append(label)
        return self

    async def state(self):
        return self

    async def fence(self):
        self.is_fenced = True

    async def stage(self, update):
        if self.fails:
            raise self.fails
        self.update = update

    async def activate(self, *, target):
        self.paused_at.append(self.control.paused)
        assert target == self.staged
        if self.fails:
            self.is_fenced = True
            raise self.fails
        self.fake.weight_version, self.is_fenced = target, False
        return Activation(version=target, stage_s=0.0, pause_s=0.0, fetched_bytes=0, is_verified=True)


@contextlib.asynccontextmanager
async def with_updates(monkeypatch):
    fake = FakeEngine(token_s=0.002, weight_version=WeightVersion("run", 1), max_model_len=512)
    async with opened(fake=fake) as (engine, server, _):
        updates = Updates(fake, engine._control)
        monkeypatch.setattr(updating, "SglangUpdates", lambda http, num_ranks: updates)
        yield engine, server, updates


async def test_an_activation_happens_in_a_pause_and_streams_go_on(monkeypatch):
    async with with_updates(monkeypatch) as (engine, _, updates), reading(engine, request()) as stream:
        await stream.has_tokens(3)
        await engine.stage(fake_update(WeightVersion("run", 2)))
        done = await engine.activate()
        assert done.version == engine.weight_version == WeightVersion("run", 2)
        assert done.pause_s > 0
        await stream.finish()
        assert stream.finish_reason is FinishReason.LENGTH
        assert [version.n for version in stream.versions] == sorted(version.n for version in stream.versions)
        assert set(stream.versions) == {WeightVersion("run", 1), WeightVersion("run", 2)}
        assert updates.begun == ["run:1"]
        assert updates.paused_at == [PauseMode.KEEP]
        assert not (await engine.snapshot()).is_paused


async def test_a_pause_outlives_an_activation_in_it(monkeypatch):
    async with with_updates(monkeypatch) as (engine, _, _):
        await engine.pause(PauseMode.KEEP)
        await engine.stage(fake_update(WeightVersion("run", 2)))
        await engine.activate()
        assert (await engine.snapshot()).is_paused


async def test_a_failed_stage_changes_nothing(monkeypatch):
    async with with_updates(monkeypatch) as (engine, _, updates):
        updates.fails = TransferError("damaged")
        with pytest.raises(TransferError, match="damaged"):
            await engine.stage(fake_update(WeightVersion("run", 2)))
        assert (await engine.snapshot()).weight_version == WeightVersion("run", 1)
        assert len((await collect(engine, request(4))).token_ids) == 4


async def test_a_half_written_activation_fences_the_engine_until_the_next(monkeypatch):
    async with with_updates(monkeypatch) as (engine, _, updates):
        async with reading(engine, request()) as stream:
            await stream.has_tokens(3)
            await engine.stage(fake_update(WeightVersion("run", 2)))
            updates.fails = TransferError("torn")
            with pytest.raises(TransferError, match="torn"):
                await engine.activate()
            await stream.finish()
        assert stream.finish_reason is FinishReason.ABORTED
        assert (await engine.snapshot()).weight_version is None
        with pytest.raises(EngineFencedError):
            await collect(engine, request())
        updates.fails = None
        await engine.stage(fake_update(WeightVersion("run", 3)))
        await engine.activate()
        assert len((await collect(engine, request(4))).token_ids) == 4


async def test_closing_the_client_ends_what_is_under_way():
    async with opened(fake=FakeEngine(token_s=0.01, max_model_len=512)) as (engine, _, _):
        task = asyncio.create_task(collect(engine, request()))
        await until(lambda: any(stream.num_tokens for stream in engine._streams.values()))
        await engine.close()
        with pytest.raises(EngineLostError, match="its client was closed"):
            await asyncio.wait_for(task, 2)


async def test_another_server_at_the_address_has_another_vocabulary():
    """A client that trusted what it knew of the server before would send ids that end this one."""
    fake = FakeEngine(vocab_size=1000)
    async with opened(fake=fake) as (engine, server, _):
        await collect(engine, request(4, prompt=(500,)))
        fake.vocab_size = 100
        engine._control._start = "the one before"
        engine._control.forget()  # as after a connection that broke
        with pytest.raises(RequestRefusedError, match="500"):
            await collect(engine, request(4, prompt=(500,)))
        assert server.died is None


async def test_a_reading_that_was_under_way_does_not_undo_a_sleep():
    async with opened(has_package=True) as (engine, _, _):
        beat, go_on = engine._control.beat, asyncio.Event()

        async def slow_beat():
            facts = await beat()
            await go_on.wait()
            return facts

        engine._control.beat = slow_beat
        snapshot = asyncio.create_task(engine.snapshot())
        await asyncio.sleep(0.05)
        await engine.sleep()
        go_on.set()
        await snapshot
        assert engine.is_asleep


async def test_who_put_a_server_to_sleep_does_not_matter_to_who_wakes_it():
    async with opened(has_package=True) as (engine, _, _):
        other = SglangEngine(engine.url, vocab_size=1000)
        await other.sleep()
        woken = await engine.wake()
        assert woken.restored_bytes > 0
        assert not (await engine.snapshot()).is_paused
        await other.close()


async def test_somebody_else_s_pause_outlives_an_activation(monkeypatch):
    fake = FakeEngine(weight_version=WeightVersion("run", 1), max_model_len=512)
    async with opened(fake=fake, has_package=True) as (engine, server, _):
        updates = Updates(fake, engine._control)
        monkeypatch.setattr(updating, "SglangUpdates", lambda http, num_ranks: updates)
        other = SglangEngine(engine.url, vocab_size=1000)
        await other.pause(PauseMode.KEEP)
        await engine.stage(fake_update(WeightVersion("run", 2)))
        server.calls.clear()
        await engine.activate()
        assert "/continue_generation" not in server.calls
        assert (await engine.snapshot()).is_paused
        await other.close()


async def test_nothing_is_paused_for_an_activation_of_nothing(monkeypatch):
    async with with_updates(monkeypatch) as (engine, server, _):
        with pytest.raises(TransferError, match="no update is staged"):
            await engine.activate()
        assert "/pause_generation" not in server.calls
