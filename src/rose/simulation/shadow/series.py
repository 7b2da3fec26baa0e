"""What engines said of themselves over time, by vLLM's and SGLang's names. Pure.

Invariants:

* Counters and histograms are totals since the first scrape: a counter that fell began anew at 0, and what it shows then counts.
* An engine is what has the same model and the same labels of instance, role and rank; of tensor-parallel ranks only rank 0 is taken.

What is needed: prompt tokens, generated tokens, and requests (those that got a first token, or those that ended). All else makes the
picture sharper, and what is missing of it is said in ``notes``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from rose.errors import ConfigError
from rose.simulation.shadow.exposition import Sample, Scrape

Floats = NDArray[np.float64]

PROMPT, GENERATED, CACHED, FINISHED = "prompt_tokens", "generated_tokens", "cached_tokens", "finished"
RUNNING, WAITING, KV, POOL = "running", "waiting", "kv_fraction", "pool_tokens"
TTFT, ITL, E2E, PREFILL, QUEUE = "ttft_s", "itl_s", "e2e_s", "prefill_s", "queue_s"
PROMPT_LENGTHS, OUTPUT_LENGTHS = "prompt_lengths", "output_lengths"

_COUNTERS = {
    PROMPT: ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total"),
    GENERATED: ("vllm:generation_tokens_total", "sglang:generation_tokens_total"),
    CACHED: ("vllm:prompt_tokens_cached_total", "vllm:prefix_cache_hits_total", "sglang:cached_tokens_total"),
    FINISHED: ("vllm:request_success_total", "sglang:num_requests_total"),
}
_GAUGES = {
    RUNNING: ("vllm:num_requests_running", "sglang:num_running_reqs"),
    WAITING: ("vllm:num_requests_waiting", "sglang:num_queue_reqs"),
    KV: ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage"),
    POOL: ("sglang:max_total_num_tokens",),
}
_HISTOGRAMS = {
    TTFT: ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds"),
    ITL: (
        "vllm:inter_token_latency_seconds",
        "vllm:time_per_output_token_seconds",
        "sglang:inter_token_latency_seconds",
        "sglang:time_per_output_token_seconds",
    ),
    E2E: ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds"),
    PREFILL: ("vllm:request_prefill_time_seconds",),
    QUEUE: ("vllm:request_queue_time_seconds", "sglang:queue_time_seconds"),
    PROMPT_LENGTHS: ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram"),
    OUTPUT_LENGTHS: ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram"),
}
_POOL_INFO = "vllm:cache_config_info"
_ENGINE_LABELS = ("model_name", "instance", "engine", "engine_type", "dp_rank")
_SPLIT_LABELS = ("finished_reason", "le", "tp_rank", "pp_rank", "moe_ep_rank")

_PLAIN = {
    name: (role, place)
    for part in (_COUNTERS, _GAUGES)
    for role, names in part.items()
    for place, name in enumerate(names)
}
_PARTS = {
    f"{name}_{part}": (role, part, place)
    for role, names in _HISTOGRAMS.items()
    for place, name in enumerate(names)
    for part in ("bucket", "sum", "count")
}
_GAP_INTERVALS = 3.0


def is_wanted(name: str) -> bool:
    """Return whether a metric of that name is of use here."""
    return name in _PLAIN or name in _PARTS or name == _POOL_INFO


@attrs.frozen(kw_only=True, eq=False)
class Histogram:
    """A histogram's totals: ``bounds`` are upper ones (the last is ``inf``), ``counts[i, j]`` is cumulative over bounds at scrape i."""

    bounds: Floats
    counts: Floats
    sums: Floats
    totals: Floats

    @property
    def mean(self) -> float | None:
        """Mean over the whole time; ``None`` of nothing."""
        num = float(self.totals[-1])
        return float(self.sums[-1]) / num if num > 0 else None

    @property
    def num(self) -> int:
        """Values over the whole time."""
        return int(self.totals[-1])

    def quantile(self, q: float) -> float | None:
        """Return a quantile, evenly spread within its bucket; ``None`` of nothing, or beyond the last finite bound."""
        counts = self.counts[-1]
        if len(counts) == 0 or counts[-1] <= 0:
            return None
        place = int(np.searchsorted(counts, q * counts[-1]))
        if not np.isfinite(self.bounds[place]):
            return None
        low = float(self.bounds[place - 1]) if place else 0.0
        before = float(counts[place - 1]) if place else 0.0
        share = (q * counts[-1] - before) / (counts[place] - before)
        return low + float(share) * (float(self.bounds[place]) - low)


