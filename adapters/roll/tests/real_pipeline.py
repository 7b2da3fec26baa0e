"""ROLL's agentic pipeline whole, on CPUs: FSDP2 learner, environments, group queue; its rollouts on a pool.

    python tests/real_pipeline.py POOL_URL MODEL [STEPS] [--async-ratio N] [--dtype fp32|bf16]

ROLL's own ``init()`` starts a cluster by its command line and leaves it; here the cluster is this process's, and ends with it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any

from real_tools import start_ray


def settings(
    url: str, model: str, folder: str, *, steps: int, async_ratio: int, num_ranks: int = 1, dtype: str = "fp32"
) -> dict[str, Any]:
    """Return what a YAML file would hold."""
    generating = {"max_new_tokens": 16, "top_p": 1.0, "top_k": -1, "temperature": 1.0, "num_return_sequences": 1}
    environment = {
        "max_env_num_per_worker": 4,
        "num_env_groups": 2,
        "group_size": 2,
        "tags": ["FrozenLake"],
        "num_groups_partition": [2],
        "generating_args": generating,
        "llm_proxy": {"proxy_type": "rose", "proxy_config": {"pool": url, "poll_s": 0.1}},
    }
    model_args = {"attn_implementation": "sdpa", "disable_gradient_checkpointing": True, "dtype": dtype}
    devices = f"list(range(0,{num_ranks}))"
    return {
        "exp_name": "rose",
        "seed": 42,
        "logging_dir": f"{folder}/logs",
        "output_dir": f"{folder}/output",
        "system_envs": {"ROSE_POOL": url},
        "track_with": "stdout",
        "checkpoint_config": {"type": "file_system", "output_dir": f"{folder}/checkpoints"},
        "max_steps": steps,
        "save_steps": 10000,
        "logging_steps": 1,
        "eval_steps": 0,
        "async_generation_ratio": async_ratio,
        "rollout_batch_size": 4,
        "val_batch_size": 4,
        "sequence_length": 896,
        "ppo_epochs": 1,
        "adv_estimator": "grpo",
        "init_kl_coef": 0.0,
        "entropy_loss_coef": 0.01,  # a policy of random characters never scores; this gives it something to learn
        "enable_reference": False,
        "whiten_advantages": True,
        "pretrain": model,
        "actor_train": {
            "worker_cls": "rose_roll.RoseAgenticTrainWorker",
            "model_args": model_args,
            "training_args": {
                "learning_rate": 1.0e-3,
                "weight_decay": 0,
                "per_device_train_batch_size": 1,
                "gradient_accumulation_steps": 2,
                "warmup_steps": 0,
            },
            "strategy_args": {
                "strategy_name": "fsdp2_train",
                "strategy_config": {"fsdp_size": num_ranks, "param_dtype": dtype, "reduce_dtype": "float32"},
            },
            "device_mapping": devices,
            "infer_batch_size": 1,
        },
        "actor_infer": {
            "worker_cls": "rose_roll.RoseInferWorker",
            "model_args": model_args,
            "strategy_args": {"strategy_name": "vllm", "strategy_config": {}},
            "device_mapping": "list(range(0,1))",
        },
        "partial_gpu_mode": False,
        "reward_normalization": {"grouping": "traj_group_id", "method": "mean_std"},
        "train_env_manager": environment,
        "val_env_manager": environment,
        "custom_envs": {
            "FrozenLake": {
                "env_type": "frozen_lake",
                "max_steps": 2,
                "max_tokens_per_step": 16,
                "env_manager_cls": "rose_roll.RoseTrajEnvManager",
                "agent_system_template": "play.",
                "agent_template": "{observation} left {actions_left}",
                "env_config": {"env_instruction": "go.", "max_steps": 2, "is_slippery": False, "size": 3},
            }
        },
    }


def run(url: str, model: str, *, steps: int, async_ratio: int, dtype: str) -> list[dict[str, Any]]:
    """Run the pipeline; returns the metrics of each step."""
    folder = tempfile.mkdtemp(prefix="rose-roll-")
    os.environ["ROLL_LOG_DIR"] = f"{folder}/logs"
    start_ray(num_cpus=8, ROSE_POOL=url)
    from dacite import from_dict
    from roll.pipeline.agentic.agentic_config import AgenticConfig
    from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline

    config = from_dict(
        data_class=AgenticConfig,
        data=settings(url, model, folder, steps=steps, async_ratio=async_ratio, dtype=dtype),
    )
    pipeline = AgenticPipeline(pipeline_config=config)
    seen: list[dict[str, Any]] = []
    log = pipeline.tracker.log
    pipeline.tracker.log = lambda values, step, **more: (
        seen.append(dict(values)),
        log(values=values, step=step, **more),
    )
    pipeline.run()
    return seen


def read_steps(text: str) -> list[dict[str, float]]:
    """Return what ``main`` printed."""
    return [json.loads(line.removeprefix("STEP ")) for line in text.splitlines() if line.startswith("STEP ")]


def main() -> None:
    """Run it, and print one JSON line of metrics a step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("model", type=Path)
    parser.add_argument("steps", type=int, nargs="?", default=3)
    parser.add_argument("--async-ratio", type=int, default=0)
    parser.add_argument("--dtype", default="fp32")
    given = parser.parse_args()
    for values in run(given.url, str(given.model), steps=given.steps, async_ratio=given.async_ratio, dtype=given.dtype):
        numbers = {
            name.partition("@")[0]: float(value) for name, value in values.items() if hasattr(value, "__float__")
        }
        print("STEP", json.dumps(numbers), flush=True)


if __name__ == "__main__":
    main()
