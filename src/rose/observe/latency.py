"""Serving latency: from request records to the figures that a serving team reads. Pure.

Percentiles use linear interpolation between the two nearest order statistics (position ``(n - 1) * q / 100``), so that
the P99 of 280 requests lies between the third and the fourth slowest. All times of one call are on one clock.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

import attrs

from rose.errors import ConfigError


@attrs.frozen(kw_only=True)
class Slo:
    """Serving's budgets in milliseconds: time to the first token, and mean time of each further one."""

    ttft_ms: float
    tpot_ms: float

    def __attrs_post_init__(self) -> None:
        for name, value in (("ttft_ms", self.ttft_ms), ("tpot_ms", self.tpot_ms)):
            if not (math.isfinite(value) and value > 0):
                message = f"the SLO's {name} must be above 0, got {value!r}; give serving's own budget in milliseconds"
                raise ConfigError(message)


@attrs.frozen(kw_only=True)
class RequestRecord:
    """One answered serving request.

    Attributes:
        index: Number of the request in its device's arrival list; with ``device`` it pairs the arms.
        device: Serving device that answered.
        arrived_s: When the request arrived.
        ttft_s: From the arrival to the first token.
        finished_s: When the last token came.
        num_tokens: Tokens of the answer.
        tpot_s: Mean time between tokens over the request; ``None`` below two tokens.
        gaps_s: Time between each token and the one before, ``num_tokens - 1`` of them.
    """

    index: int
    device: str
    arrived_s: float
    ttft_s: float
    finished_s: float
    num_tokens: int
    tpot_s: float | None
    gaps_s: tuple[float, ...]

    @classmethod
    def from_token_times(
        cls, *, index: int, device: str, arrived_s: float, token_times_s: Sequence[float]
    ) -> RequestRecord:
        """Make a record from the time at which each token came.

        Args:
            index: Number of the request in its device's arrival list.
            device: Serving device.
            arrived_s: When the request arrived.
            token_times_s: When each token came, in order; tokens of one chunk share a time.

        Raises:
            ValueError: There is no token, or a time is before the one ahead of it.
        """
        times = [arrived_s, *token_times_s]
        if len(times) == 1 or any(after < before for before, after in pairwise(times)):
            message = f"request {index} on {device} needs tokens at times that do not go back, got {times}"
            raise ValueError(message)
        gaps = tuple(after - before for before, after in pairwise(times[1:]))
        return cls(
            index=index,
            device=device,
            arrived_s=arrived_s,
            ttft_s=times[1] - arrived_s,
            finished_s=times[-1],
            num_tokens=len(token_times_s),
            tpot_s=(times[-1] - times[1]) / len(gaps) if gaps else None,
            gaps_s=gaps,
        )

    def violates(self, slo: Slo) -> bool:
        """Return whether the request's TTFT or TPOT is over its budget."""
        return self.ttft_s * 1e3 > slo.ttft_ms or (self.tpot_s is not None and self.tpot_s * 1e3 > slo.tpot_ms)


@attrs.frozen(kw_only=True)
class LatencySummary:
    """Latency of one arm. TPOT is a figure of each request, ITL of each token; ``None``: there was none to measure."""

    num_requests: int
    ttft_p50_ms: float | None
    ttft_p90_ms: float | None
    ttft_p99_ms: float | None
    tpot_p50_ms: float | None
    tpot_p99_ms: float | None
    itl_p99_ms: float | None
    violations_fraction: float

    def as_dict(self) -> dict[str, float | int | None]:
        """Return the figures under their names in ``summary.json``."""
        figures = attrs.asdict(self)
        return {"requests": figures.pop("num_requests"), **figures}


@attrs.frozen(kw_only=True)
class PairedDelay:
    """What sharing added to the same requests: mean and standard error of the mean (``None`` below two pairs)."""

    mean_ms: float
    standard_error_ms: float | None
    num_pairs: int


def percentile(values: Iterable[float], q: float) -> float | None:
    """Return the ``q``-th percentile (0 to 100), linearly interpolated; ``None`` of nothing."""
    ordered = sorted(values)
    if not ordered:
        return None
    position = (len(ordered) - 1) * q / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def summarise(records: Sequence[RequestRecord], slo: Slo, *, num_unanswered: int = 0) -> LatencySummary:
    """Summarise the requests of one arm.

    Args:
        records: The answered requests.
        slo: Budgets that a request must keep.
        num_unanswered: Requests that failed or never gave a token: they count as requests and as violations.
    """
    ttft_ms = [record.ttft_s * 1e3 for record in records]
    tpot_ms = [record.tpot_s * 1e3 for record in records if record.tpot_s is not None]
    num_requests = len(records) + num_unanswered
    num_violations = sum(record.violates(slo) for record in records) + num_unanswered
    return LatencySummary(
        num_requests=num_requests,
        ttft_p50_ms=percentile(ttft_ms, 50),
        ttft_p90_ms=percentile(ttft_ms, 90),
        ttft_p99_ms=percentile(ttft_ms, 99),
        tpot_p50_ms=percentile(tpot_ms, 50),
        tpot_p99_ms=percentile(tpot_ms, 99),
        itl_p99_ms=percentile((gap * 1e3 for record in records for gap in record.gaps_s), 99),
        violations_fraction=num_violations / num_requests if num_requests else 0.0,
    )


def paired_delay_ms(alone: Iterable[RequestRecord], shared: Iterable[RequestRecord]) -> PairedDelay:
    """Return by how much each request's first token came later when the device was shared, over the common requests.

    Raises:
        ValueError: An arm holds a request twice, or the arms have no request in common.
    """
    before, after = _ttft_by_request(alone), _ttft_by_request(shared)
    delays = [(after[key] - before[key]) * 1e3 for key in before.keys() & after.keys()]
    if not delays:
        message = (
            f"no request is in both arms ({len(before)} alone, {len(after)} shared): pair runs of the same arrivals"
        )
        raise ValueError(message)
    mean = math.fsum(delays) / len(delays)
    if len(delays) == 1:
        return PairedDelay(mean_ms=mean, standard_error_ms=None, num_pairs=1)
    variance = math.fsum((delay - mean) ** 2 for delay in delays) / (len(delays) - 1)
    return PairedDelay(mean_ms=mean, standard_error_ms=math.sqrt(variance / len(delays)), num_pairs=len(delays))


def _ttft_by_request(records: Iterable[RequestRecord]) -> dict[tuple[str, int], float]:
    ttft_s: dict[tuple[str, int], float] = {}
    for record in records:
        key = (record.device, record.index)
        if key in ttft_s:
            message = f"request {record.index} on {record.device} is recorded twice in one arm"
            raise ValueError(message)
        ttft_s[key] = record.ttft_s
    return ttft_s
