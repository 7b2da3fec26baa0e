"""ROLL's environments as its scheduler runs them, without its pipeline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from helpers import SETTINGS

MAX_TURNS = 2


class Environments:
    """ROLL's environments as its scheduler runs them: a thread each, one group queue, FrozenLake."""

    def __init__(
        self,
        model: Path,
        router: Any,
        manager: str,
        proxy: dict[str, Any],
        *,
        max_new_tokens: int,
        num_envs: int = 4,
        length: int = 896,
    ) -> None:
        import ray
        import roll.pipeline.agentic.env  # noqa: F401 - registers FrozenLake
        from omegaconf import OmegaConf
        from roll.distributed.scheduler.rollout_scheduler import GroupQueueManager
        from roll.utils.import_utils import safe_import_class
        from transformers import AutoTokenizer

        self.num_envs = num_envs
        self.ray, self.tokenizer = ray, AutoTokenizer.from_pretrained(model)
        tag = {"env_type": "frozen_lake", "tag": "FL", "max_steps": MAX_TURNS, "max_tokens_per_step": max_new_tokens}
        lake = {"size": 3, "max_steps": MAX_TURNS, "is_slippery": False}
        envs = {
            number: OmegaConf.create(
                {**tag, "config": lake, "group_id": number // 2, "env_id": number, "group_seed": number // 2}
            )
            for number in range(num_envs)
        }
        settings = {**SETTINGS, "max_new_tokens": max_new_tokens}
        worker = {
            "group_size": 2,
            "group_size_redundancy": 0,
            "max_traj_per_env": 1,
            "group_filter_cls": "real_tools.KeepAll",
            "env_configs": {0: envs},
            "llm_proxy": SimpleNamespace(**proxy),
        }
        arguments = SimpleNamespace(max_new_tokens=max_new_tokens, to_dict=lambda: dict(settings))
        monitor = SimpleNamespace(enable=False, monitor_interval=60, hung_timeout=3600)
        queue = SimpleNamespace(async_generation_ratio=1, rollout_batch_size=num_envs, env_monitor=monitor)
        templates = {"FL": {"agent_system_template": "play.", "agent_template": "{observation} left {actions_left}"}}
        pipeline = SimpleNamespace(
            custom_envs=templates, sequence_length=length, skip_mock_system_prompt=True, system_envs={}
        )
        self.queue = GroupQueueManager.options(max_concurrency=16).remote(queue, SimpleNamespace(**worker), "train")
        make = safe_import_class(manager)
        self.managers = [
            make(
                worker_config=SimpleNamespace(**worker, generating_args=arguments),
                pipeline_config=pipeline,
                env_config=config,
                tokenizer=self.tokenizer,
                generate_scheduler=router,
                output_queue=self.queue,
                thread_lock=threading.Lock(),
            )
            for config in envs.values()
        ]
        self.errors: list[BaseException] = []
        self._threads = [threading.Thread(target=self._play, args=(one,), daemon=True) for one in self.managers]
        self._is_started = False

    def batch(self, step: int, meanwhile: Callable[[], None] = lambda: None, *, timeout_s: float = 180.0) -> Any:
        """Return a step's batch; ``meanwhile`` happens while it is made."""
        from roll.distributed.scheduler.protocol import DataProto

        for manager in self.managers:
            manager.update_step(step)
        self.ray.get(self.queue.advance_step.remote(step))
        if not self._is_started:
            self._is_started = True
            for thread in self._threads:
                thread.start()
        wanted = self.queue.get_batch.remote(self.num_envs, step)
        time.sleep(0.3)
        meanwhile()
        ready, _ = self._wait(wanted, timeout_s)
        assert not self.errors, self.errors
        assert ready, "no batch came"
        return DataProto.concat(self.ray.get(wanted))

    def close(self) -> None:
        for manager in self.managers:
            manager.stop()
        self.ray.get(self.queue.shutdown.remote())
        for thread in self._threads:
            thread.join(60)

    def _wait(self, wanted: Any, timeout_s: float) -> Any:
        """Wait for a batch; as ROLL's scheduler does, no longer than its environments live."""
        ends_s = time.monotonic() + timeout_s
        while True:
            ready, others = self.ray.wait([wanted], timeout=0.2)
            if ready or self.errors or time.monotonic() > ends_s:
                return ready, others

    def _play(self, manager: Any) -> None:
        from roll.distributed.scheduler.protocol import DataProto

        try:
            manager.run_rollout_loop(DataProto(meta_info={"seed": 1}))
        except BaseException as error:  # noqa: BLE001 - a thread's root; the test reads it
            self.errors.append(error)
