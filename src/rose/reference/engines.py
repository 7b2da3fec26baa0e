"""The engines that a job may run on, by name: what the job says of an engine, and what each library is told for it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from rose.errors import BackendUnavailableError
from rose.interfaces import Clock

if TYPE_CHECKING:
    from rose.backends.sglang import LaunchedSglang
    from rose.backends.vllm import VllmEngine

    FleetEngine = VllmEngine | LaunchedSglang

BLOCK_TOKENS = 32
_SGLANG_PYTHON = Path(".venv-sglang", "bin", "python")
_SGLANG_SPARE_TOKENS = 6  # requests are by so much shorter than the context length that SGLang is given
_SGLANG_TIMEOUT_S = 60.0  # one machine computes for all: a slow server is not taken for a lost one
_SGLANG_CHUNK_TOKENS = 2048


@attrs.frozen(kw_only=True)
class EngineSpec:
    """One engine of a job, as plain data.

    Attributes:
        kind: One of ``NAMES``.
        engine_id: The name by which the pool knows it.
        model: Directory of its checkpoint.
        max_len: Longest prompt plus answer, in tokens.
        max_requests: Requests that run at once.
        kv_tokens: Size of its KV memory, a multiple of ``BLOCK_TOKENS``.
        kv_token_bytes: What one token of that is.
        chunk_tokens: Most prompt tokens of a step; ``None`` leaves it to the engine.
        seed: Of its sampler; a request's own goes before it.
        rose: The table of ``rose.backends.step_settings.RoseSettings``.
        python: The Python of the environment that the engine's library is in, where that is not this one.
    """

    kind: str
    engine_id: str
    model: str
    max_len: int
    max_requests: int
    kv_tokens: int
    kv_token_bytes: int
    chunk_tokens: int | None = None
    seed: int = 0
    rose: Mapping[str, Any] = attrs.field(factory=dict)
    python: str | None = None


def make_engine(spec: EngineSpec, *, clock: Clock) -> FleetEngine:
    """Make an engine; it is not started yet.

    Raises:
        BackendUnavailableError: Its library is not installed.
    """
    return _KINDS[spec.kind].make(spec, clock)


def check_engines(kinds: Iterable[str], *, sglang_python: str | None = None) -> None:
    """Refuse engines whose library is not installed.

    Args:
        kinds: Names of engines.
        sglang_python: See ``find_sglang``.

    Raises:
        BackendUnavailableError: Says what to run.
    """
    for kind in dict.fromkeys(kinds):
        _KINDS[kind].check(sglang_python)


def find_sglang(python: str | None) -> Path | None:
    """Return the Python of SGLang's environment, if there is one.

    Args:
        python: Where it is; ``None`` looks beside this environment and in the current folder.
    """
    places = [Path(sys.prefix).parent / _SGLANG_PYTHON, _SGLANG_PYTHON] if python is None else [Path(python)]
    return next((place.absolute() for place in places if place.is_file()), None)


def _check_vllm(_: str | None) -> None:
    if find_spec("vllm") is None:
        message = "the demo needs vllm, not installed here; run: pip install 'rose-rl[demo]'"
        raise BackendUnavailableError(message)


def _check_sglang(python: str | None) -> None:
    if find_spec("aiohttp") is None:
        message = "SGLang engines need aiohttp, not installed here; run: pip install 'rose-rl[demo]'"
        raise BackendUnavailableError(message)
    if find_sglang(python) is None:
        where = str(_SGLANG_PYTHON) if python is None else python
        message = (
            f"SGLang has an environment of its own, and there is no {where}; run make sglang-env in a checkout of ROSE, or give "
            "the Python of one that has SGLang and ROSE as sglang_python in the configuration file"
        )
        raise BackendUnavailableError(message)


def _make_vllm(spec: EngineSpec, clock: Clock) -> VllmEngine:
    from rose.backends.vllm import VllmEngine, VllmOptions  # noqa: PLC0415 - only where it is used

    options = VllmOptions(
        engine_id=spec.engine_id,
        model=spec.model,
        max_model_len=spec.max_len,
        max_num_seqs=spec.max_requests,
        max_num_batched_tokens=spec.chunk_tokens,
        kv_cache_bytes=spec.kv_tokens * spec.kv_token_bytes,
        block_size=BLOCK_TOKENS,
        seed=spec.seed,
        rose=spec.rose,
    )
    return VllmEngine(options, clock=clock)


def _make_sglang(spec: EngineSpec, clock: Clock) -> LaunchedSglang:
    from rose.backends.sglang import LaunchedSglang, SglangOptions  # noqa: PLC0415 - only where it is used

    chunk = _SGLANG_CHUNK_TOKENS if spec.chunk_tokens is None else spec.chunk_tokens
    options = SglangOptions(
        engine_id=spec.engine_id,
        model=spec.model,
        python=str(find_sglang(spec.python)),
        max_context_tokens=spec.max_len + _SGLANG_SPARE_TOKENS,
        max_running_requests=spec.max_requests,
        max_total_tokens=spec.kv_tokens,
        is_deterministic=True,
        has_warm_up=spec.rose.get("role") != "serving",  # whose steps wait for the modelled clock
        timeout_s=_SGLANG_TIMEOUT_S,
        server_args=(
            *("--chunked-prefill-size", str(chunk)),
            *("--random-seed", str(spec.seed), "--log-level", "warning"),
        ),
        environment={
            "ROSE_SGLANG_SETTINGS": json.dumps(spec.rose),
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # the spare tokens are never used
        },
    )
    return LaunchedSglang(options, clock=clock)


@attrs.frozen
class _Kind:
    check: Callable[[str | None], None]
    make: Callable[[EngineSpec, Clock], FleetEngine]


_KINDS = {"vllm": _Kind(_check_vllm, _make_vllm), "sglang": _Kind(_check_sglang, _make_sglang)}
NAMES = tuple(_KINDS)
