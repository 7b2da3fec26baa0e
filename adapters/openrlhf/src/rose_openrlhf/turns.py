"""One call of ``generate`` as turns of the pool, until there is a whole answer or a clear error.

Invariants:

* Tokens that were made are kept: after an error that may pass, the next try goes on behind them, within the same budget of tokens.
* An answer that must have ``min_tokens`` 1 and begins with its end is drawn again, which gives exactly the draw with that token forbidden; a greedy
  one, which would come out the same, is kept.
* What ends a call early is raised once, with what to do; a sample is never replaced by an empty one.
* A turn that asks for this launch's weights has no token of another's.
* Whenever a turn begins, also one that is drawn or tried again, the gate was open.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import attrs

from rose.errors import (
    ConfigError,
    EngineLostError,
    NoEngineError,
    RequestRefusedError,
    RoseError,
    TransportError,
    TurnFailedError,
    VersionUnavailableError,
)
from rose.types import AnyVersion, AtLeast, FinishReason, Sampling, Turn, TurnResult, VersionConstraint, VersionSpan
from rose_openrlhf.sampling import Request

_logger = logging.getLogger(__name__)
_MAX_REDRAWS = 64
_DRAWN_ABOVE = 0.5  # temperatures
_IMPROBABLE = -20.0
_FIRST_REST_S, _LONGEST_REST_S = 1.0, 15.0
_SAID_EVERY_S = 10.0


@attrs.define
class Trajectory:
    """One call of an executor: its names at the pool, the tokenizer that it came with, and what its turns ran on.

    Attributes:
        trajectory_id: The same for all its turns, so that they stay with one engine while that is best.
        group_id: The prompt's; the samples of a prompt share it.
        tokenizer: OpenRLHF's, or ``None``.
        drawn: The tokens that were drawn, of all its turns; empty once a turn was greedy, or nearly.
        log_prob: The log of the probability of drawing these; 0 where no log-probs were asked for.
    """

    trajectory_id: str
    group_id: str
    tokenizer: Any = None
    drawn: tuple[int, ...] = ()
    log_prob: float = 0.0
    _is_drawn: bool = True
    _oldest: int | None = None
    _newest: int | None = None
    _num_hops: int = 0

    def note(self, result: TurnResult, *, launch: str, temperature: float = 1.0) -> None:
        """Count a turn's moves, and its versions as far as they are of this launch."""
        self._is_drawn = self._is_drawn and temperature >= _DRAWN_ABOVE
        self.drawn = (*self.drawn, *result.token_ids) if self._is_drawn else ()
        self.log_prob += sum(result.logprobs)
        numbers = [span.version.n for span in result.versions if span.version.run == launch]
        if numbers:
            self._oldest = min(numbers if self._oldest is None else [*numbers, self._oldest])
            self._newest = max(numbers if self._newest is None else [*numbers, self._newest])
        self._num_hops += len(result.hops)

    def notes(self) -> dict[str, float]:
        """Return what is logged of it: the oldest and the newest version (-1: none of this launch), and engines asked, the first included."""
        oldest, newest = (-1 if value is None else value for value in (self._oldest, self._newest))
        return {
            "rose_version_min": float(oldest),
            "rose_version_max": float(newest),
            "rose_hops": float(self._num_hops),
        }


async def _is_open() -> None:
    pass


current: contextvars.ContextVar[Trajectory | None] = contextvars.ContextVar("rose_openrlhf_trajectory", default=None)
"""The trajectory in whose executor this code runs."""


@attrs.frozen(kw_only=True)
class TurnLimits:
    """How long a call may take.

    Attributes:
        deadline_s: Of one turn at the pool.
        retry_s: How long errors that may pass are tried again.
    """

    deadline_s: float
    retry_s: float


