"""Requests to vLLM's terms and vLLM's outputs to token chunks. No state beyond one stream's position."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from rose.backends.answers import FINISH_REASONS, own_ending
from rose.errors import EngineBusyError, EngineError, RequestRefusedError
from rose.types import EngineRequest, FinishReason, Sampling, TokenChunk, WeightVersion


@attrs.frozen(kw_only=True)
class RequestLimits:
    """What an engine can serve at all."""

    vocab_size: int
    max_model_len: int

    def refuse(self, request: EngineRequest) -> None:
        """Do nothing for a request that fits.

        Raises:
            RequestRefusedError: The request is too long for the model, or has token ids outside its vocabulary.
        """
        length = len(request.prompt_ids) + request.sampling.max_tokens
        if length > self.max_model_len:
            message = (
                f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and {request.sampling.max_tokens} "
                f"new ones are more than the model's {self.max_model_len}; ask for fewer"
            )
            raise RequestRefusedError(message)
        lowest, highest = min(request.prompt_ids), max(request.prompt_ids)
        if lowest < 0 or highest >= self.vocab_size:
            wrong = lowest if lowest < 0 else highest
            message = f"request {request.request_id}: token id {wrong} is outside the vocabulary [0, {self.vocab_size})"
            raise RequestRefusedError(message)


def sampling_params(sampling: Sampling) -> Any:
    """Return vLLM's ``SamplingParams``: tokens only, streamed as they are made."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams  # noqa: PLC0415 - heavy

    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        stop_token_ids=list(sampling.stop_token_ids),
        ignore_eos=sampling.ignore_eos,
        logprobs=0 if sampling.logprobs else None,
        seed=sampling.seed,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def as_rose_error(error: Exception, engine_id: str) -> Exception:
    """Return what ROSE raises for an error that vLLM raised when it was given a request; the error itself if unknown."""
    from vllm.exceptions import GracefulHTTPError, VLLMClientError  # noqa: PLC0415 - heavy

    if isinstance(error, GracefulHTTPError):
        return EngineBusyError(f"engine {engine_id} takes no more requests now: {error}")
    if isinstance(error, (VLLMClientError, ValueError)):
        return RequestRefusedError(f"engine {engine_id} refuses the request: {error}")
    return error


@attrs.define
class ChunkReader:
    """Cuts the outputs of one request into chunks of one weight version each.

    Attributes:
        version_starts: ``(label, first token)`` pairs that vLLM's front end keeps for the request and appends to. vLLM
            itself hands them out with the last output only.
        num_tokens: Tokens read so far.
    """

    version_starts: Sequence[tuple[str, int]]
    num_tokens: int = 0

    def read(self, output: Any) -> list[TokenChunk]:
        """Return the chunks of one ``RequestOutput``; the last one has the finish reason when the output has it.

        Raises:
            RequestRefusedError: The device's memory can never hold the request.
            EngineError: vLLM failed on this request.
        """
        completion = output.outputs[0]
        ids = tuple(completion.token_ids)
        logprobs = _sampled_logprobs(ids, completion.logprobs)
        chunks = [
            TokenChunk(
                token_ids=ids[start:end], logprobs=logprobs[start:end] if logprobs else (), version=parse_label(label)
            )
            for label, start, end in self._spans(completion, len(ids))
        ]
        self.num_tokens += len(ids)
        if output.finished:
            last = chunks.pop() if chunks else TokenChunk()
            chunks.append(attrs.evolve(last, finish_reason=_finish_reason(output, completion)))
        return chunks

    def _spans(self, completion: Any, num_new: int) -> list[tuple[str | None, int, int]]:
        starts = list(self.version_starts)
        if not starts and completion.weight_versions:
            starts = [(span.version, span.start) for span in completion.weight_versions]
        if not starts:
            return [(None, 0, num_new)] if num_new else []
        ends = [start for _, start in starts[1:]] + [self.num_tokens + num_new]
        spans = (
            (label, max(start - self.num_tokens, 0), end - self.num_tokens)
            for (label, start), end in zip(starts, ends, strict=True)
        )
        return [(label, start, end) for label, start, end in spans if start < end]


def _sampled_logprobs(ids: tuple[int, ...], logprobs: Any) -> tuple[float, ...]:
    if not logprobs:
        return ()
    return tuple(float(entry[token].logprob) for token, entry in zip(ids, logprobs, strict=True))


def parse_label(label: str | None) -> WeightVersion | None:
    """Return the version that vLLM's weight label says, ``None`` when it says none."""
    if label is None:
        return None
    try:
        return WeightVersion.parse(label)
    except ValueError:
        return None  # vLLM's own "default", or a label that somebody else set


def _finish_reason(output: Any, completion: Any) -> FinishReason:
    own = own_ending(completion.stop_reason, f"request {output.request_id}")
    try:
        return own or FINISH_REASONS[completion.finish_reason]
    except KeyError:
        message = f"vLLM ended request {output.request_id} with {completion.finish_reason!r}; see the engine's log"
        raise EngineError(message) from None
