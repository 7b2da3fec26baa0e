"""What an SGLang server says of itself: how it was started, how busy it is, which weights it holds. Pure. Written for 0.5.23."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from rose.backends.sglang_server.seeds import HAS_SEEDS
from rose.errors import EngineError
from rose.types import WeightVersion

_VOCABULARY = re.compile(r"logit_bias must has keys in \[0, (\d+)\]")

VOCABULARY_PROBE: Mapping[str, Any] = {
    "input_ids": [0],
    "sampling_params": {"max_new_tokens": 1, "logit_bias": {str(2**31 - 1): 0.0}},
}
"""A body of ``/generate`` that is refused, before the model sees it, with the number of the model's token ids."""


@attrs.frozen(kw_only=True)
class ServerFacts:
    """How a server was started.

    Attributes:
        start: Names one start of the server: another one has another text.
        release: Of SGLang.
        model_path: Where the server found its model.
        max_context_tokens: Longest prompt and answer together that are never cut; smaller than the model's own length.
        kv_total_tokens: Size of the KV memory.
        num_ranks: Processes that hold a part of the weights each.
        is_incremental: Events of a stream carry what is new (``--incremental-streaming-output``), not everything so far.
        has_priorities: Requests are ordered by priority.
        is_low_first: A lower priority goes first.
        has_seeds: A request's seed reaches the sampler.
        rose: What ROSE's package inside the server says, one a replica; empty where it is not installed there.
    """

    start: str
    release: str
    model_path: str
    max_context_tokens: int
    kv_total_tokens: int
    num_ranks: int
    is_incremental: bool
    has_priorities: bool
    is_low_first: bool
    has_seeds: bool
    rose: tuple[Mapping[str, Any], ...] = ()


@attrs.frozen(kw_only=True)
class ServerLoad:
    """How busy a server was when it last said so; sums over its replicas.

    Attributes:
        is_fresh: It is as of now, from ROSE's package; otherwise as of some steps ago, or of before a pause.
    """

    num_running: int
    num_waiting: int
    kv_used_tokens: int
    is_fresh: bool = False


@attrs.frozen(kw_only=True)
class RoseState:
    """What ROSE's package in a server says of it now.

    Attributes:
        load: How busy it is.
        is_paused: Somebody paused it.
        is_asleep: It was put to sleep.
        has_weights: ROSE was asked for its weights, so that ``version`` and ``is_fenced`` are known.
        version: Label of the weights.
        is_fenced: They are not known to be any version.
    """

    load: ServerLoad
    is_paused: bool
    is_asleep: bool
    has_weights: bool = False
    version: str | None = None
    is_fenced: bool = False


def read_facts(info: Mapping[str, Any]) -> ServerFacts:
    """Read ``/server_info``.

    Raises:
        EngineError: It is not SGLang's, or of a release that says other things.
    """
    try:
        states = [state for state in info["internal_states"] if isinstance(state, Mapping)]
        return ServerFacts(
            start=json.dumps(info.get("startup_time"), sort_keys=True),
            release=str(info["version"]),
            model_path=str(info["model_path"]),
            max_context_tokens=int(info["max_req_input_len"]),
            kv_total_tokens=int(info["max_total_num_tokens"]) * max(1, len(states)),
            num_ranks=int(info["tp_size"]) * int(info["pp_size"]),
            is_incremental=bool(info["incremental_streaming_output"]),
            has_priorities=bool(info["enable_priority_scheduling"]),
            is_low_first=bool(info["schedule_low_priority_values_first"]),
            has_seeds=bool(info["enable_deterministic_inference"]) or any(state.get(HAS_SEEDS) for state in states),
            rose=tuple(state["rose"] for state in states if isinstance(state.get("rose"), Mapping)),
        )
    except (KeyError, TypeError, ValueError) as error:
        message = (
            f"/server_info is not what SGLang 0.5.23 answers ({error!r}); is it an SGLang server, and of what release?"
        )
        raise EngineError(message) from error


def read_rose_state(facts: ServerFacts) -> RoseState | None:
    """Return what ROSE's package says, ``None`` where it is not in the server or does not say.

    Raises:
        EngineError: The package is of a release that says other things.
    """
    found = [rose["rose_snapshot"] for rose in facts.rose if "rose_snapshot" in rose]
    if not found:
        return None
    try:
        load = ServerLoad(
            num_running=sum(int(one["num_running"]) for one in found),
            num_waiting=sum(int(one["num_waiting"]) for one in found),
            kv_used_tokens=sum(int(one["kv_used_tokens"]) for one in found),
            is_fresh=True,
        )
        weights = [rose["weights"] for rose in facts.rose if rose.get("weights") is not None]
        return RoseState(
            load=load,
            is_paused=any(one["is_paused"] for one in found),
            is_asleep=any(one["is_asleep"] for one in found),
            has_weights=bool(weights),
            version=weights[0]["version"] if weights else None,
            is_fenced=any(one["is_fenced"] for one in weights),
        )
    except (KeyError, TypeError, ValueError) as error:
        message = f"ROSE's package in the server says other things than this release reads ({error!r}); install one release in both places"
        raise EngineError(message) from error


def read_load(answer: Mapping[str, Any]) -> ServerLoad:
    """Read ``/v1/loads``.

    Raises:
        EngineError: It is not what SGLang answers.
    """
    try:
        loads: Sequence[Mapping[str, Any]] = answer["loads"]
        return ServerLoad(
            num_running=sum(int(load["num_running_reqs"]) for load in loads),
            num_waiting=sum(int(load["num_waiting_reqs"]) for load in loads),
            kv_used_tokens=sum(int(load["num_used_tokens"]) for load in loads),
        )
    except (KeyError, TypeError, ValueError) as error:
        message = f"/v1/loads is not what SGLang 0.5.23 answers ({error!r})"
        raise EngineError(message) from error


def read_label(text: object, labels: Mapping[str, WeightVersion]) -> WeightVersion | None:
    """Return the version that a weight label means; ``None`` for a label that is no published version.

    Args:
        text: SGLang's ``weight_version``, which is ``run:n`` once ROSE has set it.
        labels: Versions of labels that are not of that form.
    """
    if not isinstance(text, str):
        return None
    try:
        return labels.get(text) or WeightVersion.parse(text)
    except ValueError:
        return None


def read_vocabulary(words: str) -> int | None:
    """Return the number of token ids that a server's refusal of ``VOCABULARY_PROBE`` tells; ``None`` when it tells none."""
    found = _VOCABULARY.search(words)
    return int(found[1]) + 1 if found else None


def vocabulary_of_checkpoint(model_path: str) -> int | None:
    """Return the number of token ids by a checkpoint's ``config.json``; ``None`` when it is not on this machine."""
    try:
        config = json.loads((Path(model_path) / "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size") or config["text_config"]["vocab_size"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return size if isinstance(size, int) else None
