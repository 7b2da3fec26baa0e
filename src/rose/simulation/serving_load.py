"""The load of serving engines: from a trace or generated, one list of arrivals an engine. Pure but for reading files.

Each engine replays a window of its own of the trace, brought to the wanted rate by stretching its times (lengths stay
true), and goes round when the trace ends. What one engine gets depends on the configuration, the seed, the duration and the
engine's index, never on how many engines there are.

Capacity: one engine always decodes B = 40 requests; each prompt comes in chunks, each in a step of its own beside the
decodes. A request of P prompt tokens and O answer tokens then takes of the device, with the gap after each step,

    O/B x decode step(B, context B (P + O/2))  +  sum over its chunks (the same step with the chunk - without it)

and capacity is one over that. With the mean lengths of the Azure 2023 conversation trace it is about 14 requests a second
for Qwen2.5-7B on one H100.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from statistics import fmean

import attrs

from rose.backends.paced.profiles import Profile, profile_named
from rose.errors import ConfigError
from rose.interfaces.device import StepWork
from rose.simulation.lengths import OUTPUTS, PROMPTS
from rose.simulation.operators import measured_profile
from rose.simulation.replay import Tape, describe_trace
from rose.simulation.scenario import ServingConfig
from rose.simulation.traces import Arrival, Trace, read_trace
from rose.simulation.workloads import generate_bursty

MAX_REQUEST_TOKENS = 32_768
MAX_OUTPUT_TOKENS = 16_384
_NUM_DECODES = 40
_CHUNK_TOKENS = 2048
_GOLDEN_SHARE = (math.sqrt(5) - 1) / 2


@attrs.frozen(kw_only=True)
class LoadShape:
    """Mean lengths of a load's requests, in tokens."""

    prompt_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, arrivals: Sequence[Arrival]) -> LoadShape:
        """Return the means of some requests; there must be one."""
        return cls(
            prompt_tokens=fmean(arrival.prompt_tokens for arrival in arrivals),
            output_tokens=fmean(arrival.output_tokens for arrival in arrivals),
        )


AZURE_SHAPE = LoadShape(prompt_tokens=PROMPTS.mean_tokens, output_tokens=OUTPUTS.mean_tokens)


def capacity_rps(
    profile: Profile, arrivals_shape: LoadShape = AZURE_SHAPE, *, chunk_tokens: int = _CHUNK_TOKENS
) -> float:
    """Return the requests a second that keep one engine busy all the time while it decodes 40 at once.

    The module's docstring has the formula.
    """
    prompt, output = arrivals_shape.prompt_tokens, arrivals_shape.output_tokens
    context_tokens = round(_NUM_DECODES * (prompt + output / 2))
    decode_s = profile.step_s(StepWork(num_decodes=_NUM_DECODES, context_tokens=context_tokens))
    num_chunks = math.ceil(prompt / chunk_tokens)
    chunk = StepWork(
        num_prefill_tokens=round(prompt / num_chunks),
        num_decodes=_NUM_DECODES,
        context_tokens=context_tokens,
        prefill_positions=prompt**2 / 2 / num_chunks,
    )
    prefill_s = num_chunks * (profile.step_s(chunk) - decode_s)
    return 1 / (output / _NUM_DECODES * (decode_s + profile.host_gap_s) + prefill_s)


def serving_profile(config: ServingConfig) -> Profile:
    """Return the profile of a serving engine, with measured operators where the configuration names some.

    Raises:
        ConfigError: The profile is not known, or the table of operators is of no use; names the key.
    """
    try:
        profile = profile_named(config.profile)
    except ConfigError as error:
        message = f"serving.profile: {error}"
        raise ConfigError(message) from error
    if config.operators is None:
        return profile
    try:
        return measured_profile(profile, config.operators)
    except ConfigError as error:
        message = f"serving.operators: {error}"
        raise ConfigError(message) from error


