"""Runs stock trainers of veRL as a user does: one command, its configuration, its log."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

HERE = Path(__file__).parent
_FIGURE = re.compile(r"([\w/@.\-]+):(?:np\.\w+\()?(-?[\d.]+(?:e[+-]?\d+)?|nan)\)?")


def environment(witness=None, **more):
    """What this machine needs: no device, one thread a process, no reports of use."""
    found = {
        **os.environ,
        "PYTHONPATH": str(HERE),
        "VERL_USE_EXTERNAL_MODULES": "witness",
        "VERL_PLATFORM": "rosecpu",
        "VERL_ENGINE_DEVICE": "cuda",
        "VERL_LOGGING_LEVEL": "WARN",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        **more,
    }
    found.pop("ROSE_TEST_WITNESS", None)
    if witness is not None:
        found["ROSE_TEST_WITNESS"] = str(witness)
    return found


def cpu_overrides(num_devices=1):
    """Settings for a machine without devices and with little time; nothing of them is ROSE's."""
    return [
        "data.dataloader_num_workers=0",
        "actor_rollout_ref.model.use_remove_padding=False",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.rollout.agent.num_workers=1",
        "reward.num_workers=1",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "trainer.device=cpu",
        "trainer.logger=[console]",
        f"+ray_kwargs.ray_init.num_gpus={num_devices}",
        "ray_kwargs.ray_init.num_cpus=16",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


class Job:
    """One run of a trainer, with its log as it comes."""

    def __init__(self, arguments, env, cwd):
        self.lines = []
        self._grew = threading.Condition()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "verl.trainer.main_ppo", *arguments],
            env=env,
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self._process.stdout:
            with self._grew:
                self.lines.append(line.rstrip("\n"))
                self._grew.notify_all()
        with self._grew:
            self._grew.notify_all()

    def wait_for(self, text, timeout_s):
        """Wait until a line of the log has a text; returns the line."""
        end = time.monotonic() + timeout_s
        seen = 0
        while True:
            with self._grew:
                for line in self.lines[seen:]:
                    if text in line:
                        return line
                seen = len(self.lines)
                if self._process.poll() is not None and not self._reader.is_alive():
                    break
                if not self._grew.wait(min(1.0, end - time.monotonic())) and time.monotonic() > end:
                    break
        message = f"{text!r} did not come; the log ends:\n{self.tail()}"
        raise AssertionError(message)

    def end(self, timeout_s):
        """Wait for the end; returns the exit code."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            message = f"not at its end after {timeout_s} s; the log ends:\n{self.tail()}"
            raise AssertionError(message) from None
        finally:
            self.close()

    def close(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._reader.join(10)

    def tail(self, num_lines=60):
        return "\n".join(self.lines[-num_lines:])

    def steps(self):
        """The figures that veRL logged, by step."""
        found = {}
        for line in self.lines:
            match = re.search(r"step:(\d+) - ", line)
            if match:
                figures = {name: float(value) for name, value in _FIGURE.findall(line.split(" - ", 1)[1])}
                found.setdefault(int(match[1]), {}).update(figures)
        return found


def toy_job(policy, task, pool, *, num_devices=1, num_steps=3):
    """The configuration of a small GRPO run, apart from what the machine needs."""
    per_device = 8 // num_devices
    return [
        "algorithm.adv_estimator=grpo",
        f"data.train_files={task}/train.parquet",
        f"data.val_files={task}/val.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=64",
        "data.max_response_length=24",
        f"actor_rollout_ref.model.path={policy}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={per_device}",
        "actor_rollout_ref.actor.use_kl_loss=False",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={per_device}",
        "actor_rollout_ref.rollout.n=2",
        f"reward.custom_reward_function.path={HERE}/digits_reward.py",
        f"trainer.n_gpus_per_node={num_devices}",
        "trainer.nnodes=1",
        f"trainer.total_training_steps={num_steps}",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        *on_pool(pool),
        *cpu_overrides(num_devices),
    ]


def on_pool(url):
    """What makes a job's rollouts run on a pool."""
    return [
        "actor_rollout_ref.rollout.name=rose",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
        "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=rose_verl.agents.RoseAgentLoopManager",
        f"+actor_rollout_ref.rollout.engine_kwargs.rose.pool={url}",
    ]


if __name__ == "__main__":  # POLICY TASK POOL_URL STEPS, and what else the trainer is to be told
    policy, task, pool, steps, *more = sys.argv[1:]
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *toy_job(policy, task, pool, num_steps=steps), *more]
    sys.exit(subprocess.call(command, env=environment(VERL_USE_EXTERNAL_MODULES="cpu_platform")))