@attrs.frozen(kw_only=True, eq=False)
class EngineSeries:
    """One engine over time; every array has one value a scrape.

    Attributes:
        name: The model, and what tells the engine from others.
        times_s: When it was scraped, from 0.
        counters: Totals since the first scrape, by role.
        gauges: As they were, by role.
        histograms: By role.
        pool_tokens: KV memory in tokens; ``None``: not said.
        notes: What was missing, fell back or went wrong.
    """

    name: str
    times_s: Floats
    counters: Mapping[str, Floats]
    gauges: Mapping[str, Floats]
    histograms: Mapping[str, Histogram]
    pool_tokens: float | None
    notes: tuple[str, ...]

    @property
    def duration_s(self) -> float:
        """From the first scrape to the last."""
        return float(self.times_s[-1])


@attrs.define
class _Raw:
    """One engine as scraped: scrape number -> role -> value; histogram role -> bound -> value."""

    name: str
    plain: dict[int, dict[str, float]] = attrs.field(factory=lambda: defaultdict(dict))
    parts: dict[int, dict[tuple[str, str, float], float]] = attrs.field(factory=lambda: defaultdict(dict))
    places: dict[str, int] = attrs.field(factory=dict)
    pool_tokens: float | None = None


def engine_series(scrapes: Sequence[Scrape], where: str, notes: Sequence[str] = ()) -> list[EngineSeries]:
    """Return every engine of a recording, by name.

    Args:
        scrapes: By time, at least two.
        where: What was scraped, for messages.
        notes: Of all engines, what went wrong when it was recorded.

    Raises:
        ConfigError: Too few scrapes, no series of a known engine, or one that is needed is missing; one line that names it.
    """
    if len(scrapes) < 2:  # noqa: PLR2004 - a difference needs two
        message = (
            f"metrics {where}: {len(scrapes)} scrape, at least 2 are needed to see what changed; record for longer"
        )
        raise ConfigError(message)
    raws: dict[tuple[str, ...], _Raw] = {}
    for number, scrape in enumerate(scrapes):
        for sample in scrape.samples:
            _note(raws, number, sample)
    raws = {key: raw for key, raw in raws.items() if len(raw.plain) > 1}
    if not raws:
        message = (
            f"metrics {where}: no series of vLLM (vllm:...) or SGLang (sglang:...) in it; name an engine's /metrics "
            "(SGLang has one with --enable-metrics)"
        )
        raise ConfigError(message)
    times_s = np.array([scrape.at_s for scrape in scrapes])
    engines = [_settle(raw, times_s, where) for raw in sorted(raws.values(), key=lambda raw: raw.name)]
    return [attrs.evolve(engine, notes=(*notes, *engine.notes)) for engine in engines]


def _note(raws: dict[tuple[str, ...], _Raw], number: int, sample: Sample) -> None:
    labels = dict(sample.labels)
    if labels.get("tp_rank", "0") != "0" or labels.get("pp_rank", "0") != "0":
        return
    key = tuple(labels.get(label, "") for label in _ENGINE_LABELS)
    if sample.name == _POOL_INFO:
        _note_pool(raws, labels, key)
        return
    raw = raws.setdefault(key, _Raw(name="/".join(part for part in key if part) or "engine"))
    if sample.name in _PLAIN:
        role, place = _PLAIN[sample.name]
        if raw.places.setdefault(role, place) == place:
            raw.plain[number][role] = raw.plain[number].get(role, 0.0) + sample.value
    else:
        role, part, place = _PARTS[sample.name]
        if raw.places.setdefault(role, place) == place:
            bound = float(labels["le"]) if part == "bucket" and "le" in labels else 0.0
            values, slot = raw.parts[number], (role, part, bound)
            values[slot] = values.get(slot, 0.0) + sample.value


