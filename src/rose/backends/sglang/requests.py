"""A request for tokens: whether an SGLang server may see it, and the body of ``/generate`` that asks for it. Pure.

A server of SGLang 0.5.23 does not look at token ids: one outside the vocabulary ends its engine. It cuts answers that do not fit instead
of refusing them, and ignores a seed that it cannot use. All three are refused here.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from typing import Any

from rose.backends.sglang.facts import ServerFacts
from rose.errors import EngineUnsupportedError, RequestRefusedError
from rose.types import EngineRequest, RequestId, Sampling

_RANDOM_BYTES = 8
_SEEDS = range(-(2**63), 2**63)
_NEUTRAL: Mapping[str, Any] = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "n": 1,
}
"""What a server would take from its ``--preferred-sampling-params`` if it were left out: another distribution than was asked for."""


class SeedRefusedError(RequestRefusedError, EngineUnsupportedError):
    """The request has a seed, and the server was started without what seeds need."""


def refuse_impossible(request: EngineRequest, facts: ServerFacts, vocab_size: int) -> None:
    """Do nothing for a request that the server can serve.

    Raises:
        RequestRefusedError: It is too long, has token ids outside the vocabulary, or a seed where seeds are ignored.
    """
    length = len(request.prompt_ids) + request.sampling.max_tokens
    if length > facts.max_context_tokens:
        message = (
            f"request {request.request_id}: {len(request.prompt_ids)} prompt tokens and {request.sampling.max_tokens} new ones are "
            f"more than the {facts.max_context_tokens} that the server takes; ask for fewer"
        )
        raise RequestRefusedError(message)
    ids = request.prompt_ids + request.sampling.stop_token_ids
    lowest, highest = min(ids), max(ids)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        message = f"request {request.request_id}: token id {wrong} is outside the vocabulary [0, {vocab_size})"
        raise RequestRefusedError(message)
    _refuse_seed(request, facts)


def _refuse_seed(request: EngineRequest, facts: ServerFacts) -> None:
    seed = request.sampling.seed
    if seed is None or request.sampling.temperature == 0:
        return
    if seed not in _SEEDS:
        message = f"request {request.request_id}: the seed {seed} has more than 64 bits"
        raise RequestRefusedError(message)
    if not facts.has_seeds:
        message = (
            f"request {request.request_id} has a seed, which the server would ignore; start it with --enable-deterministic-inference, or "
            "leave the seed out"
        )
        raise SeedRefusedError(message)


def fresh_rid(request_id: RequestId) -> str:
    """Return the server's name for a request: SGLang aborts every request whose name *begins* with the one that it is given.

    So each begins with random digits of one length, and none is the beginning of another.
    """
    return f"{secrets.token_hex(_RANDOM_BYTES)}-{request_id}"


def request_body(request: EngineRequest, rid: str, facts: ServerFacts) -> bytes:
    """Return the body of ``POST /generate``, as JSON.

    Args:
        request: What is asked for; it was not refused.
        rid: The server's name for it, as of ``fresh_rid``.
        facts: Of the server.
    """
    body: dict[str, Any] = {
        "rid": rid,
        "input_ids": request.prompt_ids,
        "sampling_params": _sampling_params(request.sampling),
        "stream": True,
        "return_logprob": request.sampling.logprobs,
    }
    if facts.has_priorities:  # ROSE's lower ones go first
        body["priority"] = request.priority if facts.is_low_first else -request.priority
    return json.dumps(body, separators=(",", ":")).encode()


def own_stops(sampling: Sampling) -> frozenset[int]:
    """Return the stop ids that are the client's to look for: SGLang ignores all of them together with the model's end token."""
    return frozenset(sampling.stop_token_ids if sampling.ignore_eos else ())


def _sampling_params(sampling: Sampling) -> dict[str, Any]:
    params: dict[str, Any] = {
        **_NEUTRAL,
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "ignore_eos": sampling.ignore_eos,
        "skip_special_tokens": False,
        "no_stop_trim": True,
    }
    if sampling.stop_token_ids and not sampling.ignore_eos:
        params["stop_token_ids"] = sampling.stop_token_ids
    if sampling.seed is not None:
        params["sampling_seed"] = sampling.seed
    return params
