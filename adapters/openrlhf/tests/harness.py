"""A tiny model with a tokenizer, prompts, and whole runs of OpenRLHF in a process of their own."""

from __future__ import annotations

import ast
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

HERE = Path(__file__).parent
ADAPTER = HERE.parent
_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_model(path: Path) -> Path:
    """Write a random Qwen3 of two layers (bfloat16) with a tokenizer of its own."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    texts = ["what is the sum of one and two ?", "the answer is three", "user assistant system hello world"] * 20
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    raw.train_from_iterator(
        [*texts, *map(str, range(200))],
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    tokenizer.chat_template = _TEMPLATE
    tokenizer.save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        initializer_range=0.05,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


def make_prompts(path: Path, num_prompts: int, label: Callable[[int], str] = str) -> Path:
    """Write prompts as OpenRLHF reads them."""
    rows = [{"input": f"what is {n} plus {n + 1} ?", "label": label(n)} for n in range(num_prompts)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


SMALL = (
    "--ds.attn_implementation eager --ds.zero_stage 2 --ds.param_dtype bf16 --algo.kl.init_coef 0 --actor.adam.lr 1e-3 "
    "--rollout.batch_size 2 --rollout.n_samples_per_prompt 4 --rollout.micro_batch_size 4 --train.batch_size 8 "
    "--train.micro_batch_size 4 --train.num_episodes 1 --data.max_len 96 --rollout.max_new_tokens 16"
).split()
"""What makes the examples a matter of a minute on two cores; appended to their flags."""


def readme_commands() -> list[str]:
    """Return the commands that the README tells a newcomer to give, in order."""
    blocks = re.findall(r"```console\n(.*?)```", (ADAPTER / "README.md").read_text(), re.DOTALL)
    return [line.removeprefix("$ ") for block in blocks for line in block.splitlines() if line.startswith("$ ")]


def readme_command(words: str, *flags: str) -> list[str]:
    """Return the README's one command that has ``words`` in it, as it stands there, with flags behind."""
    (line,) = [command for command in readme_commands() if words in command]
    return ["bash", "-c", f'{line} "$@"', "README", *flags]


def environment(folder: Path, **further: str) -> dict[str, str]:
    """Return the variables of a run."""
    bin_folder = str(Path(sys.executable).parent)
    return {
        **os.environ,
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",  # ninja
        "PYTHONPATH": os.pathsep.join([str(HERE / "cpu"), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
        "PYTHON": sys.executable,
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_DATASETS_CACHE": str(folder / "datasets"),
        "GPUS": "1",
        **further,
    }


@attrs.define
class Run:
    """One run of OpenRLHF, recorded."""

    process: subprocess.Popen[str]
    folder: Path
    num_syncs: int = 0
    versions: list[str] = attrs.field(factory=list)
    killed: list[int] = attrs.field(factory=list)

    @classmethod
    def start(cls, folder: Path, command: Sequence[str], variables: Mapping[str, str]) -> Run:
        """Start a command that becomes a run."""
        record = folder / "record"
        record.mkdir(parents=True)
        out = ["--ckpt.path", str(folder / "ckpt"), "--ckpt.output_dir", str(folder / "out"), "--ckpt.disable_ds"]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [*command, *out],
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                cwd=ADAPTER,
                env=environment(folder, ROSE_TEST_RECORD=str(record), **variables),
                start_new_session=True,
            )
        return cls(process, folder)

    @property
    def log(self) -> str:
        """What it said so far."""
        return (self.folder / "log").read_text(errors="replace")

    def wait(self, on_sync: Callable[[int, dict[str, Any]], None] | None = None, timeout_s: float = 400.0) -> int:
        """Wait for its end, calling ``on_sync`` with each sync's weights while the trainer waits. Returns the exit code."""
        give_up_s = time.monotonic() + timeout_s
        while self.process.poll() is None:
            self._see(on_sync)
            if time.monotonic() > give_up_s:
                self.end()
                raise AssertionError(f"not over after {timeout_s} s:\n{self.log[-6000:]}")
            time.sleep(0.1)
        self._see(on_sync)
        return self.process.returncode

    def _see(self, on_sync: Callable[[int, dict[str, Any]], None] | None) -> None:
        path = self.folder / "record" / f"weights-{self.num_syncs}.pt"
        if not path.exists():
            return
        try:
            if on_sync is not None:
                on_sync(self.num_syncs, self.weights(self.num_syncs))
        finally:
            path.with_suffix(".seen").touch()
            self.num_syncs += 1

    def weights(self, number: int) -> dict[str, Any]:
        """Return the trainer's tensors after a sync."""
        return _load(self.folder / "record" / f"weights-{number}.pt")

    def experience(self) -> list[dict[str, Any]]:
        """Return what the trainer made of the samples, in order; ``step`` numbers the batches."""
        paths = sorted((self.folder / "record").glob("experience-*.pt"), key=lambda path: int(path.stem.split("-")[1]))
        return [{**one, "step": step} for step, path in enumerate(paths) for one in _load(path)]

    def steps(self) -> list[dict[str, float]]:
        """Return the status that OpenRLHF logged of each step."""
        return [ast.literal_eval(found) for found in re.findall(r"Global step \d+: (\{.*\})", self.log)]

    def end(self) -> None:
        """End it and all that it started."""
        for what in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, what)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(10)


def _load(path: Path) -> Any:
    import torch

    return torch.load(path, weights_only=False)


def digests(weights: Mapping[str, Any], dtype: Any) -> dict[str, str]:
    """Return the digest of each tensor's bytes, cast as the engines hold it; nothing of ROSE has a hand in it."""
    import torch
    import xxhash

    return {
        name: xxhash.xxh3_128_hexdigest(value.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())
        for name, value in weights.items()
    }
