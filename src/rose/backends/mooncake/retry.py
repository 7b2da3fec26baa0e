"""Which of Mooncake's codes pass by themselves, and how long they are given.

Codes are of release 0.3.13; a code that is not listed is final.
"""

from __future__ import annotations

import enum
import random
import time
from collections.abc import Callable

import attrs
from attrs import validators as v


class Code(enum.IntEnum):
    """The codes that are told apart here."""

    OK = 0
    FULL = -200
    BAD_SIZE = -600
    NOT_READY = -703
    NOT_FOUND = -704
    TRANSFER_FAILED = -800
    RPC_FAILED = -900
    RPC_TIMED_OUT = -901


TRANSIENT = frozenset({Code.TRANSFER_FAILED, Code.RPC_FAILED, Code.RPC_TIMED_OUT})
_MEANINGS = {
    Code.FULL: "no memory is free",
    Code.BAD_SIZE: "the object has another size",
    Code.NOT_READY: "it is still being written",
    Code.NOT_FOUND: "it does not exist",
    Code.TRANSFER_FAILED: "the process that holds or takes the bytes does not answer",
    Code.RPC_FAILED: "the master cannot be reached",
    Code.RPC_TIMED_OUT: "the master does not answer",
}


def describe(code: int) -> str:
    """Return a code with what it means, as far as known."""
    meaning = _MEANINGS.get(Code(code)) if code in set(Code) else None
    return f"code {code}: {meaning}" if meaning else f"code {code}"


@attrs.frozen(kw_only=True)
class RetryPolicy:
    """Tries again while a code is transient, with growing jittered pauses.

    No try starts once ``budget_s`` is over, so that a call ends within the budget and the time of one try.

    Attributes:
        budget_s: How long a failing call is repeated, from its start; 0 tries once.
        not_ready_s: The same for an object that is still being written; whoever waits for one asks again anyway.
        first_pause_s: About how long the first pause is.
        max_pause_s: About how long a pause may become.
    """

    budget_s: float = attrs.field(default=5.0, validator=v.ge(0))
    not_ready_s: float = attrs.field(default=0.1, validator=v.ge(0))
    first_pause_s: float = attrs.field(default=0.01, validator=v.gt(0))
    max_pause_s: float = attrs.field(default=0.5, validator=v.gt(0))

    def run(self, attempt: Callable[[], int]) -> int:
        """Return the code of the last try."""
        started, pause_s = time.monotonic(), self.first_pause_s
        while True:
            code = attempt()
            allowed_s = self.budget_s if code in TRANSIENT else self.not_ready_s if code == Code.NOT_READY else 0.0
            wait_s = pause_s * random.uniform(0.5, 1.0)
            if time.monotonic() + wait_s >= started + allowed_s:
                return code
            time.sleep(wait_s)
            pause_s = min(2 * pause_s, self.max_pause_s)
