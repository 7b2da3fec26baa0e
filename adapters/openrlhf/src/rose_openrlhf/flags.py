"""The launcher's own flags, and OpenRLHF's as far as a pool has a say in them. Pure; imports nothing of OpenRLHF."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import attrs

from rose.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")
_NO_FLASH_ATTN = "flash_attn is not installed here (pip install flash-attn)"


@attrs.frozen(kw_only=True)
class Options:
    """The launcher's own flags, ``--rose.NAME``.

    Attributes:
        pool: The pool's URL; ``None`` is ``$ROSE_POOL``.
        pool_token_file: Holds the bearer token; ``None`` is ``$ROSE_POOL_TOKEN_FILE``, or no token.
        turn_deadline_s: Of one turn.
        retry_s: How long a turn, a publish or a sync is tried again while the pool is out of reach.
        publish_timeout_s: Of one version.
        sync_timeout_s: How long dedicated engines may take to fetch a version before training goes on without those that did not.
        hold_s: The longest pause between ``pause_generation`` and ``resume_generation``.
        weights_dtype: What the pool's engines hold, if it is not what the trainer does; weights are cast to it.
        initial_weights: ``publish`` the checkpoint before the first step, or ``skip``, for engines that have it already.
        vllm: ``auto``, or ``stand-in`` also where vLLM is installed.
        processed_logprobs: Engines give log-probs after temperature and top-p.
    """

    pool: str | None = None
    pool_token_file: str | None = None
    turn_deadline_s: float = 3600.0
    retry_s: float = 600.0
    publish_timeout_s: float = 600.0
    sync_timeout_s: float = 600.0
    hold_s: float = 1800.0
    weights_dtype: str | None = None
    initial_weights: str = "publish"
    vllm: str = "auto"
    processed_logprobs: bool = False


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is no positive number of seconds")  # noqa: TRY003, EM102 - argparse shows it
    return value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the launcher's own flags."""
    parser = _Parser(prog="python -m rose_openrlhf", add_help=False, allow_abbrev=False)
    group = parser.add_argument_group("ROSE's pool; everything else is OpenRLHF's, see below")
    seconds = {"type": _positive, "metavar": "S"}
    group.add_argument("--rose.pool", metavar="URL", help="of the pool (default: $ROSE_POOL)")
    group.add_argument("--rose.pool_token_file", metavar="FILE", help="its token (default: $ROSE_POOL_TOKEN_FILE)")
    group.add_argument("--rose.turn_deadline_s", **seconds, help="one turn (3600)")  # type: ignore[arg-type]
    group.add_argument("--rose.retry_s", **seconds, help="a pool out of reach is tried again for so long (600)")  # type: ignore[arg-type]
    group.add_argument("--rose.publish_timeout_s", **seconds, help="publishing one version (600)")  # type: ignore[arg-type]
    group.add_argument("--rose.sync_timeout_s", **seconds, help="engines fetching one version (600)")  # type: ignore[arg-type]
    group.add_argument("--rose.hold_s", **seconds, help="longest pause for a sync in partial-rollout mode (1800)")  # type: ignore[arg-type]
    group.add_argument(
        "--rose.weights_dtype",
        choices=DTYPES,
        help="of the engines, if it is not the trainer's; weights are cast to it",
    )
    group.add_argument(
        "--rose.initial_weights", choices=("publish", "skip"), help="the checkpoint as version 0 (publish)"
    )
    group.add_argument(
        "--rose.vllm", choices=("auto", "stand-in"), help="stand-in: also where vLLM is installed (auto)"
    )
    group.add_argument(
        "--rose.processed_logprobs",
        action="store_true",
        default=None,
        help="engines run logprobs_mode=processed_logprobs",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        raise ConfigError(message)


def read_options(arguments: Sequence[str]) -> tuple[Options, list[str]]:
    """Return the launcher's flags, and the rest for OpenRLHF.

    Raises:
        ConfigError: A flag of the launcher's is wrong, or unknown.
    """
    found, rest = parser().parse_known_args(list(arguments))
    unknown = [argument for argument in rest if argument.startswith("--rose.")]
    if unknown:
        message = f"{unknown[0]} is no flag of rose_openrlhf; there are {', '.join('--rose.' + field.name for field in attrs.fields(Options))}"
        raise ConfigError(message)
    given = {name.removeprefix("rose."): value for name, value in vars(found).items() if value is not None}
    return Options(**given), rest


@attrs.frozen(kw_only=True)
class Job:
    """OpenRLHF's flags that matter here."""

    num_engines: int | None
    tensor_parallel_size: int
    sync_backend: str
    sync_with_ray: bool
    colocate_all: bool
    async_enable: bool
    full_determinism: bool
    max_images: int
    lora_rank: int
    load_in_4bit: bool
    param_dtype: str
    max_len: int
    model: str | None
    temperature: float
    top_p: float
    is_correction_level: str
    attn_implementation: str
    needs_flash_attn: str | None

    @property
    def front_needs_gpu(self) -> bool:
        """Whether the group is NCCL's also without vLLM."""
        return self.sync_with_ray and self.sync_backend == "nccl"


_READ: tuple[tuple[str, str, Any, Any], ...] = (
    ("num_engines", "--vllm.num_engines", int, None),
    ("tensor_parallel_size", "--vllm.tensor_parallel_size", int, 1),
    ("sync_backend", "--vllm.sync_backend", str, "nccl"),
    ("sync_with_ray", "--vllm.sync_with_ray", bool, False),
    ("colocate_all", "--train.colocate_all", bool, False),
    ("async_enable", "--train.async_enable", bool, False),
    ("full_determinism", "--train.full_determinism_enable", bool, False),
    ("max_images", "--data.max_images_per_prompt", int, 0),
    ("lora_rank", "--ds.lora.rank", int, 0),
    ("load_in_4bit", "--ds.load_in_4bit", bool, False),
    ("param_dtype", "--ds.param_dtype", str, "bf16"),
    ("max_len", "--data.max_len", int, 2048),
    ("model", "--actor.model_name_or_path", str, None),
    ("temperature", "--rollout.temperature", float, 1.0),
    ("top_p", "--rollout.top_p", float, 1.0),
    ("is_correction_level", "--algo.advantage.is_correction_level", str, "off"),
    ("attn_implementation", "--ds.attn_implementation", str, "flash_attention_2"),
    ("packing_samples", "--ds.packing_samples", bool, False),
    ("dynamic_batch", "--train.dynamic_batch_enable", bool, False),
    ("ring_attn_size", "--ds.ring_attn_size", int, 1),
)


def read_job(arguments: Sequence[str]) -> Job:
    """Read the flags of OpenRLHF that matter here; it checks all of them itself later.

    Raises:
        ConfigError: One of these has no value that can be one.
    """
    reader = _Parser(add_help=False, allow_abbrev=True)
    for name, flag, kind, default in _READ:
        if kind is bool:
            reader.add_argument(flag, dest=name, action="store_true")
        else:
            reader.add_argument(flag, dest=name, type=kind, default=default)
    found = vars(reader.parse_known_args(list(arguments))[0])
    packs = found.pop("packing_samples"), found.pop("dynamic_batch"), found.pop("ring_attn_size") > 1
    names = ("--ds.packing_samples", "--train.dynamic_batch_enable", "--ds.ring_attn_size")
    return Job(
        **found, needs_flash_attn=next((name for name, is_set in zip(names, packs, strict=True) if is_set), None)
    )


def check_job(job: Job, options: Options, *, has_flash_attn: bool) -> None:
    """Check that a pool can serve the job.

    Raises:
        ConfigError: It cannot; the message says which flag to change.
    """
    _check_engines(job)
    _check_weights(job)
    if job.max_images:
        _refuse("--data.max_images_per_prompt: a pool's turns are token ids, so images cannot be sent; set it to 0")
    is_shaped = job.temperature != 1.0 or job.top_p != 1.0
    if job.is_correction_level != "off" and is_shaped and not options.processed_logprobs:
        _refuse(
            f"--algo.advantage.is_correction_level {job.is_correction_level} compares log-probs, and with --rollout.temperature {job.temperature:g} "
            f"--rollout.top_p {job.top_p:g} the pool's are of the unshaped distribution unless its engines say otherwise: give them "
            'options = {engine_args = {logprobs_mode = "processed_logprobs"}} and the launcher --rose.processed_logprobs'
        )
    if has_flash_attn:
        return
    if job.needs_flash_attn is not None:
        _refuse(f"{job.needs_flash_attn} packs sequences, and {_NO_FLASH_ATTN}; leave the flag out")
    if job.attn_implementation == "flash_attention_2":
        _refuse(f"--ds.attn_implementation flash_attention_2 (the default): {_NO_FLASH_ATTN}; set sdpa or eager")


def _check_engines(job: Job) -> None:
    if job.num_engines != 1:
        _refuse(
            f"--vllm.num_engines {job.num_engines}: OpenRLHF sees one engine, the pool's front, and all of the pool's behind it; set it to 1"
        )
    if job.tensor_parallel_size != 1:
        _refuse(
            f"--vllm.tensor_parallel_size {job.tensor_parallel_size}: engines are cut as the pool's job file says; set it to 1"
        )
    if job.colocate_all and not job.async_enable and job.sync_backend == "nccl":
        _refuse(
            "--train.colocate_all hands weights over by CUDA IPC to engines on the trainer's GPUs, and a pool's are elsewhere; "
            "leave it out (--train.colocate_actor_ref and --train.colocate_critic_reward are fine)"
        )
    if job.sync_with_ray and job.sync_backend != "nccl":
        _refuse(
            f"--vllm.sync_with_ray with --vllm.sync_backend {job.sync_backend}: Ray's group over gloo cannot be made in a process that has "
            "DeepSpeed's; leave --vllm.sync_with_ray out"
        )


def _check_weights(job: Job) -> None:
    if job.lora_rank:
        _refuse(
            "--ds.lora.rank: OpenRLHF's sync sends a LoRA model's layers under names that no engine has; train all weights"
        )
    if job.load_in_4bit:
        _refuse("--ds.load_in_4bit: packed weights cannot be given to engines; leave it out")
    if job.model is None:
        _refuse("--actor.model_name_or_path is missing; give the checkpoint that the training starts from")


def _refuse(message: str) -> None:
    raise ConfigError(message)
