"""The load of a vLLM server, read from its Prometheus metrics. Pure; only the few lines that are needed are looked at."""

from __future__ import annotations

import re

import attrs


@attrs.frozen(kw_only=True)
class ServerLoad:
    """What the metrics say; counts are summed over the server's data-parallel engines.

    Attributes:
        num_running: Requests in the batch.
        num_waiting: Requests that wait.
        kv_used_tokens: Tokens in KV blocks that are in use.
        kv_total_tokens: Tokens that fit; 0 where the server does not say.
    """

    num_running: int
    num_waiting: int
    kv_used_tokens: int
    kv_total_tokens: int


def _samples(name: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"^vllm:" + name + rb"(?:\{[^}\n]*\})? (\S+)", re.MULTILINE)


_RUNNING, _WAITING, _KV_USE = map(_samples, (b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc"))
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}\n]*)\}", re.MULTILINE)
_BLOCK_SIZE = re.compile(rb'\bblock_size="(\d+)"')
_NUM_BLOCKS = re.compile(rb'\bnum_gpu_blocks="(\d+)"')


def parse_load(metrics: bytes) -> ServerLoad | None:
    """Return the load that ``/metrics`` shows; ``None`` when these are no metrics of vLLM.

    Args:
        metrics: The body, in the Prometheus text format.
    """
    running, waiting = _RUNNING.findall(metrics), _WAITING.findall(metrics)
    if not running or not waiting:
        return None
    uses = [float(use) for use in _KV_USE.findall(metrics)]
    sizes = [_kv_tokens(labels) for labels in _CACHE.findall(metrics)]
    total = sum(sizes)
    used_fraction = sum(uses) / len(uses) if uses else 0.0
    return ServerLoad(
        num_running=round(sum(map(float, running))),
        num_waiting=round(sum(map(float, waiting))),
        kv_used_tokens=round(used_fraction * total),
        kv_total_tokens=total,
    )


def _kv_tokens(labels: bytes) -> int:
    block_size, num_blocks = _BLOCK_SIZE.search(labels), _NUM_BLOCKS.search(labels)
    return int(block_size[1]) * int(num_blocks[1]) if block_size and num_blocks else 0
