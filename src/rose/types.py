"""Ids and value objects that every part of ROSE shares. No behaviour beyond validation and rendering.

Shapes and units: token sequences are tuples of ints; ``logprobs`` has one float (natural log) a generated token;
times are seconds on the clock of the component that wrote them; sizes are bytes.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterable
from typing import Any, NewType, cast

import attrs

from rose import checks

EngineId = NewType("EngineId", str)
DeviceId = NewType("DeviceId", str)
RequestId = NewType("RequestId", str)
LeaseId = NewType("LeaseId", str)
JobId = NewType("JobId", str)


def _to_tuple(ids: Iterable[int]) -> tuple[int, ...]:
    """Make a tuple of what can be token ids; the rest is left as it is, for the validator to name."""
    given = cast("Any", ids)
    return tuple(given) if isinstance(given, Iterable) and not isinstance(given, str | bytes) else given


class UnseenIds:
    """Token ids that another process holds: only their number is known here. They can be counted and added to, not read."""

    __slots__ = ("_num_ids",)

    def __init__(self, num_ids: int) -> None:
        self._num_ids = num_ids

    def __len__(self) -> int:
        """Return how many there are."""
        return self._num_ids

    def __add__(self, more: tuple[int, ...]) -> UnseenIds:
        """Return the ids with more behind them."""
        return UnseenIds(self._num_ids + len(more))


_check_some_ids = checks.token_ids(1)


def _check_prompt(turn: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    """Check for token ids, or for the number of those that are elsewhere."""
    if type(value) is not UnseenIds or not len(value):
        _check_some_ids(turn, attribute, value)


@functools.total_ordering
@attrs.frozen
class WeightVersion:
    """Version ``n`` of the weights of one training run. Ordered within a run only: other comparisons raise ``TypeError``."""

    run: str = attrs.field(validator=checks.text(r"[A-Za-z0-9_.-]+"))
    n: int = attrs.field(validator=checks.integer(0))

    def __lt__(self, other: object) -> bool:
        """Compare with a version of the same run.

        Raises:
            TypeError: The other version is of another run.
        """
        if not isinstance(other, WeightVersion):
            return NotImplemented
        if self.run != other.run:
            message = f"weight versions are ordered within one run only; {self} and {other} are of two"
            raise TypeError(message)
        return self.n < other.n

    def __str__(self) -> str:
        """Render as ``run:n``, the form that engines carry as their weight label."""
        return f"{self.run}:{self.n}"

    @classmethod
    def parse(cls, text: str) -> WeightVersion:
        """Read the ``run:n`` form back.

        Raises:
            ValueError: The text is not of that form.
        """
        run, separator, n = str(text).rpartition(":")
        if not separator or not (n.isascii() and n.isdigit()):
            message = f"a weight version is written run:n, for example grpo:12; got {checks.shown(text)}"
            raise ValueError(message)
        return cls(run, int(n))


@attrs.frozen
class AtLeast:
    """Constraint: the turn may run on version ``n`` or a later one of the pool's current run."""

    n: int = attrs.field(validator=checks.integer(0))


@attrs.frozen
class Exactly:
    """Constraint: the turn may run on version ``n`` of the pool's current run only."""

    n: int = attrs.field(validator=checks.integer(0))


@attrs.frozen
class AnyVersion:
    """No constraint: any acknowledged version will do."""


VersionConstraint = AtLeast | Exactly | AnyVersion


@attrs.frozen(kw_only=True)
class Sampling:
    """How to draw tokens. ``temperature`` 0 is greedy; ``seed`` makes one request repeatable on one engine."""

    max_tokens: int = attrs.field(validator=checks.integer(1))
    temperature: float = attrs.field(default=1.0, validator=checks.number(at_least=0))
    top_p: float = attrs.field(default=1.0, validator=checks.number(above=0, at_most=1))
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_to_tuple, validator=checks.token_ids())
    ignore_eos: bool = attrs.field(default=False, validator=checks.boolean())
    logprobs: bool = attrs.field(default=True, validator=checks.boolean())
    seed: int | None = attrs.field(default=None, validator=checks.optional(checks.integer()))


@attrs.frozen(kw_only=True)
class Turn:
    """One turn of one trajectory: the exact token ids so far in, new token ids out.

    Attributes:
        versions: Which weights may make its tokens.
        waits_for_version: Wait until an engine holds such weights; otherwise the turn is refused at once
            (``VersionUnavailableError``), to be asked again.
        max_staleness: How many versions the pool may be ahead of the trajectory's oldest token for this turn to begin
            (``StaleTrajectoryError`` beyond); ``None``: any number.
        deadline_s: Seconds until the turn is given up; ``None``: never.
    """

    trajectory_id: str = attrs.field(validator=checks.text())
    group_id: str = attrs.field(validator=checks.text())
    prompt_ids: tuple[int, ...] = attrs.field(converter=_to_tuple, validator=_check_prompt)
    sampling: Sampling = attrs.field(validator=checks.instance(Sampling))
    versions: VersionConstraint = attrs.field(
        factory=AnyVersion, validator=checks.instance(AnyVersion, AtLeast, Exactly)
    )
    waits_for_version: bool = attrs.field(default=True, validator=checks.boolean())
    max_staleness: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(0)))
    deadline_s: float | None = attrs.field(default=None, validator=checks.optional(checks.number(above=0)))


