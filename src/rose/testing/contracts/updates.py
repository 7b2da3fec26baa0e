"""The part of the engine contract that is about new weights."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from rose.errors import RoseError
from rose.interfaces.serving import ServingEngine
from rose.testing.contracts.streams import collect, reading
from rose.testing.contracts.verdicts import cannot, raising
from rose.types import EngineRequest, FinishReason, WeightUpdate


class WeightUpdateContract:
    """Stage and activate. Part of ``EngineContract``; skipped until ``make_update`` is overridden."""

    long_tokens: int
    timeout_s: float

    def engine(self) -> AbstractAsyncContextManager[ServingEngine]:
        """Give the engine under test for the length of one test."""
        raise NotImplementedError

    def request(self, max_tokens: int = 8) -> EngineRequest:
        """Return a fresh request."""
        raise NotImplementedError

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        """Return an update to the version after the engine's own. Override it to test weight updates."""
        cannot(f"make_update() is not overridden for {engine.engine_id}")

    async def test_stage_changes_nothing(self) -> None:
        """Staging only prepares. If this fails, ``stage`` wrote into live weights or moved the version."""
        async with self.engine() as engine:
            update = await self.make_update(engine)
            before = (await engine.snapshot()).weight_version
            greedy = await collect(engine, self.request())
            await engine.stage(update)
            assert (await engine.snapshot()).weight_version == before, "stage() moved the version"
            after = await collect(engine, self.request())
            assert after.token_ids == greedy.token_ids, "stage() changed what the engine answers"
            await engine.activate()

    async def test_activate_moves_to_the_target(self) -> None:
        """Afterwards the snapshot, the acknowledgement and new tokens carry the target version, and the engine runs.

        If the last part hangs, ``activate`` did not resume.
        """
        async with self.engine() as engine:
            update = await self.make_update(engine)
            await engine.stage(update)
            activation = await engine.activate()
            assert activation.version == update.target
            snapshot = await engine.snapshot()
            assert snapshot.weight_version == update.target
            assert not snapshot.is_paused, "activate() must resume the engine"
            assert set((await collect(engine, self.request())).versions) == {update.target}

    async def test_streams_survive_an_activation(self) -> None:
        """A stream in flight goes on over an update: no token lost, versions only ever go up."""
        async with self.engine() as engine:
            update = await self.make_update(engine)
            request = self.request(self.long_tokens)
            async with reading(engine, request) as stream:
                await stream.has_tokens(2)
                await engine.stage(update)
                await engine.activate()
                await stream.finish()
            assert stream.finish_reason is FinishReason.LENGTH
            assert len(stream.token_ids) == self.long_tokens
            numbers = [-1 if version is None else version.n for version in stream.versions]
            assert numbers == sorted(numbers), f"versions went back within one stream: {numbers}"

    async def test_a_new_stage_replaces_the_old(self) -> None:
        """Staging twice is legal; the last one counts."""
        async with self.engine() as engine:
            update = await self.make_update(engine)
            await engine.stage(update)
            await engine.stage(update)
            assert (await engine.activate()).version == update.target

    async def test_activate_without_stage_is_refused(self) -> None:
        """With nothing staged ``activate`` raises an error of ROSE's own and changes nothing."""
        async with self.engine() as engine:
            await engine.stage(await self.make_update(engine))
            await engine.activate()
            before = (await engine.snapshot()).weight_version
            with raising(RoseError):
                await engine.activate()
            assert (await engine.snapshot()).weight_version == before
            assert (await collect(engine, self.request())).finish_reason is FinishReason.LENGTH

    async def test_the_same_version_again_is_harmless(self) -> None:
        """At-least-once delivery: an update to the version that the engine has is a no-op or is refused."""
        async with self.engine() as engine:
            update = await self.make_update(engine)
            await engine.stage(update)
            await engine.activate()
            greedy = await collect(engine, self.request())
            try:
                await engine.stage(update)
                await engine.activate()
            except RoseError:
                pass
            assert (await engine.snapshot()).weight_version == update.target
            assert (await collect(engine, self.request())).token_ids == greedy.token_ids
