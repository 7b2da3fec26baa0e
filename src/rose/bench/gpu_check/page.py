"""docs/gpu.md, made of what was recorded: ``python tools/gpu_check.py --page``. A test fails where page and records differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rose.bench.gpu_check.outcome import NOT_RUN, PASSED
from rose.bench.gpu_check.runner import RESULTS, SCHEMA
from rose.errors import ConfigError

PAGE = Path("docs/gpu.md")
NEVER = "not run on a GPU"

WITHOUT_A_GPU: Mapping[str, str] = {
    "copies": "nothing to prove",
    "delta-torch": "the same code on CPU tensors: property tests against the CPU kernels, all widths, densities and strides",
    "delta-triton": "the kernels in Triton's interpreter, byte for byte against torch's operations; they compile for compute capabilities 8.0 and 9.0",
    "publish": "blob for blob over CPU tensors: bfloat16, float32, float8, int8; NaN payloads, -0.0, transposed, empty, scalar",
    "scatter": "the same code on CPU tensors against the host's sink; the order of events on a double of `torch.cuda`",
    "device-turns": "two processes over the device `host`; `cuda` over doubles",
    "nccl": "the group over a double with the signatures of torch's stubs; gloo for real",
    "nccl-refusal": "time limits over that double",
    "memory-kvcached": "the part over kvcached's own manager, its compiled module replaced; `KvLimiter` over doubles",
    "memory-vllm": "sleep and wake over doubles of vLLM",
}
"""Part -> what stands for it on a machine without a GPU."""

BEYOND: Sequence[tuple[str, str]] = (
    ("NCCL between two cards or more", "needs two cards; the group over a double, gloo for real"),
    (
        "Mooncake over RDMA, and blobs read into memory of a GPU",
        "the binding's signatures, as installed; the calls over a double",
    ),
    (
        "A vLLM engine on a GPU under `cuda`: kvcached beneath it, its scheduler with two batches in flight",
        "vLLM's CPU build, and doubles",
    ),
    ("An SGLang engine on a GPU", "SGLang's CPU build"),
    ("A tensor-parallel engine over several shared GPUs", "gangs of paced devices"),
    (
        "FSDP2 and Megatron-Core trainers with parameters on GPUs",
        "both on the CPU over gloo; their shards as CPU tensors",
    ),
    (
        'The base pinned on the host (`base_in="pinned"`), and a device without room for it',
        "the same code on CPU tensors",
    ),
)
"""What ROSE has code for and `make gpu-check` does not try, and what stands for it."""

_HEAD = """# What has run on a GPU and what has not

This page is made of the records in `benchmarks/results/gpu-*.json`, by `python tools/gpu_check.py --page`; a test fails where the two
differ. `make gpu-check` on a machine with one NVIDIA card takes less than ten minutes, needs no network, and writes such a record.
Without a GPU it says so in one line. torch and Triton are enough for the core; what else a part needs is said where it is missing.
"""


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the records of a folder, by card.

    Raises:
        ConfigError: One is of another form, or a rehearsal on the CPU; says which.
    """
    found = []
    for path in sorted(folder.glob("gpu-*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document.get("schema") != SCHEMA or document.get("is_rehearsal") or document["card"]["type"] == "cpu":
            message = (
                f"{path} is no record of a GPU: it must be one that `make gpu-check` wrote on a machine with a GPU"
            )
            raise ConfigError(message)
        found.append(document)
    return found


def page(shows: Mapping[str, str], found: Sequence[Mapping[str, Any]]) -> str:
    """Return the page.

    Args:
        shows: Part -> what it shows.
        found: The records.
    """
    lines = [_HEAD]
    if not found:
        lines += ["**No GPU was at hand so far: nothing below has run on one.**\n"]
    lines += ["## What `make gpu-check` tries\n", *_table(["part", "what it shows", "on a GPU", "without one"], (
        [f"`{name}`", text, _state(name, found), WITHOUT_A_GPU[name]] for name, text in shows.items()
    ))]  # fmt: skip
    for record in found:
        lines += _figures(record)
    lines += ["## What it does not try\n", "There is code for it, and no GPU has run it.\n"]
    lines += _table(["what", "on a GPU", "what stands for it"], ([what, NEVER, proof] for what, proof in BEYOND))
    return "\n".join(lines).rstrip() + "\n"


def write(shows: Mapping[str, str]) -> None:
    """Write the page of this checkout."""
    PAGE.write_text(page(shows, records(RESULTS)), encoding="utf-8")


def _state(name: str, found: Sequence[Mapping[str, Any]]) -> str:
    """Return what became of a part on each card."""
    states = []
    for record in found:
        part = next((one for one in record["parts"] if one["name"] == name), None)
        if part is not None and part["status"] != NOT_RUN:
            missed = sum(one["is_met"] is False for one in part["figures"])
            aims = f", {missed} aim{'s' if missed > 1 else ''} missed" if missed else ""
            states.append(f"{part['status']} on {record['card']['name']}{aims}")
        elif part is not None:
            states.append(f"{NEVER} ({record['card']['name']}: {part['reason']})")
    return "; ".join(states) or NEVER


def _figures(record: Mapping[str, Any]) -> list[str]:
    card, versions = record["card"], record["versions"]
    libraries = ", ".join(f"{name} {version}" for name, version in versions.items())
    quick = " Tiny shapes (`--quick`): its rates mean nothing." if record["is_quick"] else ""
    head = f"{record['made']}, commit {record['commit'][:12]}, CUDA {card['cuda']}; {libraries}.{quick}"
    rows = (
        [f"`{part['name']}`", one["name"], f"{one['value']:.4g} {one['unit']}".strip(), _verdict(one)]
        for part in record["parts"]
        if part["status"] == PASSED
        for one in part["figures"]
    )
    failures = [
        f"`{p['name']}` failed: {p['reason']}\n" for p in record["parts"] if p["status"] not in {PASSED, NOT_RUN}
    ]
    return [f"## {card['name']}\n", f"{head}\n", *failures, *_table(["part", "figure", "value", "aim"], rows)]


def _verdict(figure: Mapping[str, Any]) -> str:
    return "" if figure["is_met"] is None else f"{figure['aim']}: {'met' if figure['is_met'] else 'missed'}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return [f"| {' | '.join(head)} |", "|" + "---|" * len(head), *lines, ""]
