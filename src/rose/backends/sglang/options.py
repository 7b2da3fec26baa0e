"""The options of an SGLang server that ROSE starts, and their translation to SGLang's own. Written for SGLang 0.5.23."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import validators as v

from rose import checks
from rose.backends.sglang_server.seeds import SWITCH
from rose.types import EngineId, WeightVersion

_ON_CPU = (
    *("--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch"),
    "--disable-cuda-graph",
)
_GPU = Path("/dev/nvidiactl")


@attrs.frozen(kw_only=True)
class SglangOptions:
    """One server of SGLang with one engine.

    Attributes:
        engine_id: The name by which ROSE knows the engine.
        model: Directory of a Hugging Face checkpoint (safetensors), or a hub id.
        python: The Python of the environment that SGLang is installed in.
        initial_version: The published version that the checkpoint is; ``None`` when it is none.
        max_context_tokens: The model's length, where it is to be another than its own; requests may be 6 tokens shorter.
        max_running_requests: Requests that run at once.
        max_total_tokens: Size of the KV memory in tokens; ``None`` leaves it to SGLang.
        tensor_parallel_size: Number of devices that the model is cut over.
        is_priority_scheduled: Order requests by ``EngineRequest.priority`` instead of arrival.
        is_deterministic: Seeds reach the sampler; on a CPU by ROSE's package in the server, for SGLang needs kernels for it there.
        is_on_cpu: Run without a GPU; as the machine is when left out.
        python_path: Folders for the server's ``PYTHONPATH``, before what it is here.
        environment: Further variables of the server's environment.
        server_args: Further arguments of ``sglang.launch_server``; they win over the others.
        log_path: The server's output; when left out a temporary file, which goes with an engine that is closed in good order.
        has_warm_up: Let a start include the model's first step, which may take seconds; an engine whose steps are held has none.
        timeout_s: How long a reading or a short command may take; a server that is silent for so long is lost.
        update_timeout_s: How long a command that waits for the model's weights may take: one of an update, a sleep, a wake.
        start_timeout_s: How long the start may take, the first step of the model included.
    """

    engine_id: EngineId = attrs.field(validator=v.min_len(1), converter=EngineId)
    model: str = attrs.field(converter=str, validator=v.min_len(1))
    python: str = attrs.field(converter=str, validator=v.min_len(1))
    initial_version: WeightVersion | None = None
    max_context_tokens: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(16)))
    max_running_requests: int = attrs.field(default=16, validator=checks.integer(1))
    max_total_tokens: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(16)))
    tensor_parallel_size: int = attrs.field(default=1, validator=checks.integer(1))
    is_priority_scheduled: bool = attrs.field(default=False, validator=checks.boolean())
    is_deterministic: bool = attrs.field(default=False, validator=checks.boolean())
    is_on_cpu: bool | None = None
    python_path: tuple[str, ...] = ()
    environment: Mapping[str, str] = attrs.field(factory=dict)
    server_args: tuple[str, ...] = ()
    log_path: str | None = None
    has_warm_up: bool = attrs.field(default=True, validator=checks.boolean())
    timeout_s: float = attrs.field(default=10.0, validator=checks.number(above=0))
    update_timeout_s: float = attrs.field(default=120.0, validator=checks.number(above=0))
    start_timeout_s: float = attrs.field(default=600.0, validator=checks.number(above=0))

    @property
    def has_no_gpu(self) -> bool:
        """Return whether the server runs on CPUs."""
        return not _GPU.exists() if self.is_on_cpu is None else self.is_on_cpu

    def command(self, port: int) -> tuple[str, ...]:
        """Return what starts the server on a port of this machine."""
        args: dict[str, Any] = {
            "--model-path": self.model,
            "--host": "127.0.0.1",
            "--port": port,
            "--max-running-requests": self.max_running_requests,
            "--tp-size": self.tensor_parallel_size,
            "--load-snapshot-publish-interval": 1,  # otherwise a load is some decode steps old
        }
        if self.initial_version is not None:
            args["--weight-version"] = self.initial_version
        if self.max_context_tokens is not None:
            args["--context-length"] = self.max_context_tokens
        if self.max_total_tokens is not None:
            args["--max-total-tokens"] = self.max_total_tokens
        valued = [str(part) for pair in args.items() for part in pair]
        return (self.python, "-m", "sglang.launch_server", *valued, *self._switches(), *self.server_args)

    def _switches(self) -> tuple[str, ...]:
        switches = [
            "--incremental-streaming-output",
            "--skip-tokenizer-init",
            "--skip-server-warmup",
            "--disable-overlap-schedule",
        ]
        if self.is_priority_scheduled:
            switches += ["--enable-priority-scheduling", "--schedule-low-priority-values-first"]
        if self.is_deterministic and not self.has_no_gpu:
            switches.append("--enable-deterministic-inference")
        return (*switches, *(_ON_CPU if self.has_no_gpu else ()))

    def server_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Return the server's environment.

        Args:
            base: This process's.
        """
        found = dict(base)
        found["SGLANG_RETURN_ORIGINAL_LOGPROB"] = (
            "1"  # of the model's distribution, as vLLM's are, not of the tempered one
        )
        path = [*self.python_path, *filter(None, [base.get("PYTHONPATH")])]
        if path:
            found["PYTHONPATH"] = os.pathsep.join(path)
        if Path(self.model).is_dir():
            found["HF_HUB_OFFLINE"] = "1"
        if self.has_no_gpu:
            found["SGLANG_USE_CPU_ENGINE"] = "1"
            found[SWITCH] = str(int(self.is_deterministic))
            found.setdefault("OMP_NUM_THREADS", "1")
            found.setdefault("TORCH_COMPILE_DISABLE", "1")  # the first sampled token would wait for a C++ compiler
            if self.tensor_parallel_size > 1:
                num_cores = os.cpu_count() or 1
                cores = [str(rank % num_cores) for rank in range(self.tensor_parallel_size)]
                found["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(cores)
        return found | dict(self.environment)