class FinishReason(enum.Enum):
    """Why a stream of tokens ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORTED = "aborted"
    EVICTED = "evicted"


@attrs.frozen(kw_only=True)
class VersionSpan:
    """Tokens ``[start, end)`` of a result were made by ``version``."""

    version: WeightVersion
    start: int
    end: int


@attrs.frozen(kw_only=True)
class EngineRequest:
    """What one engine is asked for. ``request_id`` is fresh for every attempt, never a trajectory's id."""

    request_id: RequestId = attrs.field(validator=checks.text())
    prompt_ids: tuple[int, ...] = attrs.field(converter=_to_tuple, validator=_check_prompt)
    sampling: Sampling = attrs.field(validator=checks.instance(Sampling))
    priority: int = attrs.field(default=0, validator=checks.integer())

    @classmethod
    def begin(cls, turn: Turn, request_id: RequestId) -> EngineRequest:
        """Return the request that begins a turn. What the turn was checked for is not checked again: prompts are long."""
        request = cls.__new__(cls)
        fields = {"request_id": request_id, "prompt_ids": turn.prompt_ids, "sampling": turn.sampling, "priority": 0}
        for name, value in fields.items():
            object.__setattr__(request, name, value)
        return request


@attrs.frozen(kw_only=True)
class TokenChunk:
    """New tokens of a stream. The last chunk of a stream, and only it, has a ``finish_reason``.

    ``version`` made every token of this chunk; ``logprobs`` is as long as ``token_ids``, or empty when not asked for.
    """

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    version: WeightVersion | None = None
    finish_reason: FinishReason | None = None


class RouteReason(enum.Enum):
    """Why a turn was sent to the engine it was sent to. Closed list."""

    AFFINITY = "affinity"
    DEDICATED = "dedicated"
    BORROWED = "borrowed"
    MIGRATED = "migrated"
    REBALANCED = "rebalanced"
    REROUTED_EVICTED = "rerouted_evicted"
    REROUTED_STALLED = "rerouted_stalled"
    REROUTED_LOST = "rerouted_lost"
    REROUTED_BUSY = "rerouted_busy"
    REROUTED_ABORTED = "rerouted_aborted"
    REROUTED_REFUSED = "rerouted_refused"


class HopEnd(enum.Enum):
    """How an attempt on one engine ended. Closed list."""

    FINISHED = "finished"
    EVICTED = "evicted"
    STALLED = "stalled"
    LOST = "lost"
    BUSY = "busy"
    ABORTED = "aborted"
    REFUSED = "refused"


@attrs.frozen(kw_only=True)
class Hop:
    """One attempt of a turn on one engine: where, why there, how many tokens it gave, how it ended."""

    engine_id: EngineId
    reason: RouteReason
    num_tokens: int
    ended: HopEnd


@attrs.frozen(kw_only=True)
class TurnResult:
    """A finished turn. ``token_ids`` never exceed the turn's ``max_tokens``, whatever the number of hops.

    A prompt that leaves no room in the context of any engine gives a result of length 0 without hops, ended as ``LENGTH``.
    """

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    hops: tuple[Hop, ...]


class EngineKind(enum.Enum):
    """Whether an engine's device belongs to the job or is lent by a serving team."""

    DEDICATED = "dedicated"
    BORROWED = "borrowed"


@attrs.frozen(kw_only=True)
class EngineSnapshot:
    """One reading of an engine's load. ``read_at_s`` is on the reader's clock; token counts are engine tokens.

    ``max_context_tokens`` is the longest prompt and answer together that its model takes, ``None`` when it does not say.
    """

    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int
    weight_version: WeightVersion | None
    is_paused: bool
    read_at_s: float
    max_context_tokens: int | None = None


@attrs.frozen(kw_only=True)
class TransportAddress:
    """How another process reaches the same blobs: a registered transport name and its plain-data options."""

    name: str
    options: tuple[tuple[str, str | int | float | bool], ...] = ()


@attrs.frozen(kw_only=True)
class EngineAddress:
    """How another process reaches the same engine: a registered name, and the plain-data options of a client of it.

    The options may hold what the engine asks of its callers (a bearer token, a lease's fencing token), so they are not shown.
    """

    name: str
    options: tuple[tuple[str, str | int | float | bool], ...] = attrs.field(default=(), repr=False)


@attrs.frozen(kw_only=True)
class WeightUpdate:
    """What an engine needs to reach ``target``: manifests to apply in order, and where the blobs are.

    ``manifest_keys`` starts with an anchor (full weights) or with the delta whose base is the engine's version.
    """

    target: WeightVersion
    manifest_keys: tuple[str, ...] = attrs.field(validator=checks.Check("at least one key", bool))
    address: TransportAddress


@attrs.frozen(kw_only=True)
class Activation:
    """Acknowledgement of an activated update. Times in wall seconds; ``is_verified``: state checksums were compared."""

    version: WeightVersion
    stage_s: float
    pause_s: float
    fetched_bytes: int
    is_verified: bool
