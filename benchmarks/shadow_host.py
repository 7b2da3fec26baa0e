"""The serving host of the reference job, but with vLLM's own metrics on, at ``http://127.0.0.1:$ROSE_METRICS_PORT/metrics``.

ROSE's engines leave vLLM's statistics off; here they are on and answered by ``prometheus_client``, as vLLM's API server does.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from prometheus_client import start_http_server
from vllm.v1.engine.async_llm import AsyncLLM

from rose.reference.serving_host import serve
from rose.reference.worker_process import take_over_stdout

_start = AsyncLLM.from_vllm_config


def _with_metrics(config: Any, **options: Any) -> AsyncLLM:
    return _start(config, **{**options, "disable_log_stats": False})


if __name__ == "__main__":
    AsyncLLM.from_vllm_config = _with_metrics
    start_http_server(int(os.environ["ROSE_METRICS_PORT"]), "127.0.0.1")
    asyncio.run(serve(take_over_stdout()))