def _note_pool(raws: dict[tuple[str, ...], _Raw], labels: Mapping[str, str], key: tuple[str, ...]) -> None:
    """Take the KV pool of vLLM's ``cache_config_info``, whose labels are the engine's number and the values themselves."""
    try:
        num_tokens = float(labels["num_gpu_blocks"]) * float(labels["block_size"])
    except (KeyError, ValueError):
        return
    engine = _ENGINE_LABELS.index("engine")
    for other, raw in raws.items():
        if other[engine] == key[engine]:
            raw.pool_tokens = num_tokens


def _settle(raw: _Raw, all_times_s: Floats, where: str) -> EngineSeries:
    seen = sorted(raw.plain)
    values = [raw.plain[number] for number in seen]
    roles = set.intersection(*(set(value) for value in values))
    histograms = {role: found for role in _HISTOGRAMS if (found := _histogram(raw, seen, role)) is not None}
    for role in (PROMPT, GENERATED, *(() if TTFT in histograms else (FINISHED,))):
        if role not in roles:
            names = " or ".join(_COUNTERS[role])
            message = f"metrics {where}: engine {raw.name} has no {names}; without it its load cannot be told"
            raise ConfigError(message)
    counters = {role: _gains([value[role] for value in values]) for role in _COUNTERS if role in roles}
    gauges = {role: np.array([value[role] for value in values]) for role in _GAUGES if role in roles}
    times_s = all_times_s[seen]
    pool = raw.pool_tokens if POOL not in gauges else float(gauges[POOL][-1])
    missing = [*(role for role in (RUNNING, WAITING, KV) if role not in gauges)]
    missing += [role for role in (TTFT, ITL, OUTPUT_LENGTHS) if role not in histograms]
    notes = [f"not exported: {', '.join(_first_name(role) for role in missing)}"] if missing else []
    notes += _gap_notes(times_s, [value[GENERATED] for value in values], len(all_times_s))
    return EngineSeries(
        name=raw.name,
        times_s=times_s - times_s[0],
        counters=counters,
        gauges=gauges,
        histograms=histograms,
        pool_tokens=pool,
        notes=tuple(notes),
    )


def _first_name(role: str) -> str:
    return next(part[role][0] for part in (_COUNTERS, _GAUGES, _HISTOGRAMS) if role in part)


def _gains(values: Iterable[float]) -> Floats:
    """Return what a counter gained since the first value, beginning anew where it fell."""
    array = np.array(list(values), dtype=np.float64)
    change = np.diff(array)
    return np.concatenate(([0.0], np.cumsum(np.where(change < 0, array[1:], change))))


def _histogram(raw: _Raw, seen: Sequence[int], role: str) -> Histogram | None:
    slots = [raw.parts[number] for number in seen if number in raw.parts]
    if len(slots) != len(seen) or any((role, "count", 0.0) not in slot for slot in slots):
        return None
    bounds = sorted({bound for kind, part, bound in slots[-1] if kind == role and part == "bucket"})
    counts = [_gains(slot.get((role, "bucket", bound), 0.0) for slot in slots) for bound in bounds]
    return Histogram(
        bounds=np.array(bounds),
        counts=np.array(counts).T if counts else np.zeros((len(seen), 0)),
        sums=_gains(slot.get((role, "sum", 0.0), 0.0) for slot in slots),
        totals=_gains(slot[role, "count", 0.0] for slot in slots),
    )


def _gap_notes(times_s: Floats, generated: Sequence[float], num_scrapes: int) -> list[str]:
    notes = []
    widths_s = np.diff(times_s)
    if len(widths_s):
        gaps = widths_s[widths_s > _GAP_INTERVALS * np.median(widths_s)]
        if len(gaps):
            notes.append(
                f"{len(gaps)} gaps between scrapes, {gaps.sum():.0f} s together: load within them is taken as even"
            )
    num_resets = int(np.sum(np.diff(np.array(generated)) < 0))
    if num_resets:
        notes.append(
            f"counters began anew {num_resets} times (the engine restarted): load before it is counted as far as it was scraped"
        )
    if len(times_s) < num_scrapes:
        notes.append(f"missing in {num_scrapes - len(times_s)} of {num_scrapes} scrapes")
    return notes
