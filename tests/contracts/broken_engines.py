"""Engines that are broken in one way each, and the check of the contract that finds it."""

from __future__ import annotations

import random

import attrs
import numpy as np

from rose.errors import EngineBusyError, RoseError
from rose.interfaces.serving import PauseMode
from rose.testing import FakeEngine
from rose.types import FinishReason, WeightVersion


def rewriting(rewrite):
    """Return an engine whose streams are handed on through a function of all chunks so far and the new one."""

    class Rewriting(FakeEngine):
        async def generate(self, request):
            stream = super().generate(request)
            seen = []
            try:
                async for chunk in stream:
                    seen.append(chunk)
                    for rewritten in rewrite(self, request, seen, chunk):
                        yield rewritten
            finally:
                await stream.aclose()

    return Rewriting


Repeats = rewriting(
    lambda _e, _r, seen, chunk: [chunk, chunk] if len(seen) == 1 and not chunk.finish_reason else [chunk]
)
Loses = rewriting(lambda _e, _r, seen, chunk: [] if len(seen) == 2 else [chunk])
NeverSaysWhy = rewriting(lambda _e, _r, _s, chunk: [attrs.evolve(chunk, finish_reason=None)])
SaysWhyTooEarly = rewriting(lambda _e, _r, _s, chunk: [attrs.evolve(chunk, finish_reason=FinishReason.LENGTH)])
NoLogprobs = rewriting(lambda _e, _r, _s, chunk: [attrs.evolve(chunk, logprobs=())])
NumbersOfAnArray = rewriting(
    lambda _e, _r, _s, chunk: [attrs.evolve(chunk, token_ids=tuple(np.int64(token) for token in chunk.token_ids))]
)
LogprobsOfAnArray = rewriting(
    lambda _e, _r, _s, chunk: [attrs.evolve(chunk, logprobs=tuple(np.float32(each) for each in chunk.logprobs))]
)
AlwaysLogprobs = rewriting(lambda _e, _r, _s, chunk: [attrs.evolve(chunk, logprobs=(0.0,) * len(chunk.token_ids))])
WrongVersion = rewriting(lambda _e, _r, _s, chunk: [attrs.evolve(chunk, version=WeightVersion("run", 1))])
StopsWithoutItsToken = rewriting(
    lambda _e, r, _s, chunk: (
        [attrs.evolve(chunk, token_ids=(), logprobs=())]
        if chunk.finish_reason is FinishReason.STOP and r.sampling.stop_token_ids
        else [chunk]
    )
)
AbortLosesTokens = rewriting(
    lambda _e, _r, seen, chunk: (
        [attrs.evolve(chunk, token_ids=(seen[0].token_ids))] if chunk.finish_reason is FinishReason.ABORTED else [chunk]
    )
)
VersionsGoBack = rewriting(
    lambda _e, _r, seen, chunk: [attrs.evolve(chunk, version=WeightVersion("run", 9 if len(seen) == 1 else 4))]
)


class IsRandom(FakeEngine):
    def _make_token(self, stream):
        chunk = super()._make_token(stream)
        return attrs.evolve(chunk, token_ids=(random.randrange(self.vocab_size),)) if chunk.token_ids else chunk


class MixesStreams(FakeEngine):
    def _make_token(self, stream):
        return super()._make_token(random.choice(list(self._streams.values())))


class IgnoresAbort(FakeEngine):
    async def abort(self, request_id):
        pass


class AbortRaises(FakeEngine):
    async def abort(self, request_id):
        if request_id not in self._streams:
            raise KeyError(request_id)


class LeaksRequests(FakeEngine):
    def _forget(self, stream):
        pass


class IgnoresPause(FakeEngine):
    async def pause(self, mode):
        if mode is PauseMode.ABORT:
            await super().pause(PauseMode.KEEP)


class PauseAlwaysAborts(FakeEngine):
    async def pause(self, mode):
        await super().pause(PauseMode.ABORT)


class NeverResumes(FakeEngine):
    async def resume(self):
        pass


class ResumeRaises(FakeEngine):
    async def resume(self):
        if not self._is_paused:
            raise RuntimeError
        await super().resume()


class ChecksNothing(FakeEngine):
    def _refuse_impossible(self, request):
        pass


class BlindSnapshot(FakeEngine):
    async def snapshot(self):
        return attrs.evolve(await super().snapshot(), num_running=0, num_waiting=0)


class IgnoresBudget(FakeEngine):
    async def set_kv_budget(self, num_tokens):
        return num_tokens


class IgnoresGate(FakeEngine):
    async def set_gate(self, *, is_open):
        pass


class ResetChangesTokens(FakeEngine):
    async def reset_prefix_cache(self):
        self.seed += 1


class StageIsActivate(FakeEngine):
    async def stage(self, update):
        await super().stage(update)
        self.weight_version = update.target


class StageWritesWeights(FakeEngine):
    async def stage(self, update):
        await super().stage(update)
        self.seed += 1


class ActivateForgetsTheVersion(FakeEngine):
    async def activate(self):
        before = self.weight_version
        activation = await super().activate()
        self.weight_version = before
        return activation


class ActivateStaysPaused(FakeEngine):
    async def activate(self):
        activation = await super().activate()
        await self.pause(PauseMode.KEEP)
        return activation


class ActivateDropsStreams(FakeEngine):
    async def activate(self):
        await self.pause(PauseMode.ABORT)
        return await super().activate()


class FirstStageStays(FakeEngine):
    async def stage(self, update):
        if self._staged is not None:
            raise RuntimeError
        await super().stage(update)


