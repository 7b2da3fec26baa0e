"""Configuration of ``rose demo``: what a TOML file and the command line may set, and what is refused.

Every refusal is a ``ConfigError`` that starts with the field's name, says what is allowed and what was given, and ends
with what to do. Rates are per serving device; lengths of time are modelled time unless the name says ``wall``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any, Literal

import attrs

from rose.errors import ConfigError

ADMISSION_MODES = ("slo", "quiet")
TRAINERS = ("fsdp", "megatron")
ENGINES = ("vllm", "sglang")
_STRETCH = {"vllm": 2.5, "sglang": 6.0}
"""Wall seconds a modelled second, so that a step of the engine on two cores is shorter than the modelled one."""
_SPEC = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

Validator = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _refuse(name: str, allowed: str, got: object, advice: str) -> ConfigError:
    return ConfigError(f"{name} must be {allowed}, got {got!r}; {advice}")


def _integer(minimum: int, advice: str, *, maximum: int | None = None) -> Validator:
    allowed = (
        f"a whole number of at least {minimum}" if maximum is None else f"a whole number from {minimum} to {maximum}"
    )

    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < minimum or (maximum is not None and value > maximum):
            raise _refuse(attribute.name, allowed, value, advice)

    return check


def _number(allowed: str, advice: str, is_allowed: Callable[[float], bool]) -> Validator:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or not is_allowed(value):
            raise _refuse(attribute.name, allowed, value, advice)

    return check


def _above_zero(unit: str, advice: str) -> Validator:
    return _number(f"above 0 ({unit})", advice, lambda value: value > 0)


def _between_zero_and_one(advice: str) -> Validator:
    return _number("above 0 and below 1", advice, lambda value: 0 < value < 1)


def _one_of(names: tuple[str, ...], advice: str) -> Validator:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in names:
            raise _refuse(attribute.name, f"one of {', '.join(names)}", value, advice)

    return check


def _text(allowed: str, advice: str, pattern: re.Pattern[str] = re.compile(r".+", re.DOTALL)) -> Validator:
    def check(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if not isinstance(value, str) or not pattern.fullmatch(value):
            raise _refuse(attribute.name, allowed, value, advice)

    return check


def _boolean(_: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise _refuse(attribute.name, "true or false", value, "write it without quotation marks")


@attrs.frozen(kw_only=True)
class DemoConfig:
    """What one run of the demo does. Everything has a default; ``DemoConfig()`` is ``rose demo`` without options.

    Attributes:
        trace: Request trace to replay on the serving engines (Azure, BurstGPT, ServeGen or Mooncake format, gz or not);
            ``None`` generates a bursty load.
        rate_rps: Mean requests a second and serving device that the load is scaled to, over its first half minute.
        trace_offset_s: By how many seconds the windows that the devices replay are moved on in the trace.
        steps: RL steps an arm, learning and sparse phase together.
        sparse_fraction: Share of the steps that belongs to the sparse phase (at least one step when there are two).
        seed: Seed of maps, sampling, load and weights, the same in every arm.
        json: Print the summary as one JSON object, the last line of the standard output.
        out: Folder for ``summary.json``, ``metrics.jsonl``, ``timeline.json`` and ``report.html``; made when missing.
        env: Environment as ``module:Class``.
        slo_ttft_ms: Serving's time-to-first-token budget (default: the paper's for a 7B model).
        slo_tpot_ms: Serving's time-per-output-token budget (default: the paper's for a 7B model).
        admission: ``slo`` fills up to the SLO, ``quiet`` hardly moves serving's own latency.
        port: Port of the weight relay on the loopback interface; 0 takes a free one.
        serving_profile: Named GPU and model whose step times the serving engines take.
        rollout_profile: Named GPU and model whose step times the rollout engines take.
        rollout_engine: What the rollout engines, dedicated and borrowed, run on: ``vllm`` or ``sglang``.
        serving_engine: What the serving engines run on: ``vllm`` or ``sglang``.
        sglang_python: The Python of the environment that SGLang is in; ``None`` is the one that ``make sglang-env`` makes.
        k: Stretch of modelled time, modelled second to wall second; ``None`` is 2.5, and 6 with SGLang, whose steps take longer.
        tokens_per_token: Tokens of the modelled agent for which one word of the policy stands.
        num_dedicated: Dedicated rollout engines.
        num_borrowed: Borrowed engines, each beside a serving engine of another model.
        num_groups: Groups a step.
        group_size: Trajectories a group.
        cap_per_engine: Turns that one rollout engine runs at a time, in every arm.
        trainer: What trains the policy: ``fsdp`` (FSDP2) or ``megatron`` (Megatron-Core, tensor parallelism over all ranks).
        num_learner_ranks: Ranks of the learner.
        num_env_processes: Processes that run the environments.
        num_eval_maps: Held-out maps on which success is measured before and after, at temperature 1.
        num_eval_episodes: Episodes on each of them.
        warm_start_steps: Supervised steps before the first arm.
        learn_lr: Learning rate of the learning phase.
        sparse_lr: Learning rate of the sparse phase.
        learn_minibatches: Optimizer steps an RL step of the learning phase.
        sparse_minibatches: Optimizer steps an RL step of the sparse phase.
        fixed_rollout_share: Share of the fixed arm's step that its rollout takes; gives the modelled training time,
            one constant for all arms (paper: 86.9 % for the 8B model).
        ungated_steps: Rollout steps of the short arm without admission control; 0 leaves the arm out.
        uncapped_steps: Rollout steps of the fixed arm without the slot cap; 0 leaves the arm out.

    Raises:
        ConfigError: A field is out of range or of the wrong kind.
    """

    trace: str | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(_text("the path of a file", "leave it out to use the generated load")),
    )
    rate_rps: float = attrs.field(default=5.6, validator=_above_zero("requests a second", "for example 5.6"))
    trace_offset_s: float = attrs.field(
        default=0.0, validator=_number("0 or more (seconds)", "0 starts at the first request", lambda value: value >= 0)
    )

    steps: int = attrs.field(default=12, validator=_integer(1, "for example 12", maximum=10_000))
    sparse_fraction: float = attrs.field(
        default=0.25,
        validator=_number("0 or more and below 1", "0 leaves the sparse phase out", lambda value: 0 <= value < 1),
    )
    seed: int = attrs.field(
        default=0, validator=_integer(0, "any such number makes a repeatable run", maximum=2**31 - 1)
    )

    json: bool = attrs.field(default=False, validator=_boolean)
    out: str = attrs.field(default="rose-demo", validator=_text("the path of a folder", "for example rose-demo"))
    env: str = attrs.field(
        default="rose.reference.lake:FrozenLake",
        validator=_text("written module:Class", "for example rose.reference.lake:FrozenLake", _SPEC),
    )

    slo_ttft_ms: float = attrs.field(
        default=500.0,
        validator=_above_zero("milliseconds", "give serving's time-to-first-token budget, for example 500"),
    )
    slo_tpot_ms: float = attrs.field(
        default=150.0,
        validator=_above_zero("milliseconds", "give serving's time-per-output-token budget, for example 150"),
    )
    admission: str = attrs.field(
        default="slo",
        validator=_one_of(ADMISSION_MODES, "slo fills up to the SLO, quiet hardly moves serving's latency"),
    )

    port: int = attrs.field(default=0, validator=_integer(0, "0 takes a free port", maximum=65535))

    serving_profile: str = attrs.field(
        default="h100:qwen2.5-7b", validator=_text("the name of a profile", "for example h100:qwen2.5-7b")
    )
    rollout_profile: str = attrs.field(
        default="h100:qwen3-8b", validator=_text("the name of a profile", "for example h100:qwen3-8b")
    )
    rollout_engine: Literal["vllm", "sglang"] = attrs.field(
        default="vllm", validator=_one_of(ENGINES, "sglang needs make sglang-env")
    )
    serving_engine: Literal["vllm", "sglang"] = attrs.field(
        default="vllm", validator=_one_of(ENGINES, "sglang needs make sglang-env")
    )
    sglang_python: str | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(_text("the path of a Python", "for example .venv-sglang/bin/python")),
    )
    k: float | None = attrs.field(
        default=None,
        validator=attrs.validators.optional(
            _above_zero("wall seconds a modelled second", "2.5 suits 4 busy devices on 2 cores")
        ),
    )
    tokens_per_token: int = attrs.field(default=8, validator=_integer(1, "8 stands for an agent's longer turns"))

    num_dedicated: int = attrs.field(default=2, validator=_integer(1, "a job needs a rollout engine of its own"))
    num_borrowed: int = attrs.field(
        default=2, validator=_integer(1, "without a borrowed engine there is nothing to compare")
    )
    num_groups: int = attrs.field(default=20, validator=_integer(1, "for example 20"))
    group_size: int = attrs.field(default=8, validator=_integer(2, "GRPO compares the trajectories of a group"))
    cap_per_engine: int = attrs.field(default=16, validator=_integer(1, "the paper's cap is 16"))
    trainer: Literal["fsdp", "megatron"] = attrs.field(
        default="fsdp", validator=_one_of(TRAINERS, "megatron needs rose-rl[megatron]")
    )
    num_learner_ranks: int = attrs.field(default=2, validator=_integer(1, "for example 2"))
    num_env_processes: int = attrs.field(default=2, validator=_integer(1, "for example 2"))
    num_eval_maps: int = attrs.field(default=128, validator=_integer(1, "for example 128"))
    num_eval_episodes: int = attrs.field(default=2, validator=_integer(1, "for example 2"))
    warm_start_steps: int = attrs.field(default=150, validator=_integer(0, "0 starts from random weights"))

    learn_lr: float = attrs.field(default=5e-4, validator=_above_zero("learning rate", "for example 1e-3"))
    sparse_lr: float = attrs.field(default=1e-6, validator=_above_zero("learning rate", "for example 1e-6"))
    learn_minibatches: int = attrs.field(default=4, validator=_integer(1, "for example 2"))
    sparse_minibatches: int = attrs.field(default=1, validator=_integer(1, "for example 1"))
    fixed_rollout_share: float = attrs.field(default=0.869, validator=_between_zero_and_one("the paper reports 0.869"))
    ungated_steps: int = attrs.field(default=3, validator=_integer(0, "0 leaves the ungated arm out"))
    uncapped_steps: int = attrs.field(default=1, validator=_integer(0, "0 leaves the uncapped arm out"))

    @property
    def stretch(self) -> float:
        """Return ``k``, or what suits the slower of the engines."""
        return max(_STRETCH[engine] for engine in self.engines) if self.k is None else self.k

    @property
    def engines(self) -> tuple[str, str]:
        """Return the names of the rollout and of the serving engine."""
        return self.rollout_engine, self.serving_engine

    @property
    def sparse_steps(self) -> int:
        """Return how many of ``steps`` belong to the sparse phase; they come last."""
        if self.steps == 1 or self.sparse_fraction == 0:
            return 0
        return min(self.steps - 1, max(1, round(self.steps * self.sparse_fraction)))

    @property
    def learn_steps(self) -> int:
        """Return how many of ``steps`` belong to the learning phase; they come first."""
        return self.steps - self.sparse_steps
