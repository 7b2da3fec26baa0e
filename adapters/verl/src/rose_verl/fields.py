"""veRL's fields to ROSE's and back: pure functions, without veRL.

Nothing is invented: a log-prob that the engine did not give is not there, a step that no push had is an error.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import xxhash

from rose.errors import RequestRefusedError, TurnFailedError
from rose.frameworks import is_neutral
from rose.types import FinishReason, HopEnd, Sampling, TurnResult, WeightVersion
from rose_verl.settings import Settings

_LIMITS = ("max_tokens", "max_new_tokens")


def sampling_of(params: Mapping[str, Any], num_prompt_tokens: int, settings: Settings) -> Sampling:
    """Return how a turn's tokens are drawn.

    The limit is the one that is given, else what veRL's own servers take: the answer's length, or what prompt and answer leave. It is at
    least 1 and never more than the context leaves.

    Args:
        params: veRL's ``sampling_params``; they are not changed.
        num_prompt_tokens: Length of the turn's prompt.
        settings: Of the job.

    Raises:
        RequestRefusedError: A field would change what is drawn, and a pool has no such field; names it. Or the prompt leaves no room.
    """
    wanted = dict(params)
    limit = _limit(wanted, num_prompt_tokens, settings)
    drawn = Sampling(
        max_tokens=limit,
        temperature=_number(wanted.pop("temperature", None), 1.0),
        top_p=_number(wanted.pop("top_p", None), 1.0),
        stop_token_ids=tuple(wanted.pop("stop_token_ids", None) or ()),
        ignore_eos=bool(wanted.pop("ignore_eos", settings.ignore_eos)),
        logprobs=_wants_logprobs(wanted.pop("logprobs", None)),
        seed=wanted.pop("seed", None),
    )
    refused = [f"{name}={value!r}" for name, value in wanted.items() if not _is_harmless(name, value)]
    if refused:
        message = f"a turn of a pool has no {', '.join(refused)}; take it out of the agent loop's sampling_params"
        raise RequestRefusedError(message)
    return drawn


def _limit(wanted: dict[str, Any], num_prompt_tokens: int, settings: Settings) -> int:
    given = [wanted.pop(name) for name in _LIMITS if name in wanted]
    total = settings.prompt_length + settings.response_length
    limit = given[0] if given and given[0] is not None else min(settings.response_length, total - num_prompt_tokens)
    room = None if settings.max_model_len is None else settings.max_model_len - num_prompt_tokens
    if room is not None and room < 1:
        message = f"a prompt of {num_prompt_tokens} tokens leaves no room in a context of {settings.max_model_len} (rollout.max_model_len)"
        raise RequestRefusedError(message)
    return max(1, int(limit) if room is None else min(int(limit), room))


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


def _wants_logprobs(value: Any) -> bool:
    """Say whether the drawn tokens' log-probs are wanted: ``True``, or vLLM's number 0; 1 is the same with one more that nobody reads."""
    if value is None or value is False:
        return False
    if value is True or value in (0, 1):
        return True
    message = f"a turn of a pool has log-probs of the drawn tokens only, not the {value!r} likeliest; set logprobs=True"
    raise RequestRefusedError(message)


def _is_harmless(name: str, value: Any) -> bool:
    return is_neutral(name, value) or (name == "stop" and not value)


def refuse_media(given: Mapping[str, Any]) -> None:
    """Refuse what a turn brings beside tokens.

    Raises:
        RequestRefusedError: There are pictures, films, sounds or unknown arguments; names them. How media are processed is of no matter without any.
    """
    there = [
        name for name, value in given.items() if name != "mm_processor_kwargs" and value is not None and value != []
    ]
    if there:
        message = f"a turn of a pool is made of token ids alone, without {', '.join(sorted(there))}; run this model's rollouts with vllm or sglang"
        raise RequestRefusedError(message)


def group_of(prompt_ids: Sequence[int]) -> str:
    """Return a name for the group of all trajectories that begin with a prompt."""
    return f"p{prefix_digest(prompt_ids):016x}"


def prefix_digest(ids: Sequence[int]) -> int:
    """Return a digest of token ids."""
    return xxhash.xxh3_64_intdigest(array("q", ids).tobytes())


@attrs.frozen(kw_only=True)
class Answer:
    """A turn's result in veRL's words; the arguments of a ``TokenOutput``.

    Attributes:
        token_ids: The new tokens.
        log_probs: One a token; ``None`` if they were not asked for.
        stop_reason: ``completed`` or ``aborted``.
        num_preempted: How often engines gave the turn up for lack of room.
        extra_fields: The steps of its tokens and the engines that made them.
    """

    token_ids: list[int]
    log_probs: list[float] | None
    stop_reason: str
    num_preempted: int
    extra_fields: dict[str, Any]


def answer_of(result: TurnResult, *, steps: Mapping[WeightVersion, int], now: int | None, has_logprobs: bool) -> Answer:
    """Return what veRL gets for a result.

    Args:
        result: Of the turn.
        steps: The trainer's step of each version.
        now: The newest step, for a result without tokens.
        has_logprobs: Whether they were asked for.

    Raises:
        TurnFailedError: A log-prob is missing, or tokens are of weights that this job did not publish.
    """
    if has_logprobs and len(result.logprobs) != len(result.token_ids):
        message = f"{len(result.token_ids)} tokens came with {len(result.logprobs)} log-probs"
        raise TurnFailedError(message, result.hops)
    unknown = sorted({str(span.version) for span in result.versions if span.version not in steps})
    if unknown:
        message = f"tokens are of weights that this job did not publish: {', '.join(unknown)}; does another job publish to the pool?"
        raise TurnFailedError(message, result.hops)
    spans = [[span.start, span.end, steps[span.version]] for span in result.versions]
    seen = [step for _, _, step in spans] or ([] if now is None else [now])
    return Answer(
        token_ids=list(result.token_ids),
        log_probs=list(result.logprobs) if has_logprobs else None,
        stop_reason="aborted" if result.finish_reason is FinishReason.ABORTED else "completed",
        num_preempted=sum(hop.ended is HopEnd.EVICTED for hop in result.hops),
        extra_fields={
            "global_steps": min(seen, default=None),
            "min_global_steps": min(seen, default=None),
            "max_global_steps": max(seen, default=None),
            "version_spans": spans,
            "hops": [[str(hop.engine_id), hop.reason.value, hop.num_tokens, hop.ended.value] for hop in result.hops],
        },
    )


def joined(parts: Sequence[Answer]) -> Answer:
    """Return one answer for a turn that was aborted and taken up again, in order."""
    if len(parts) == 1:
        return parts[0]
    starts = [sum(len(part.token_ids) for part in parts[:index]) for index in range(len(parts))]
    spans = [
        [start + first, start + last, step]
        for start, part in zip(starts, parts, strict=True)
        for first, last, step in part.extra_fields["version_spans"]
    ]
    steps = [step for _, _, step in spans] or [parts[-1].extra_fields["global_steps"]]
    return Answer(
        token_ids=[token for part in parts for token in part.token_ids],
        log_probs=None if parts[0].log_probs is None else [one for part in parts for one in part.log_probs or ()],
        stop_reason=parts[-1].stop_reason,
        num_preempted=sum(part.num_preempted for part in parts),
        extra_fields={
            "global_steps": min(steps),
            "min_global_steps": min(steps),
            "max_global_steps": max(steps),
            "version_spans": spans,
            "hops": [hop for part in parts for hop in part.extra_fields["hops"]],
        },
    )
