"""What replaces ``openrlhf.trainer.ray.create_vllm_engines``: one front in place of the engines."""

from __future__ import annotations

import logging
import sys
import uuid
from collections.abc import Callable
from typing import Any

import attrs

from rose.errors import ConfigError, RoseError
from rose.frameworks import PoolPlace
from rose_openrlhf.actor import FrontActor, FrontSettings
from rose_openrlhf.flags import Job, Options

_logger = logging.getLogger(__name__)
_MAX_CALLS = 1_000_000  # of one front at a time: a call a prompt, and weights must not queue behind them


@attrs.frozen(kw_only=True)
class EngineMaker:
    """Makes the list of engines.

    Attributes:
        place: The pool.
        options: The launcher's flags.
        job: OpenRLHF's.
        has_vllm: Whether the real vLLM makes the broadcast group, which then is NCCL's and needs a GPU in the front.
    """

    place: PoolPlace
    options: Options
    job: Job
    has_vllm: bool

    def create(
        self,
        num_engines: int,
        tensor_parallel_size: int,
        pretrain: str,
        seed: int,
        full_determinism: bool,  # noqa: FBT001 - OpenRLHF's order
        enable_prefix_caching: bool,  # noqa: FBT001
        enforce_eager: bool,  # noqa: FBT001
        max_model_len: int,
        shared_pg: Any = None,
        gpu_memory_utilization: float | None = None,
        vllm_enable_sleep: bool = False,  # noqa: FBT001, FBT002
        logprobs_mode: str | None = None,
        agent_func_path: str | None = None,
        remote_rm_url: Any = None,
        max_images_per_prompt: int = 0,
    ) -> list[Any]:
        """Start the front, and return it as the only engine. What is said of engines themselves is the pool's job file's business.

        Raises:
            SystemExit: With code 2: the pool cannot serve the job; why is on standard error.
        """
        del (
            seed,
            enable_prefix_caching,
            enforce_eager,
            shared_pg,
            gpu_memory_utilization,
            vllm_enable_sleep,
            logprobs_mode,
        )
        if full_determinism:
            _logger.warning(
                "--train.full_determinism_enable: where and with what a turn is batched in a pool differs from run to run"
            )
        if (num_engines, tensor_parallel_size, max_images_per_prompt) != (1, 1, 0):
            message = "set --vllm.num_engines 1 --vllm.tensor_parallel_size 1 --data.max_images_per_prompt 0"
            raise ConfigError(message)
        needs_gpu = self.has_vllm or self.job.front_needs_gpu
        settings = FrontSettings(
            place=self.place,
            options=self.options,
            run=f"openrlhf-{uuid.uuid4().hex[:12]}",
            model=pretrain,
            param_dtype=self.job.param_dtype,
            max_model_len=max_model_len,
            agent_func_path=agent_func_path,
            remote_rm_url=remote_rm_url,
            device="cuda:0" if needs_gpu else "cpu",
        )
        return [start_front(settings, num_gpus=1 if needs_gpu else 0)]


def start_front(settings: FrontSettings, *, num_gpus: int, exit_: Callable[[int], Any] = sys.exit) -> Any:
    """Start a front and wait until it is open; a reason why it cannot be ends the program with code 2."""
    import ray  # noqa: PLC0415 - the framework's

    actor = ray.remote(FrontActor).options(num_cpus=0, num_gpus=num_gpus, max_concurrency=_MAX_CALLS)
    front = actor.remote(settings)
    try:
        version = ray.get(front.open.remote())
    except RoseError as error:  # Ray's error is also one of its cause's type
        print(f"rose_openrlhf: {getattr(error, 'cause', error)}", file=sys.stderr)  # noqa: T201 - a command
        return exit_(2)
    _logger.info(
        "the pool's front is open; its engines have %s",
        "their own weights" if version is None else f"{settings.run}:{version}",
    )
    return front