@attrs.define
class TurnRunner:
    """Runs turns at a pool.

    Args:
        generate: The pool's.
        limits: How long.
        version: Returns the number of the newest weights that the pool was brought to, as far as is known; ``None`` before the first.
        launch: The run that versions of this launch's weights are of.
        rest: Waits; tests give their own.
        gate: Returns once turns may begin.
    """

    generate: Callable[[Turn], Awaitable[TurnResult]]
    limits: TurnLimits
    version: Callable[[], int | None]
    launch: str
    rest: Callable[[float], Awaitable[None]] = asyncio.sleep
    clock: Callable[[], float] = time.monotonic
    gate: Callable[[], Awaitable[None]] = _is_open
    _said_s: float = attrs.field(default=-_SAID_EVERY_S, init=False)

    async def run(self, trajectory: Trajectory, prompt_ids: list[int], request: Request) -> TurnResult:
        """Return one whole answer.

        Raises:
            RoseError: The pool could not give it; the message says what was tried and what to do.
        """
        result = await self._drawn(trajectory, prompt_ids, request)
        if request.text.min_tokens and len(result.token_ids) == 1 and result.token_ids[0] in request.text.stop_ids:
            result = await self._whole(trajectory, prompt_ids, request.sampling, [result])
        trajectory.note(result, launch=self.launch, temperature=request.sampling.temperature)
        return result

    async def _drawn(self, trajectory: Trajectory, prompt_ids: list[int], request: Request) -> TurnResult:
        sampling = request.sampling
        for number in range(_MAX_REDRAWS):
            seed = None if sampling.seed is None else sampling.seed + number
            result = await self._whole(trajectory, prompt_ids, attrs.evolve(sampling, seed=seed), [])
            if not request.text.min_tokens or not _is_barren(result, request) or sampling.temperature == 0:
                return result
        _logger.warning("trajectory %s: %d draws in a row began with their end", trajectory.trajectory_id, _MAX_REDRAWS)
        return await self._whole(trajectory, prompt_ids, sampling, [])

    async def _whole(
        self, trajectory: Trajectory, prompt_ids: list[int], sampling: Sampling, parts: list[TurnResult]
    ) -> TurnResult:
        """Return ``parts`` and what comes behind them, as one answer."""
        failing_since_s: float | None = None
        for number in itertools.count():
            made = [token for part in parts for token in part.token_ids]
            if len(made) >= sampling.max_tokens:
                return attrs.evolve(join(parts), finish_reason=FinishReason.LENGTH)
            await self.gate()
            turn = self._turn(trajectory, prompt_ids + made, _rest_of(sampling, len(made)))
            try:
                result = await self.generate(turn)
            except RoseError as error:
                now_s = self.clock()
                if error.partial is not None:
                    parts.append(self._own(turn, error.partial))
                if failing_since_s is None or (error.partial is not None and error.partial.token_ids):
                    failing_since_s = now_s  # a turn that got on is no turn that fails, however long it took
                rest_s = min(_FIRST_REST_S * 2 ** min(number, 10), _LONGEST_REST_S)
                if not is_passing(error) or now_s + rest_s > failing_since_s + self.limits.retry_s:
                    raise TurnFailedError(_story(error, trajectory, number + 1), getattr(error, "hops", ())) from error
                self._say(f"turn of {trajectory.trajectory_id}: {error}; trying again in {rest_s:.0f} s")
                await self.rest(rest_s)
            else:
                return join([*parts, self._own(turn, result)])
        raise AssertionError  # itertools.count does not end

    def _say(self, message: str) -> None:
        """Log what one of many turns met; the others meet it in the same moment."""
        is_due = self.clock() - self._said_s >= _SAID_EVERY_S
        _logger.log(logging.WARNING if is_due else logging.DEBUG, "%s", message)
        if is_due:
            self._said_s = self.clock()

    def _own(self, turn: Turn, result: TurnResult) -> TurnResult:
        """Return a result of this launch's weights as it is; pools count versions within the run that was synced last, whosever it is."""
        others = {str(span.version) for span in result.versions if span.version.run != self.launch}
        if others and not isinstance(turn.versions, AnyVersion):
            message = (
                f"turn of {turn.trajectory_id}: its tokens are of the weights {', '.join(sorted(others))}, not of {self.launch} as this job's: another job "
                "brought its weights to this pool; give each job that runs at the same time a pool of its own"
            )
            raise ConfigError(message)
        return result

    def _turn(self, trajectory: Trajectory, prompt_ids: list[int], sampling: Sampling) -> Turn:
        newest = self.version()
        versions: VersionConstraint = AnyVersion() if newest is None else AtLeast(newest)
        return Turn(
            trajectory_id=trajectory.trajectory_id,
            group_id=trajectory.group_id,
            prompt_ids=tuple(prompt_ids),
            sampling=sampling,
            versions=versions,
            deadline_s=self.limits.deadline_s,
        )


def _rest_of(sampling: Sampling, num_made: int) -> Sampling:
    """Return what is left to draw; a seed moves on, as the pool moves it on between engines."""
    seed = None if sampling.seed is None else sampling.seed + num_made
    return attrs.evolve(sampling, max_tokens=sampling.max_tokens - num_made, seed=seed)


def twins(trajectories: Sequence[Trajectory]) -> Trajectory | None:
    """Return a trajectory that drew what another did although that is next to impossible: engines share a sampler's seed then."""
    seen: set[tuple[int, ...]] = set()
    for one in trajectories:
        if one.drawn and one.drawn in seen and one.log_prob < _IMPROBABLE:
            return one
        seen.add(one.drawn)
    return None


def _is_barren(result: TurnResult, request: Request) -> bool:
    """Tell whether the answer's first token is its end, which ``min_tokens`` 1 forbids."""
    ids = result.token_ids
    return result.finish_reason is FinishReason.STOP and (
        not ids or (len(ids) == 1 and ids[0] not in request.text.stop_ids)
    )


def is_passing(error: RoseError) -> bool:
    """Tell whether another try may do better: the pool was out of reach or short of engines, not the turn wrong."""
    if isinstance(error, VersionUnavailableError):
        return error.is_retryable
    if isinstance(error, RequestRefusedError):
        return False
    return isinstance(error, TransportError | NoEngineError | EngineLostError)


def join(parts: list[TurnResult]) -> TurnResult:
    """Return the parts of one answer as one result; the last one says how it ended."""
    if len(parts) == 1:
        return parts[0]
    spans: list[VersionSpan] = []
    start = 0
    for part in parts:
        spans += [attrs.evolve(span, start=span.start + start, end=span.end + start) for span in part.versions]
        start += len(part.token_ids)
    return TurnResult(
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(value for part in parts for value in part.logprobs),
        finish_reason=parts[-1].finish_reason,
        versions=tuple(spans),
        hops=tuple(hop for part in parts for hop in part.hops),
    )


def _story(error: RoseError, trajectory: Trajectory, num_tries: int) -> str:
    return (
        f"no answer for trajectory {trajectory.trajectory_id} after {num_tries} tries ({type(error).__name__}: {error}). "
        "The pool moves turns between engines by itself, so this is what is left when none can help: look at GET /v1/pool; "
        "--rose.retry_s and --rose.turn_deadline_s say how long a turn is tried"
    )
