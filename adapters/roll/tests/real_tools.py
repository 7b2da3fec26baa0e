"""A tiny policy with a tokenizer, Ray for tests, and the parts of ROLL that tests with a checkout stand on."""

from __future__ import annotations

import ast
import os
import runpy
import string
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

HERE = Path(__file__).parent
DEVICE = "rolldevice"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_policy(path: Path, *, max_positions: int = 1024, **shape: Any) -> Path:
    """Write a random Qwen3 with a tokenizer of single characters; ids 0 begin, 1 end, 2 padding."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from rose.testing.models import make_qwen3

    make_qwen3(path, max_positions=max_positions, **shape)
    special = ["<|begin|>", "<|im_end|>", "<|pad|>", "<|im_start|>", "<|unk|>"]
    vocab = {text: number for number, text in enumerate([*special, *sorted(string.printable)])}
    core = Tokenizer(models.WordLevel(vocab, unk_token="<|unk|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    core.add_special_tokens(special)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|pad|>", bos_token="<|begin|>", unk_token="<|unk|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(path)
    return path


sys.path.insert(0, os.environ["ROLL_SRC"])
os.environ.setdefault("ROLL_LOG_DIR", tempfile.mkdtemp(prefix="rose-roll-logs-"))  # not ./output of wherever tests run
runpy.run_path(str(HERE / "cpu_shim" / "sitecustomize.py"))  # in this process too


def start_ray(num_cpus: int = 4, **variables: str) -> None:
    """Start a cluster of this process's own, whose workers find ROLL and these tests."""
    import ray

    os.environ.update(
        PYTHONPATH=os.pathsep.join([os.environ["ROLL_SRC"], str(HERE), str(HERE / "cpu_shim"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO="0",
        OMP_NUM_THREADS="1",
        ROLLDEVICE_VISIBLE="0,1,2,3",
        **variables,
    )  # fmt: skip
    ray.init(
        num_cpus=num_cpus,
        resources={DEVICE: 16},  # a learner takes eight, and they come back some time after it has ended
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        namespace="roll",
    )


def stand_in_cluster(workers: list[Any], model: Path) -> Any:
    """Return what a router manager reads of a cluster."""
    model_args = SimpleNamespace(model_name_or_path=str(model))
    strategy_args = SimpleNamespace(strategy_name="vllm", strategy_config={})
    return SimpleNamespace(
        workers=workers,
        worker_config=SimpleNamespace(strategy_args=strategy_args, model_args=model_args),
        world_size=len(workers),
        rank2devices={},
    )


def stand_in_for_vllm() -> None:
    """Give ROLL's router client its own function for vLLM's settings, without the module around it, which imports vLLM."""
    path = Path(os.environ["ROLL_SRC"], "roll/distributed/strategy/vllm_strategy.py")
    wanted = "create_sampling_params_for_vllm"
    body = [node for node in ast.parse(path.read_text()).body if getattr(node, "name", None) == wanted]
    module = ModuleType("roll.distributed.strategy.vllm_strategy")
    vars(module)["RequestOutputKind"] = SimpleNamespace(CUMULATIVE=0, FINAL_ONLY=2)
    exec(compile(ast.Module(body=body, type_ignores=[]), str(path), "exec"), vars(module))  # noqa: S102 - ROLL's own function
    sys.modules[module.__name__] = module


class KeepAll:
    """A group filter of ROLL's that keeps every group."""

    def __init__(self, *_: Any) -> None:
        pass

    def filter(self, **_: Any) -> bool:
        """Keep it."""
        return False
