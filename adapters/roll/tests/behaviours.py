"""What the doubles do where the adapter needs more than a signature: our own few lines, none of ROLL's."""

from __future__ import annotations

import contextlib
import importlib
import os
from typing import Any


def install() -> None:
    """Give the doubles their behaviour; call it before ``rose_roll`` is imported."""
    _data()
    _workers()
    _proxies()
    utils = importlib.import_module("roll.utils.context_managers")
    utils.state_offload_manger = _no_offload
    importlib.import_module("roll.utils.import_utils").safe_import_class = _import_class


def _data() -> None:
    cls = importlib.import_module("roll.distributed.scheduler.protocol").DataProto

    def init(
        self: Any, batch: Any = None, non_tensor_batch: Any = None, remote_batch: Any = None, meta_info: Any = None
    ) -> None:
        del remote_batch
        self.batch, self.non_tensor_batch, self.meta_info = (
            batch,
            dict(non_tensor_batch or {}),
            meta_info if meta_info is not None else {},
        )

    cls.__init__ = init
    cls.batch = cls.non_tensor_batch = cls.meta_info = None
    del cls.__repr__, cls.__len__


def _workers() -> None:
    def register(**options: Any) -> Any:
        def mark(function: Any) -> Any:
            function.registered = options
            return function

        return mark

    importlib.import_module("roll.distributed.scheduler.decorator").register = register
    cls = importlib.import_module("roll.distributed.executor.worker").Worker
    cls.__init__ = _init_worker
    cls.initialize = lambda self, pipeline_config: setattr(self, "pipeline_config", pipeline_config)
    cls.logger = importlib.import_module("logging").getLogger("roll")
    base = importlib.import_module("roll.pipeline.base_worker")
    base.InferWorker.__init__ = lambda self, worker_config: cls.__init__(self, worker_config)
    base.InferWorker.tokenizer = None
    for name in ("agentic.agentic_actor_worker", "agentic.agentic_actor_pg_worker", "rlvr.actor_worker"):
        module = importlib.import_module(f"roll.pipeline.{name}")
        module.ActorWorker.__init__ = _init_worker
        module.ActorWorker.logger = cls.logger


def _init_worker(self: Any, worker_config: Any) -> None:
    self.worker_config = worker_config
    self.worker_name, self.cluster_name = "worker-0", "cluster"
    self.rank, self.world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    self.master_addr, self.master_port = "127.0.0.1", 1
    self.rank_info = importlib.import_module("types").SimpleNamespace(dp_rank=self.rank, tp_rank=0)


def _proxies() -> None:
    module = importlib.import_module("roll.pipeline.agentic.llm_proxy.base_llm_proxy")

    def init(self: Any, generate_scheduler: Any, llm_proxy_config: Any, tokenizer: Any, env: Any) -> None:
        self.generate_scheduler, self.llm_proxy_config, self.tokenizer, self.env = (
            generate_scheduler,
            llm_proxy_config,
            tokenizer,
            env,
        )

    module.BaseLLMProxy.__init__ = init
    registry: dict[str, type] = {}

    def register_llm_proxy(name: str) -> Any:
        return lambda cls: registry.setdefault(name, cls)

    module.LLM_PROXY_REGISTRY = registry
    module.register_llm_proxy = register_llm_proxy
    package = importlib.import_module("roll.pipeline.agentic.llm_proxy")
    package.register_llm_proxy, package.LLM_PROXY_REGISTRY = register_llm_proxy, registry


@contextlib.contextmanager
def _no_offload(strategy: Any, metrics: dict[str, float], metric_infix: str, **_: Any) -> Any:
    del strategy, metrics, metric_infix
    yield


def _import_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)