@attrs.frozen(kw_only=True, eq=False)
class ServingPlan:
    """The load of any number of engines; each engine's is made when it is asked for, and not kept.

    Attributes:
        rate_rps: Mean requests a second of each engine.
        duration_s: How long the load lasts. Another duration is another load: ask for the longest once.
        seed: Of generated loads, and of where windows begin.
        source: What it is, for reports.
        tape: What is replayed; ``None`` for a generated load.
        offset_s: Where in the tape the windows begin to be laid out.
    """

    rate_rps: float
    duration_s: float
    seed: int
    source: str
    tape: Tape | None
    offset_s: float

    @classmethod
    def of(cls, config: ServingConfig, *, duration_s: float, seed: int) -> ServingPlan:
        """Plan ``duration_s`` seconds.

        The rate is ``rate_rps``, or else ``load_fraction`` of the capacity for the trace's own mean lengths.

        Raises:
            ConfigError: The profile, the trace or the table of operators is of no use, or the offset is outside the trace;
                names the key, the row and what to do.
        """
        if not (duration_s > 0 and math.isfinite(duration_s)):
            message = f"a serving load of {duration_s:g} s cannot be planned; the duration must be positive"
            raise ConfigError(message)
        if config.trace is None:
            rate_rps = _rate_rps(config, AZURE_SHAPE)
            tape, source = None, f"generated, {rate_rps:g} requests a second and engine"
        else:
            trace = _fitting(read_trace(config.trace))
            tape = Tape(arrivals=trace.arrivals, name=f"trace {config.trace}", key_prefix="serving.")
            tape.check_offset(config.trace_offset_s)
            rate_rps = _rate_rps(config, LoadShape.of(trace.arrivals))
            source = describe_trace(trace, rate_rps, "engine")
        return cls(
            rate_rps=rate_rps,
            duration_s=duration_s,
            seed=seed,
            source=source,
            tape=tape,
            offset_s=config.trace_offset_s,
        )

    def engine(self, index: int) -> tuple[Arrival, ...]:
        """Return the arrivals of one engine, in order, in seconds from 0.

        Raises:
            ConfigError: So many requests of the trace come at once that no rate can be made of them.
        """
        if self.tape is None:
            generated = generate_bursty(
                self.rate_rps, self.duration_s, random.Random(f"serving {self.seed} {index}").getrandbits(62)
            )
            return tuple(map(_fit, generated))
        # Multiples of the golden ratio spread any number of windows evenly over the trace.
        share = (random.Random(f"serving windows {self.seed}").random() + index * _GOLDEN_SHARE) % 1
        start_s = (self.offset_s + self.tape.span_s * share) % self.tape.span_s
        return self.tape.window(start_s, self.rate_rps, duration_s=self.duration_s, calibration_s=self.duration_s)


def plan_serving(
    config: ServingConfig, *, num_engines: int, duration_s: float, seed: int
) -> tuple[tuple[Arrival, ...], ...]:
    """Return the arrivals of ``num_engines`` engines at once, see ``ServingPlan``.

    Raises:
        ConfigError: See ``ServingPlan.of`` and ``ServingPlan.engine``.
    """
    plan = ServingPlan.of(config, duration_s=duration_s, seed=seed)
    return tuple(plan.engine(index) for index in range(num_engines))


def _rate_rps(config: ServingConfig, shape: LoadShape) -> float:
    if config.rate_rps is not None:
        return config.rate_rps
    return config.load_fraction * capacity_rps(serving_profile(config), shape, chunk_tokens=config.chunk_tokens)


def _fitting(trace: Trace) -> Trace:
    return attrs.evolve(trace, arrivals=tuple(map(_fit, trace.arrivals)))


def _fit(arrival: Arrival) -> Arrival:
    """Shorten a request that is longer than a model's context: first the answer, then the prompt."""
    output_tokens = min(arrival.output_tokens, MAX_OUTPUT_TOKENS)
    prompt_tokens = min(arrival.prompt_tokens, MAX_REQUEST_TOKENS - output_tokens)
    if (prompt_tokens, output_tokens) == (arrival.prompt_tokens, arrival.output_tokens):
        return arrival
    return Arrival(arrival.at_s, prompt_tokens, output_tokens)
