"""What can go wrong in a fake engine, and when, as data that a test writes down."""

from __future__ import annotations

import enum
import math

import attrs
from attrs import validators as v


class FaultKind(enum.Enum):
    """What goes wrong. See ``Fault`` for when."""

    EVICT = "evict"
    """The stream ends as evicted, with the tokens made so far; with ``at_s``, streams that began before it do."""
    STALL = "stall"
    """No token comes for ``duration_s``; the engine looks alive."""
    DIE = "die"
    """The engine is gone: every stream and every call raises ``EngineLostError``."""
    BUSY = "busy"
    """New requests raise ``EngineBusyError``."""
    REFUSE = "refuse"
    """New requests raise ``RequestRefusedError``."""
    SLOW_START = "slow_start"
    """The first token comes ``duration_s`` late."""
    CORRUPT_UPDATE = "corrupt_update"
    """``stage`` raises ``CorruptUpdateError``; nothing changes."""
    FENCE = "fence"
    """``activate`` raises ``EngineFencedError``, and so does every request from then on."""


@attrs.frozen(kw_only=True)
class Fault:
    """One thing that goes wrong in a ``FakeEngine``.

    Attributes:
        kind: What goes wrong.
        request_index: Only for the n-th request that the engine gets (for updates: the n-th ``stage`` or ``activate``),
            counted from 0. ``None`` is every one.
        after_tokens: Only once the stream has made this many tokens.
        at_s: From this time on the engine's clock. Without it a fault is in force from the start, and a stall begins
            when the stream reaches it.
        duration_s: How long a stall, a busy spell or a slow start lasts. For ever, unless said.
    """

    kind: FaultKind
    request_index: int | None = attrs.field(default=None, validator=v.optional(v.ge(0)))
    after_tokens: int = attrs.field(default=0, validator=v.ge(0))
    at_s: float | None = None
    duration_s: float = attrs.field(default=math.inf, validator=v.gt(0))

    def applies(self, index: int, num_tokens: int, now_s: float) -> bool:
        """Return whether the fault is in force for a request with these tokens at this time."""
        is_meant = self.request_index in (None, index) and num_tokens >= self.after_tokens
        if self.at_s is None:
            return is_meant
        return is_meant and self.at_s <= now_s < self.at_s + self.duration_s