class ActivatesNothing(FakeEngine):
    async def activate(self):
        if self._staged is None:
            self.weight_version = WeightVersion("run", 99)
            raise RoseError
        return await super().activate()


class AppliesTwice(FakeEngine):
    async def activate(self):
        self.seed += self._staged.target == self.weight_version
        return await super().activate()


class SleepsWithOneEyeOpen(FakeEngine):
    def _check_awake(self):
        pass


class SleepKeepsRequestsWaiting(FakeEngine):
    async def sleep(self, *, keeps_weights=True):
        await self.pause(PauseMode.KEEP)


class WakesStale(FakeEngine):
    async def sleep(self, *, keeps_weights=True):
        return await super().sleep(keeps_weights=False)


class ForgetsThePrompt(FakeEngine):
    async def generate(self, request):
        async for chunk in super().generate(attrs.evolve(request, prompt_ids=request.prompt_ids[:5])):
            yield chunk


class CountsThePrompt(FakeEngine):
    async def generate(self, request):
        left = max(1, request.sampling.max_tokens - len(request.prompt_ids) + 5)
        async for chunk in super().generate(
            attrs.evolve(request, sampling=attrs.evolve(request.sampling, max_tokens=left))
        ):
            yield chunk


class ReplacesRequests(FakeEngine):
    def _accept(self, request):
        self._streams.pop(request.request_id, None)
        return super()._accept(request)


class BreaksUnderLoad(FakeEngine):
    def _accept(self, request):
        if self.num_in_flight > 10:
            raise RuntimeError
        return super()._accept(request)


class CutsUnderLoad(FakeEngine):
    async def generate(self, request):
        if self.num_in_flight > 10:
            request = attrs.evolve(request, sampling=attrs.evolve(request.sampling, max_tokens=1))
        async for chunk in super().generate(request):
            yield chunk


class AlwaysBusy(FakeEngine):
    def _accept(self, request):
        raise EngineBusyError


BITES = [
    (Repeats, "max_tokens_bounds_the_stream"),
    (Loses, "max_tokens_bounds_the_stream"),
    (NumbersOfAnArray, "max_tokens_bounds_the_stream"),
    (NeverSaysWhy, "only_the_last_chunk_has_a_finish_reason"),
    (SaysWhyTooEarly, "only_the_last_chunk_has_a_finish_reason"),
    (NoLogprobs, "one_logprob_a_token"),
    (LogprobsOfAnArray, "one_logprob_a_token"),
    (AlwaysLogprobs, "no_logprobs_unless_asked"),
    (IsRandom, "greedy_is_deterministic"),
    (IsRandom, "a_seed_makes_sampling_repeatable"),
    (StopsWithoutItsToken, "stop_token_ends_the_stream_and_is_kept"),
    (IgnoresAbort, "abort_keeps_the_tokens"),
    (AbortLosesTokens, "abort_keeps_the_tokens"),
    (AbortRaises, "abort_of_an_unknown_request_is_a_no_op"),
    (LeaksRequests, "closing_a_stream_frees_the_engine"),
    (LeaksRequests, "cancelling_a_reader_frees_the_engine"),
    (MixesStreams, "streams_do_not_mix"),
    (IgnoresPause, "pause_keep_goes_on_where_it_was"),
    (PauseAlwaysAborts, "pause_keep_goes_on_where_it_was"),
    (NeverResumes, "pause_keep_goes_on_where_it_was"),
    (IgnoresPause, "pause_abort_ends_the_streams"),
    (IgnoresPause, "requests_wait_while_paused"),
    (ResumeRaises, "resume_without_pause_is_a_no_op"),
    (ChecksNothing, "an_over_long_prompt_is_refused"),
    (ChecksNothing, "unknown_token_ids_are_refused"),
    (ForgetsThePrompt, "a_continuation_takes_the_rest_of_the_budget"),
    (CountsThePrompt, "a_continuation_takes_the_rest_of_the_budget"),
    (ReplacesRequests, "an_id_in_flight_is_refused"),
    (BreaksUnderLoad, "a_burst_is_served_or_told_busy"),
    (CutsUnderLoad, "a_burst_is_served_or_told_busy"),
    (AlwaysBusy, "a_burst_is_served_or_told_busy"),
    (BlindSnapshot, "snapshot_counts_requests"),
    (WrongVersion, "every_token_has_the_engines_version"),
    (IgnoresBudget, "a_kv_cut_evicts_and_growth_serves_again"),
    (IgnoresGate, "a_closed_gate_holds_steps_back"),
    (SleepsWithOneEyeOpen, "asleep_nobody_waits_and_waking_serves_again"),
    (SleepKeepsRequestsWaiting, "asleep_nobody_waits_and_waking_serves_again"),
    (WakesStale, "asleep_nobody_waits_and_waking_serves_again"),
    (ResetChangesTokens, "a_prefix_reset_changes_no_answer"),
    (StageIsActivate, "stage_changes_nothing"),
    (StageWritesWeights, "stage_changes_nothing"),
    (ActivateForgetsTheVersion, "activate_moves_to_the_target"),
    (ActivateStaysPaused, "activate_moves_to_the_target"),
    (ActivateDropsStreams, "streams_survive_an_activation"),
    (VersionsGoBack, "streams_survive_an_activation"),
    (FirstStageStays, "a_new_stage_replaces_the_old"),
    (ActivatesNothing, "activate_without_stage_is_refused"),
    (AppliesTwice, "the_same_version_again_is_harmless"),
]
