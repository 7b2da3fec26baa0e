"""What every serving engine must do; the list is at the top of ``rose.interfaces.serving``."""

from __future__ import annotations

import asyncio
import math
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from typing import Any, cast

from rose.errors import EngineBusyError, RequestRefusedError
from rose.interfaces.serving import (
    PauseMode,
    ServingEngine,
    SupportsKvBudget,
    SupportsPrefixReset,
    SupportsSleep,
    SupportsStepGate,
)
from rose.pool.turns import check_chunk, check_logprobs
from rose.testing.contracts.streams import collect, reading, until
from rose.testing.contracts.updates import WeightUpdateContract
from rose.testing.contracts.verdicts import cannot, raising, skipping_what_is_unsupported
from rose.types import EngineRequest, FinishReason, RequestId, Sampling, TokenChunk


class EngineContract(WeightUpdateContract):
    """Subclass it, override ``make_engine``, and set what differs for your model.

    ``make_engine`` may hand out one shared engine: override ``release_engine`` as well then, so that it is not closed
    after the first test. Every test leaves the engine without requests, running, with its gate and budget open.

    Attributes:
        valid_prompt: Token ids that the model takes.
        vocab_size: Ids from here on are refused; ``None``: not known.
        max_model_len: Prompts longer than this are refused; ``None``: not known.
        long_tokens: Length of the streams that tests interrupt: long enough still to run a few milliseconds later.
        quiet_s: How long to watch that no token comes.
        timeout_s: Bound of one test, the making of the engine included.
        num_burst: Requests that are sent at once, more than most engines run.
        is_batch_invariant: Whether greedy tokens stay the same whatever else is in the batch.
        is_continuable: Whether greedy tokens follow from the tokens before them alone, to the last bit of rounding.
    """

    valid_prompt: tuple[int, ...] = (1, 2, 3, 4, 5)
    vocab_size: int | None = 1000
    max_model_len: int | None = 4096
    long_tokens: int = 64
    quiet_s: float = 0.1
    timeout_s: float = 60.0
    num_burst: int = 32
    is_batch_invariant: bool = True
    is_continuable: bool = True

    async def make_engine(self) -> ServingEngine:
        """Return an engine that is ready to serve."""
        message = "override make_engine() and return an engine that is ready to serve"
        raise NotImplementedError(message)

    async def release_engine(self, engine: ServingEngine) -> None:
        """Let go of the engine after a test."""
        await engine.close()

    @asynccontextmanager
    async def engine(self) -> AsyncIterator[ServingEngine]:
        """Give the engine under test for the length of one test."""
        with skipping_what_is_unsupported():
            async with asyncio.timeout(self.timeout_s):
                engine = await self.make_engine()
                try:
                    yield engine
                finally:
                    await self.release_engine(engine)

    def request(self, max_tokens: int = 8, prompt: tuple[int, ...] | None = None, **sampling: Any) -> EngineRequest:
        """Return a fresh request: greedy, without an end at the model's own end token, unless said otherwise."""
        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        return EngineRequest(
            request_id=RequestId(f"contract-{uuid.uuid4().hex[:12]}"),
            prompt_ids=self.valid_prompt if prompt is None else prompt,
            sampling=Sampling(max_tokens=max_tokens, **options),
        )

    async def assert_serves(self, engine: ServingEngine) -> None:
        """Check that the engine still answers."""
        stream = await collect(engine, self.request(max_tokens=2))
        assert stream.finish_reason is FinishReason.LENGTH, "the engine no longer answers a plain request"

    async def test_max_tokens_bounds_the_stream(self) -> None:
        """Exactly ``max_tokens`` tokens, then ``LENGTH``. Look for lost, repeated or extra tokens at chunk borders.

        Tokens are plain integers, as the pool takes no others; an array's numbers are none.
        """
        async with self.engine() as engine:
            for num_tokens in (1, 2, 9):
                stream = await collect(engine, self.request(num_tokens))
                for chunk in stream.chunks:
                    check_chunk(chunk)
                assert len(stream.token_ids) == num_tokens
                assert stream.finish_reason is FinishReason.LENGTH
                assert all(0 <= token < (self.vocab_size or math.inf) for token in stream.token_ids)

    async def test_only_the_last_chunk_has_a_finish_reason(self) -> None:
        """A finish reason ends the stream; nothing may follow it, and a stream may not just stop."""
        async with self.engine() as engine:
            stream = await collect(engine, self.request())
            assert [chunk.finish_reason is None for chunk in stream.chunks] == [True] * (len(stream.chunks) - 1) + [
                False
            ]

    async def test_one_logprob_a_token(self) -> None:
        """``logprobs`` is as long as ``token_ids`` in every chunk; natural logs of the sampled tokens, plain numbers, never above 0."""
        async with self.engine() as engine:
            stream = await collect(engine, self.request(logprobs=True))
            assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in stream.chunks)
            check_logprobs(stream.logprobs)

    async def test_no_logprobs_unless_asked(self) -> None:
        """Without ``logprobs`` the field stays empty; it is never filled with zeros."""
        async with self.engine() as engine:
            assert (await collect(engine, self.request(logprobs=False))).logprobs == ()

    async def test_greedy_is_deterministic(self) -> None:
        """Temperature 0 gives the same tokens each time. Look at a prefix cache that is wrong, or at a random seed."""
        async with self.engine() as engine:
            first, second = [await collect(engine, self.request()) for _ in range(2)]
            assert first.token_ids == second.token_ids

    async def test_a_seed_makes_sampling_repeatable(self) -> None:
        """``Sampling.seed`` must reach the sampler."""
        async with self.engine() as engine:
            first, second = [await collect(engine, self.request(temperature=1.0, seed=7)) for _ in range(2)]
            assert first.token_ids == second.token_ids

    async def test_stop_token_ends_the_stream_and_is_kept(self) -> None:
        """A stop token id ends the stream with ``STOP`` and is the last token of it."""
        async with self.engine() as engine:
            free = (await collect(engine, self.request())).token_ids
            stop = free[3]
            stream = await collect(engine, self.request(stop_token_ids=(stop,)))
            assert stream.token_ids == free[: free.index(stop) + 1]
            assert stream.finish_reason is FinishReason.STOP

    async def test_abort_keeps_the_tokens(self) -> None:
        """An aborted stream ends with ``ABORTED`` and the tokens made so far, which are those of an undisturbed run."""
        async with self.engine() as engine:
            whole = (await collect(engine, self.request(self.long_tokens))).token_ids
            request = self.request(self.long_tokens)
            async with reading(engine, request) as stream:
                await stream.has_tokens(2)
                await engine.abort(request.request_id)
                await stream.finish()
            assert stream.finish_reason is FinishReason.ABORTED
            assert 2 <= len(stream.token_ids) < self.long_tokens
            assert stream.token_ids == whole[: len(stream.token_ids)], "abort lost or repeated tokens"
            await self.assert_idle(engine)

    async def test_abort_of_an_unknown_request_is_a_no_op(self) -> None:
        """Aborts race with ends, so an unknown or finished id is no error."""
        async with self.engine() as engine:
            request = self.request()
            await engine.abort(request.request_id)
            await collect(engine, request)
            await engine.abort(request.request_id)
            await self.assert_serves(engine)

    async def test_closing_a_stream_frees_the_engine(self) -> None:
        """A reader that goes away must not leave its request running. Abort in the generator's ``finally``."""
        async with self.engine() as engine:
            chunks = engine.generate(self.request(self.long_tokens))
            async with aclosing(cast("AsyncGenerator[TokenChunk, None]", chunks)):
                await anext(chunks)
            await self.assert_idle(engine)

    async def test_cancelling_a_reader_frees_the_engine(self) -> None:
        """The same for a reader whose task is cancelled while it waits for a token."""
        async with self.engine() as engine:
            async with reading(engine, self.request(self.long_tokens)) as stream:
                await stream.has_tokens(1)
            await self.assert_idle(engine)

    async def test_streams_do_not_mix(self) -> None:
        """Concurrent requests each get their own tokens. Look at how outputs are handed to their readers."""
        async with self.engine() as engine:
            prompts = [(*self.valid_prompt, token) for token in self.valid_prompt[:4]]
            alone = [await collect(engine, self.request(16, prompt)) for prompt in prompts]
            together = await asyncio.gather(*(collect(engine, self.request(16, prompt)) for prompt in prompts))
            assert [len(stream.token_ids) for stream in together] == [16] * len(prompts)
            if self.is_batch_invariant:
                assert [s.token_ids for s in together] == [s.token_ids for s in alone]

    async def test_pause_keep_goes_on_where_it_was(self) -> None:
        """Between ``pause`` and ``resume`` no token is made; afterwards the stream goes on as if nothing had been."""
        async with self.engine() as engine:
            whole = (await collect(engine, self.request(self.long_tokens))).token_ids
            async with reading(engine, self.request(self.long_tokens)) as stream:
                await stream.has_tokens(2)
                await engine.pause(PauseMode.KEEP)
                await self.assert_quiet(stream)
                assert (await engine.snapshot()).is_paused
                await engine.resume()
                await stream.finish()
            assert stream.token_ids == whole
            assert not (await engine.snapshot()).is_paused

    async def test_pause_abort_ends_the_streams(self) -> None:
        """``pause(ABORT)`` ends what is in flight as aborted; after ``resume`` the engine serves again."""
        async with self.engine() as engine:
            async with reading(engine, self.request(self.long_tokens)) as stream:
                await stream.has_tokens(2)
                await engine.pause(PauseMode.ABORT)
                await stream.finish()
                await engine.resume()
            assert stream.finish_reason is FinishReason.ABORTED
            assert len(stream.token_ids) >= 2
            await self.assert_serves(engine)

    async def test_requests_wait_while_paused(self) -> None:
        """A request that comes during a pause is neither lost nor refused; it runs after ``resume``."""
        async with self.engine() as engine:
            await engine.pause(PauseMode.KEEP)
            async with reading(engine, self.request()) as stream:
                await self.assert_quiet(stream)
                await engine.resume()
                await stream.finish()
            assert len(stream.token_ids) == 8

    async def test_resume_without_pause_is_a_no_op(self) -> None:
        """``resume`` may come twice, as after an error path."""
        async with self.engine() as engine:
            await engine.resume()
            await self.assert_serves(engine)

    async def test_an_over_long_prompt_is_refused(self) -> None:
        """A prompt beyond the model's length raises ``RequestRefusedError`` at once, and the engine lives on."""
        if self.max_model_len is None:
            cannot("the model's length (max_model_len) is not known")
        async with self.engine() as engine:
            prompt = (self.valid_prompt[0],) * (self.max_model_len + 1)
            with raising(RequestRefusedError):
                await collect(engine, self.request(prompt=prompt))
            await self.assert_serves(engine)

    async def test_unknown_token_ids_are_refused(self) -> None:
        """Ids outside the vocabulary would read beyond the embedding: check them before the model sees them."""
        if self.vocab_size is None:
            cannot("the number of the model's token ids (vocab_size) is not known, and an unknown id ends some servers")
        async with self.engine() as engine:
            for token in (self.vocab_size, -1):
                with raising(RequestRefusedError):
                    await collect(engine, self.request(prompt=(*self.valid_prompt, token)))
            await self.assert_serves(engine)

    async def test_a_continuation_takes_the_rest_of_the_budget(self) -> None:
        """A turn that moved goes on with its tokens as prompt and the rest of its budget: none is lost, repeated or too many.

        Look at ids that are turned into text and back, and at limits that count the prompt in.
        """
        async with self.engine() as engine:
            whole = (await collect(engine, self.request(12))).token_ids
            for num_made in (1, 5, 11):
                prompt = (*self.valid_prompt, *whole[:num_made])
                rest = await collect(engine, self.request(12 - num_made, prompt))
                assert len(rest.token_ids) == 12 - num_made
                assert rest.finish_reason is FinishReason.LENGTH
                if self.is_continuable:
                    assert rest.token_ids == whole[num_made:]

    async def test_an_id_in_flight_is_refused(self) -> None:
        """A second request under the id of one that runs raises ``RequestRefusedError``, and the first is none the worse."""
        async with self.engine() as engine:
            whole = (await collect(engine, self.request(self.long_tokens))).token_ids
            request = self.request(self.long_tokens)
            async with reading(engine, request) as stream:
                await stream.has_tokens(2)
                with raising(RequestRefusedError):
                    await collect(engine, request)
                await stream.finish()
            assert stream.token_ids == whole, "the second request disturbed the first"

    async def test_a_burst_is_served_or_told_busy(self) -> None:
        """Of many requests at once each is served whole or raises ``EngineBusyError``; none is lost, cut short or left behind."""
        async with self.engine() as engine:
            requests = [collect(engine, self.request(4)) for _ in range(self.num_burst)]
            ends = await asyncio.gather(*requests, return_exceptions=True)
            others = [end for end in ends if isinstance(end, BaseException) and not isinstance(end, EngineBusyError)]
            assert not others, f"{len(others)} of {len(ends)} failed, the first with {others[0]!r}"
            served = [end for end in ends if not isinstance(end, BaseException)]
            assert served, "no request was served"
            assert {len(stream.token_ids) for stream in served} == {4}
            await self.assert_idle(engine)

    async def test_snapshot_counts_requests(self) -> None:
        """The snapshot sees a request in flight and sees it go; KV use stays within the total; readings are fresh."""
        async with self.engine() as engine:
            idle = await engine.snapshot()
            assert (idle.num_running, idle.num_waiting) == (0, 0)
            async with reading(engine, self.request(self.long_tokens)) as stream:
                await stream.has_tokens(1)
                busy = await engine.snapshot()
                assert busy.num_running + busy.num_waiting == 1
                assert 0 < busy.kv_used_tokens <= busy.kv_total_tokens
                assert busy.read_at_s >= idle.read_at_s
            await self.assert_idle(engine)

    async def test_every_token_has_the_engines_version(self) -> None:
        """Tokens carry the weight version that made them: the one that the snapshot shows."""
        async with self.engine() as engine:
            version = (await engine.snapshot()).weight_version
            assert set((await collect(engine, self.request())).versions) == {version}

    async def test_a_kv_cut_evicts_and_growth_serves_again(self) -> None:
        """``SupportsKvBudget``: a cut ends requests as evicted with their tokens; after growth the engine serves."""
        async with self.engine() as engine:
            if not isinstance(engine, SupportsKvBudget):
                cannot("the engine does not support a KV budget")
            total = (await engine.snapshot()).kv_total_tokens
            try:
                async with reading(engine, self.request(self.long_tokens)) as stream:
                    await stream.has_tokens(2)
                    await engine.set_kv_budget(0)
                    await stream.finish()
            finally:
                assert await engine.set_kv_budget(total) > 0
            assert stream.finish_reason is FinishReason.EVICTED
            assert len(stream.token_ids) >= 2
            await self.assert_serves(engine)

    async def test_a_closed_gate_holds_steps_back(self) -> None:
        """``SupportsStepGate``: no token while it is closed, none lost when it opens."""
        async with self.engine() as engine:
            if not isinstance(engine, SupportsStepGate):
                cannot("the engine does not support a step gate")
            whole = (await collect(engine, self.request(self.long_tokens))).token_ids
            try:
                async with reading(engine, self.request(self.long_tokens)) as stream:
                    await stream.has_tokens(2)
                    await engine.set_gate(is_open=False)
                    await self.assert_quiet(stream)
                    await engine.set_gate(is_open=True)
                    await stream.finish()
            finally:
                await engine.set_gate(is_open=True)
            assert stream.token_ids == whole

    async def test_asleep_nobody_waits_and_waking_serves_again(self) -> None:
        """``SupportsSleep``: requests end as evicted with their tokens, none is taken asleep, and the version stays."""
        async with self.engine() as engine:
            if not isinstance(engine, SupportsSleep):
                cannot("the engine cannot sleep")
            version = (await engine.snapshot()).weight_version
            whole = (await collect(engine, self.request(self.long_tokens))).token_ids
            try:
                async with reading(engine, self.request(self.long_tokens)) as stream:
                    await stream.has_tokens(2)
                    await engine.sleep()
                    await stream.finish()
                with raising(EngineBusyError):
                    await collect(engine, self.request(2))
            finally:
                woken = await engine.wake()
            assert stream.finish_reason is FinishReason.EVICTED
            assert stream.token_ids == whole[: len(stream.token_ids)], "sleep lost or repeated tokens"
            assert not woken.is_stale
            assert woken.version == version
            await self.assert_serves(engine)

    async def test_a_prefix_reset_changes_no_answer(self) -> None:
        """``SupportsPrefixReset``: dropping cached prefixes costs time, never tokens."""
        async with self.engine() as engine:
            if not isinstance(engine, SupportsPrefixReset):
                cannot("the engine does not support a prefix reset")
            before = await collect(engine, self.request())
            await engine.reset_prefix_cache()
            assert (await collect(engine, self.request())).token_ids == before.token_ids

    async def assert_quiet(self, stream: Any) -> None:
        """Check that a stream gives nothing for a while, once what was made before has been read."""
        await asyncio.sleep(self.quiet_s)
        num_tokens = len(stream.token_ids)
        assert stream.finish_reason is None, f"the stream ended ({stream.finish_reason}) while it was held"
        await asyncio.sleep(self.quiet_s)
        assert len(stream.token_ids) == num_tokens, "tokens came while the engine was held"

    async def assert_idle(self, engine: ServingEngine) -> None:
        """Check that no request is left on the engine, soon."""

        async def is_idle() -> bool:
            snapshot = await engine.snapshot()
            return snapshot.num_running + snapshot.num_waiting == 0

        try:
            async with asyncio.timeout(self.timeout_s / 4):
                await until(is_idle)
        except TimeoutError:
            message = "a request is still on the engine though nobody reads it"
            raise AssertionError(message) from None
