"""A small summary in the shape of ``summary.json``, written out by hand."""

from __future__ import annotations

SUMMARY_LATENCY = {
    "requests": 290, "ttft_p50_ms": 35.0, "ttft_p90_ms": 80.0, "ttft_p99_ms": 178.0, "tpot_p50_ms": 9.6,
    "tpot_p99_ms": 14.6, "itl_p99_ms": 53.0, "violations_fraction": 0.0,
}  # fmt: skip
SUMMARY_ARM = {
    "rollout_s": 20.0, "step_s": 25.0, "rollout_tokens_per_s": 1000.0, "rollout_share": 0.8, "p75_fraction": 0.7,
    "success_first": 0.1, "success_last": 0.4,
}  # fmt: skip
SUMMARY = {
    "device": "paced:h100",
    "k": 2.0,
    "valid": True,
    "invalid_reasons": [],
    "fixed": SUMMARY_ARM,
    "rose": {**SUMMARY_ARM, "rollout_tokens_per_s": 1400.0},
    "ungated": None,
    "gain": {"rollout_throughput": 1.4, "rollout_throughput_over_uncapped": None, "step_time": 1.2},
    "serving": {
        "rate_rps": 5.53,
        "slo": {"ttft_ms": 500.0, "tpot_ms": 150.0},
        "alone": SUMMARY_LATENCY,
        "shared": {**SUMMARY_LATENCY, "added_delay_mean_ms": 8.0},
        "ungated": None,
    },
    "sync": {"bit_exact": True, "phases": {}},
    "borrowed": {"turns": 5, "evicted": 1, "rerouted": 1, "device_seconds": 3.0},
}
