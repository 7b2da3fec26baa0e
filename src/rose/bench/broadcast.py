"""The baseline that every trainer has: all weights, whole, broadcast to another process over gloo on the loopback.

Torch is loaded by the two worker processes only. The weights lie in a file that both map; the receiver compares every tensor's bits.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from rose.bench.peers import PeerFigures
from rose.errors import BackendUnavailableError, DeadlineExceededError, RoseError

Array = np.ndarray[Any, np.dtype[Any]]

_TIMEOUT_S = 300.0
_MAX_BYTES = 1 << 30
_RANKS = 2


def measure_broadcast(new: Mapping[str, Array]) -> tuple[PeerFigures, float]:
    """Broadcast tensors from one process to another.

    Returns:
        The figures (``decode_s`` is the broadcast as the receiver saw it), and the share of the bytes that were really broadcast: at
        most 1 GiB of whole tensors is, and figures are for those bytes alone.

    Raises:
        BackendUnavailableError: torch is not installed.
        RoseError: A worker failed, or bits differ.
    """
    chosen = _first_tensors(new)
    num_bytes = sum(bits.nbytes for bits in chosen)
    with tempfile.TemporaryDirectory(prefix="rose-bench-") as folder:
        path = Path(folder) / "weights"
        with path.open("wb") as file:
            for bits in chosen:
                file.write(np.ascontiguousarray(bits).reshape(-1).view(np.uint8).data)
        sizes = [bits.nbytes for bits in chosen]
        (Path(folder) / "sizes.json").write_text(json.dumps(sizes), encoding="utf-8")
        seconds = _run_pair(Path(folder))
    total = sum(bits.nbytes for bits in new.values())
    return PeerFigures(bytes=num_bytes, encode_s=0.0, decode_s=seconds), num_bytes / total


def _first_tensors(new: Mapping[str, Array]) -> list[Array]:
    chosen: list[Array] = []
    size = 0
    for bits in new.values():
        if chosen and size + bits.nbytes > _MAX_BYTES:
            break
        chosen.append(bits)
        size += bits.nbytes
    return chosen


def _run_pair(folder: Path) -> float:
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "rose.bench.broadcast", str(folder), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(_RANKS)
    ]
    try:
        outputs = [worker.communicate(timeout=_TIMEOUT_S) for worker in workers]
    except subprocess.TimeoutExpired as error:
        message = f"the broadcast between two processes did not end in {_TIMEOUT_S:g} s"
        raise DeadlineExceededError(message) from error
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    for worker, (_, complaint) in zip(workers, outputs, strict=True):
        if "No module named 'torch'" in complaint:
            message = "the broadcast needs torch; install it with: pip install 'rose-rl[fsdp]'"
            raise BackendUnavailableError(message)
        if worker.returncode:
            message = f"a process of the broadcast failed: {complaint.strip().splitlines()[-1:]}"
            raise RoseError(message)
    return float(json.loads(outputs[1][0])["seconds"])


def _work(folder: Path, rank: int) -> None:
    """Be one of the two processes; prints the seconds it took."""
    import torch  # noqa: PLC0415 - heavy
    import torch.distributed as dist  # noqa: PLC0415 - heavy

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), _RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=_RANKS)
    sizes = json.loads((folder / "sizes.json").read_text(encoding="utf-8"))
    weights = np.memmap(folder / "weights", dtype=np.uint8, mode="c")
    spans = [(sum(sizes[:index]), size) for index, size in enumerate(sizes)]
    sent = [torch.from_numpy(weights[at : at + size]) for at, size in spans]
    held = sent if rank == 0 else [torch.ones_like(part) for part in sent]
    dist.broadcast(held[0][:1], src=0)
    dist.barrier()
    began = time.perf_counter()
    for part in held:
        dist.broadcast(part, src=0)
    seconds = time.perf_counter() - began
    if rank and not all(torch.equal(a, b) for a, b in zip(held, sent, strict=True)):
        message = "broadcast bits differ from the sender's"
        raise RoseError(message)
    print(json.dumps({"seconds": seconds}))  # noqa: T201 - the answer to the process that asked
    dist.destroy_process_group()


if __name__ == "__main__":
    _work(Path(sys.argv[1]), int(sys.argv[2]))
