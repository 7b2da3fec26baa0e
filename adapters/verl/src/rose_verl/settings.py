"""What a job says about its pool, and what of a job's configuration a pool cannot do.

Everything is read once, where the first front is made, and handed to the other processes; nothing here imports veRL.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Self

import attrs
from attrs import validators as v

from rose.config import load
from rose.errors import ConfigError
from rose.frameworks import PoolPlace

OPTION = "actor_rollout_ref.rollout.engine_kwargs.rose"
_MISSING = object()


@attrs.frozen(kw_only=True)
class RoseOptions:
    """``actor_rollout_ref.rollout.engine_kwargs.rose`` of a job.

    Attributes:
        pool: The pool's URL, as ``rose pool`` prints it; without it ``$ROSE_POOL``.
        token_file: With its bearer token, where it asks for one; without it ``$ROSE_POOL_TOKEN_FILE``. Read on the driver's node only.
        turn_timeout_s: How long one turn may take, all its hops included.
        on_abort: What veRL's abort of all requests does in separate and fully asynchronous modes. ``carry``: nothing, turns go on
            through an update of the weights. ``abort``: they end with what they have and go on, on the new weights, when veRL resumes.
        engine_logprobs: What the engines' log-probs are of: ``raw`` (vLLM's default) or ``processed`` by temperature and the like.
        publish_timeout_s: How long one publish of weights may take, waiting for all trainer ranks included.
        sync_timeout_s: How long a step waits for the engines to take new weights; slower ones go on after that.
    """

    pool: str | None = None
    token_file: str | None = None
    turn_timeout_s: float = attrs.field(default=3600.0, validator=v.gt(0))
    on_abort: str = attrs.field(default="carry", validator=v.in_(("carry", "abort")))
    engine_logprobs: str = attrs.field(default="raw", validator=v.in_(("raw", "processed")))
    publish_timeout_s: float = attrs.field(default=600.0, validator=v.gt(0))
    sync_timeout_s: float = attrs.field(default=120.0, validator=v.gt(0))


@attrs.frozen(kw_only=True)
class Settings:
    """All that the processes of one job must agree on.

    Attributes:
        place: The pool.
        options: What the user said.
        prompt_length: Longest prompt, in tokens.
        response_length: Longest answer of all turns together, in tokens.
        max_model_len: Longest context that the job wants; ``None``: what the engines take.
        ignore_eos: Whether turns that say nothing go on behind the end token.
        dtype: What floating-point weights travel as.
    """

    place: PoolPlace
    options: RoseOptions
    prompt_length: int
    response_length: int
    max_model_len: int | None
    ignore_eos: bool
    dtype: str

    @classmethod
    def of(cls, rollout: Any, model: Any = None, *, environ: Mapping[str, str] = os.environ) -> Self:
        """Read a job's configuration.

        Args:
            rollout: veRL's ``RolloutConfig``.
            model: Its ``HFModelConfig`` or the mapping that becomes one.
            environ: Where the pool is looked up if the configuration does not say.

        Raises:
            ConfigError: Options are wrong, no pool is named, or the job wants what a pool cannot do; one line each.
        """
        options = _options(get(rollout, "engine_kwargs.rose") or {})
        problems = find_problems(rollout, model, options)
        if problems:
            raise ConfigError("\n".join(problems))
        return cls(
            place=PoolPlace.of(options.pool, options.token_file, environ=environ, option=f"{OPTION}.pool"),
            options=options,
            prompt_length=int(get(rollout, "prompt_length")),
            response_length=int(get(rollout, "response_length")),
            max_model_len=get(rollout, "max_model_len"),
            ignore_eos=bool(get(rollout, "ignore_eos")),
            dtype=str(get(rollout, "dtype") or "bfloat16"),
        )


def _options(given: Any) -> RoseOptions:
    """Read the options; complaints say where they are.

    Raises:
        ConfigError: They are wrong, one line each.
    """
    if not isinstance(given, Mapping):
        message = f"{OPTION} = {given!r}: options go below it; the pool's address is {OPTION}.pool"
        raise ConfigError(message)
    try:
        return load(RoseOptions, {str(key): value for key, value in given.items() if value is not None})
    except ConfigError as error:
        raise ConfigError("\n".join(f"{OPTION}: {line}" for line in str(error).splitlines())) from None


def get(config: Any, path: str) -> Any:
    """Return a field of a dataclass or a mapping by its dotted path; ``None`` where any part is missing."""
    for name in path.split("."):
        found = config.get(name, _MISSING) if hasattr(config, "get") else getattr(config, name, _MISSING)
        if found is _MISSING or found is None:
            return None
        config = found
    return config


def find_problems(rollout: Any, model: Any, options: RoseOptions) -> list[str]:
    """Return what the job asks for and a pool cannot give, one usable line each."""
    found = [
        f"rollout.{path} = {get(rollout, path)!r}: {why}"
        for path, is_wrong, why in _RULES
        if is_wrong(get(rollout, path))
    ]
    if get(model, "lora_rank") or get(model, "lora.rank"):
        found += (
            []
            if get(model, "lora.merge")
            else [f"model.lora_rank = {get(model, 'lora_rank') or get(model, 'lora.rank')!r}: {_LORA}"]
        )
    return found + _logprob_problems(rollout, options)


_LORA = "engines of a pool take whole weights, no adapters; set model.lora.merge=True, which sends merged weights"
_ONE_MODEL = "engines that share their devices may answer the same request differently; leave it off"


def _is_on(value: Any) -> bool:
    return bool(value)


_RULES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("mode", lambda value: value not in (None, "async"), "only async is there"),
    (
        "dtype",
        lambda value: value not in (None, "bfloat16", "float16", "float32"),
        "weights travel as bfloat16, float16 or float32; set the one in which the pool's engines hold them",
    ),
    ("disaggregation.enabled", _is_on, "whether prefill and decode are apart is the pool's affair; leave it off"),
    (
        "enable_rollout_routing_replay",
        _is_on,
        "engines of a pool do not tell which experts they used (R3); leave it off",
    ),
    ("mtp.enable_rollout", _is_on, "speculation is the engines' affair (their options in job.toml); leave it off"),
    ("quantization", _is_on, "weights go to the engines as they are; leave it null"),
    ("qat.enable", _is_on, "quantised weights cannot be published; leave it off"),
    (
        "repetition_penalty",
        lambda value: value not in (None, 1, 1.0),
        "a turn of a pool has no repetition penalty; set 1.0",
    ),
    ("top_k", lambda value: value not in (None, -1, 0), "a turn of a pool has no top_k; set -1"),
    ("val_kwargs.top_k", lambda value: value not in (None, -1, 0), "a turn of a pool has no top_k; set -1"),
    ("full_determinism", _is_on, _ONE_MODEL),
    (
        "logprobs_mode",
        lambda value: value not in (None, "processed_logprobs", "raw_logprobs"),
        "engines give log-probs, no logits",
    ),
    ("prometheus.enable", _is_on, "scrape the pool's own /metrics in place of its fronts; leave it off"),
    (
        "checkpoint_engine.backend",
        lambda value: value not in (None, "naive", "rose"),
        "only rose reaches the engines of a pool; set rose",
    ),
)


def _logprob_problems(rollout: Any, options: RoseOptions) -> list[str]:
    """Raw and processed log-probs are the same at temperature 1 and top_p 1 only; elsewhere the engines must be known to process theirs."""
    temperature, top_p = get(rollout, "temperature"), get(rollout, "top_p")
    is_plain = temperature in (None, 1, 1.0) and top_p in (None, 1, 1.0)
    if not get(rollout, "calculate_log_probs") or is_plain or options.engine_logprobs == "processed":
        return []
    return [
        f"rollout.temperature = {temperature!r}, top_p = {top_p!r}: log-probs are then those of other weights unless the engines process them; "
        'give them engine_args = {logprobs_mode = "processed_logprobs"} in job.toml and set '
        f"{OPTION}.engine_logprobs=processed, or set rollout.calculate_log_probs=False"
    ]
