"""What a user may set, and where it is read from.

The pool's address is the one thing that must be given. Where ROLL has a slot for options (``llm_proxy.proxy_config``) they
may stand there; everywhere else they come from the environment, which ROLL sets from ``system_envs``: ``ROSE_POOL``,
``ROSE_POOL_TOKEN_FILE``, and all others as one JSON object in ``ROSE_ROLL``.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any, Literal

import attrs

from rose.config import load
from rose.errors import ConfigError
from rose.frameworks import PoolPlace

OPTIONS_VARIABLE = "ROSE_ROLL"
ENVIRONMENT = ("ROSE_POOL", "ROSE_POOL_TOKEN_FILE", OPTIONS_VARIABLE)


def _positive(_: object, attribute: attrs.Attribute[Any], value: float | None) -> None:
    if value is not None and value <= 0:
        message = f"{attribute.name} must be above 0; got {value!r}"
        raise ValueError(message)


@attrs.frozen(kw_only=True)
class RoseOptions:
    """Options of the adapter.

    Attributes:
        pool: The pool's URL; ``None``: ``$ROSE_POOL``.
        token_file: File with the pool's bearer token; ``None``: ``$ROSE_POOL_TOKEN_FILE``, or no token.
        deadline_s: How long one turn may take in the pool before its tokens are kept and it is asked anew.
        give_up_s: For how long a turn may fail again and again without a new token before its error is raised, and for how long the pool may
            be without weights that it had.
        retry_s: Pause before a turn that failed is asked anew.
        on_suspend: What becomes of turns while ROLL suspends its rollouts: ``abort`` keeps their tokens and goes on from them
            after the resume, ``continue`` lets them run through the update of the weights.
        poll_s: How often a process with turns under way asks ROLL whether it is suspended.
        wire_dtype: What weights travel as; ``None``: the ``dtype`` of ``actor_infer.model_args``, or bfloat16.
        publish_timeout_s: How long publishing a version may take.
        sync_timeout_s: How long the engines may take to reach it before training goes on without those that have not.
    """

    pool: str | None = None
    token_file: str | None = None
    deadline_s: float = attrs.field(default=1800.0, validator=_positive)
    give_up_s: float = attrs.field(default=1800.0, validator=_positive)
    retry_s: float = attrs.field(default=1.0, validator=_positive)
    on_suspend: Literal["abort", "continue"] = "abort"
    poll_s: float = attrs.field(default=0.25, validator=_positive)
    wire_dtype: Literal["bfloat16", "float16", "float32"] | None = None
    publish_timeout_s: float = attrs.field(default=300.0, validator=_positive)
    sync_timeout_s: float = attrs.field(default=120.0, validator=_positive)

    @classmethod
    def of(cls, given: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> RoseOptions:
        """Read options: those of the environment, overridden by those given.

        Args:
            given: For example ``llm_proxy.proxy_config``.
            environ: Instead of the process's.

        Raises:
            ConfigError: An option is unknown or of the wrong kind; names it.
        """
        variables = os.environ if environ is None else environ
        return load(cls, {**_from_environment(variables), **dict(given or {})})

    def place(self, environ: Mapping[str, str] | None = None) -> PoolPlace:
        """Return where the pool is.

        Raises:
            ConfigError: Nobody said where; the message says what to set.
        """
        variables = os.environ if environ is None else environ
        option = "system_envs.ROSE_POOL (or, for turns alone, llm_proxy.proxy_config.pool)"
        return PoolPlace.of(self.pool, self.token_file, environ=variables, option=option)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(OPTIONS_VARIABLE, "")
    if not text:
        return {}
    try:
        options = json.loads(text)
    except json.JSONDecodeError as error:
        message = f'${OPTIONS_VARIABLE} is no JSON: {error}; write for example {{"deadline_s": 600}}'
        raise ConfigError(message) from None
    if not isinstance(options, dict):
        message = f"${OPTIONS_VARIABLE} must be a JSON object of options, not {text!r:.80}"
        raise ConfigError(message)
    return options


WIRE_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def wire_dtype(options: RoseOptions, model_args: Any) -> str:
    """Return what weights travel as: the option, else what ROLL says the engines hold, else bfloat16."""
    return options.wire_dtype or WIRE_DTYPES.get(str(getattr(model_args, "dtype", None)), "bfloat16")
