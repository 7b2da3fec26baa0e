"""An engine's /metrics over time, made from a simulation of serving alone, so that the truth behind the text is known."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence

import attrs

from rose.backends.paced.profiles import profile_named
from rose.policies.admission import Slo
from rose.simulation.serving_site import Answer
from rose.simulation.shadow.exposition import mark
from rose.simulation.shadow.load import EngineLoad
from rose.simulation.shadow.run import RolloutShape, Site, simulate
from rose.simulation.shadow.times import Factors, FittedTimes
from rose.simulation.traces import Arrival
from rose.simulation.workloads import generate_bursty

LENGTH_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000)
TIME_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.0)
VLLM = {
    "running": "vllm:num_requests_running",
    "waiting": "vllm:num_requests_waiting",
    "kv": "vllm:kv_cache_usage_perc",
    "prompt": "vllm:prompt_tokens_total",
    "generated": "vllm:generation_tokens_total",
    "finished": "vllm:request_success_total",
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
    "prompts": "vllm:request_prompt_tokens",
    "outputs": "vllm:request_generation_tokens",
}
SGLANG = {
    "running": "sglang:num_running_reqs",
    "waiting": "sglang:num_queue_reqs",
    "kv": "sglang:token_usage",
    "prompt": "sglang:prompt_tokens_total",
    "generated": "sglang:generation_tokens_total",
    "finished": "sglang:num_requests_total",
    "ttft": "sglang:time_to_first_token_seconds",
    "itl": "sglang:inter_token_latency_seconds",
    "e2e": "sglang:e2e_request_latency_seconds",
}


@attrs.frozen(kw_only=True)
class Truth:
    """An engine of which everything is known."""

    load: EngineLoad
    site: Site
    answers: tuple[tuple[Arrival, Answer], ...]

    @classmethod
    def make(
        cls, *, rate_rps: float = 4.0, duration_s: float = 120.0, factors: Factors | None = None, seed: int = 3
    ) -> Truth:
        """Let a GPU that is ``factors`` of an H100 answer a bursty load."""
        factors = factors or Factors()
        pair = [FittedTimes(profile_named(name), factors) for name in ("h100:qwen2.5-7b", "h100:qwen3-8b")]
        site = Site(
            serving=pair[0],
            rollout=pair[1],
            pool_bytes=42_000_000_000,
            headroom_bytes=2 << 30,
            chunk_tokens=2048,
            slo=Slo(),
            bin_s=10.0,
            shape=RolloutShape(),
        )
        load = EngineLoad(
            arrivals=tuple(generate_bursty(rate_rps, duration_s, seed)), warm_s=0.0, duration_s=duration_s
        )
        run = simulate(load, site, None)
        answers = zip(load.arrivals, sorted(run.answers, key=lambda answer: answer.arrived_s), strict=True)
        return cls(load=load, site=site, answers=tuple(answers))

    def text(self, at_s: float, names: dict[str, str], labels: str = 'model_name="m",engine="0"') -> str:
        """Return what ``/metrics`` says at ``at_s``."""
        firsts = [(a, r) for a, r in self.answers if r.arrived_s + r.ttft_s <= at_s]
        ended = [(a, r) for a, r in firsts if _end_s(a, r) <= at_s]
        made = [_made(a, r, at_s) for a, r in firsts]
        num_arrived = sum(r.arrived_s <= at_s for _, r in self.answers)
        values = {
            "running": len(firsts) - len(ended),
            "waiting": num_arrived - len(firsts),
            "kv": 0.1,
            "prompt": sum(a.prompt_tokens for a, _ in firsts),
            "generated": sum(made),
            "finished": len(ended),
        }
        lines = [f"# TYPE {name} x" for name in names.values()]
        lines += [f"{names[key]}{{{labels}}} {value}" for key, value in values.items()]
        gaps = [(r.tpot_s or 0.0) for (_, r), num in zip(firsts, made, strict=True) for _ in range(num - 1)]
        observed = {
            "ttft": (TIME_BOUNDS, [r.ttft_s for _, r in firsts]),
            "itl": (TIME_BOUNDS, gaps),
            "e2e": (TIME_BOUNDS, [_end_s(a, r) - r.arrived_s for a, r in ended]),
            "prompts": (LENGTH_BOUNDS, [a.prompt_tokens for a, _ in ended]),
            "outputs": (LENGTH_BOUNDS, [a.output_tokens for a, _ in ended]),
        }
        for key, (bounds, seen) in observed.items():
            if key in names:
                lines += histogram(names[key], labels, bounds, seen)
        return "\n".join(lines) + "\n"

    def recording(
        self, names: dict[str, str], interval_s: float = 2.0, labels: str = 'model_name="m",engine="0"'
    ) -> str:
        """Return the whole recording."""
        times_s = [i * interval_s for i in range(int(self.load.duration_s / interval_s) + 1)]
        return "".join(mark(1000 + at_s) + self.text(at_s, names, labels) for at_s in times_s)


def _end_s(arrival: Arrival, answer: Answer) -> float:
    return answer.arrived_s + answer.ttft_s + (arrival.output_tokens - 1) * (answer.tpot_s or 0.0)


def _made(arrival: Arrival, answer: Answer, at_s: float) -> int:
    since_s = at_s - answer.arrived_s - answer.ttft_s
    return min(arrival.output_tokens, 1 + (int(since_s / answer.tpot_s + 1e-9) if answer.tpot_s else 0))


def histogram(name: str, labels: str, bounds: Sequence[float], values: Sequence[float]) -> list[str]:
    """Return a histogram's lines."""
    ranked = sorted(values)
    lines = [f'{name}_bucket{{le="{bound}",{labels}}} {bisect.bisect_right(ranked, bound)}' for bound in bounds]
    lines.append(f'{name}_bucket{{le="+Inf",{labels}}} {len(ranked)}')
    return [*lines, f"{name}_sum{{{labels}}} {math.fsum(ranked)}", f"{name}_count{{{labels}}} {len(ranked)}"]
