"""A cheap log of device turns, and the judgement whether a paced run may be believed."""

from __future__ import annotations

import array
import math
from collections.abc import Sequence

import attrs

_FIELDS = 7
_MAX_RATE_ERROR = 0.01
_MAX_LATENESS_STEPS = 0.5


@attrs.frozen(kw_only=True)
class StepRecord:
    """One device turn.

    Attributes:
        start_s, duration_s: Charged to the device, on its clock.
        late_s: How late its end was noticed; ``nan`` where nobody waited for this turn's own end.
        slip_s: Idle time before it that the engine itself caused, its host work being slower than modelled.
        waited_s: Time from asking for the device to having it.
        num_prefill_tokens, num_decodes: What it computed.
    """

    start_s: float
    duration_s: float
    late_s: float
    slip_s: float
    waited_s: float
    num_prefill_tokens: int
    num_decodes: int


@attrs.frozen(kw_only=True)
class PacingReport:
    """Whether the paced times of one engine are what they claim to be.

    ``rate_error`` is time lost to slow host work over device time; ``is_valid`` asks that it is at most 1 % and that
    the P99 of lateness is at most half the median step. Figures from an invalid run are neither good nor bad: repeat.
    """

    num_steps: int
    median_step_s: float
    late_p50_s: float
    late_p99_s: float
    rate_error: float
    device_s: float
    owed_s: float
    is_valid: bool


class StepLog:
    """An append-only log in one flat array (56 bytes a turn), bounded."""

    def __init__(self, max_records: int = 1_000_000) -> None:
        """Keep at most ``max_records``; later turns are only counted."""
        self._data = array.array("d")
        self._max_values = max_records * _FIELDS
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._data) // _FIELDS

    def append(self, record: Sequence[float]) -> None:
        """Add one turn: the values of ``StepRecord`` in order."""
        if len(self._data) >= self._max_values:
            self.num_dropped += 1
            return
        self._data.extend(record)

    def set_lateness(
        self, late_s: float, *, num_later: int = 0, start_s: float | None = None, duration_s: float | None = None
    ) -> None:
        """Note when a turn's end was really noticed.

        Args:
            late_s: How late that was.
            num_later: Turns that were noted since; 0 is the last one.
            start_s: When it really started, where that was measured.
            duration_s: How long it really took, where that was measured.
        """
        at = len(self._data) - _FIELDS * (num_later + 1)
        if at < 0 or self.num_dropped:
            return
        self._data[at + 2] = late_s
        if start_s is not None and duration_s is not None:
            self._data[at], self._data[at + 1] = start_s, duration_s

    def records(self, since_s: float = -math.inf) -> list[StepRecord]:
        """Return the turns that started at ``since_s`` or later."""
        rows = (self._data[at : at + _FIELDS] for at in range(0, len(self._data), _FIELDS))
        return [
            StepRecord(
                start_s=row[0],
                duration_s=row[1],
                late_s=row[2],
                slip_s=row[3],
                waited_s=row[4],
                num_prefill_tokens=int(row[5]),
                num_decodes=int(row[6]),
            )
            for row in rows
            if row[0] >= since_s
        ]

    def report(self, since_s: float = -math.inf, owed_s: float = 0.0) -> PacingReport:
        """Judge the turns that started at ``since_s`` or later; ``owed_s`` is device time not yet taken."""
        records = self.records(since_s)
        durations = sorted(record.duration_s for record in records)
        lateness = sorted(record.late_s for record in records if not math.isnan(record.late_s))
        device_s = sum(durations)
        rate_error = sum(record.slip_s for record in records) / device_s if device_s else 0.0
        median_s, late_p99_s = _quantile(durations, 0.5), _quantile(lateness, 0.99)
        return PacingReport(
            num_steps=len(records),
            median_step_s=median_s,
            late_p50_s=_quantile(lateness, 0.5),
            late_p99_s=late_p99_s,
            rate_error=rate_error,
            device_s=device_s,
            owed_s=owed_s,
            is_valid=rate_error <= _MAX_RATE_ERROR and late_p99_s <= _MAX_LATENESS_STEPS * median_s,
        )


def _quantile(ranked: Sequence[float], q: float) -> float:
    """Nearest rank; 0 for nothing."""
    return ranked[max(0, math.ceil(q * len(ranked)) - 1)] if ranked else 0.0
