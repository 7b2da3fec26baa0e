"""vLLM's asynchronous scheduling on a machine without a GPU, for tests.

vLLM turns it off on CPUs. Its scheduler and its queue of batches do not depend on the device, so both can be turned on again once the
worker is made: the worker computes a batch while it is handed over, and everything else is as on a GPU, with two batches in flight.
Not shown that way: kernels that really run while the next batch is scheduled.
"""

from __future__ import annotations

from typing import Any

from rose.backends.vllm.scheduler import RoseAsyncScheduler


class AheadScheduler(RoseAsyncScheduler):
    """A ``scheduler_cls`` that has its engine keep two batches in flight. Name it by its path: importing it imports vLLM."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs["vllm_config"].scheduler_config.async_scheduling = True
        super().__init__(*args, **kwargs)
