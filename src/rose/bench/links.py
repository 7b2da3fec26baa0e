"""Whole syncs through real sockets: a trainer's process, a link, and a serving cluster's process with a relay and its engines."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import attrs

from rose.bench.link_rows import COMPUTED_GBPS, LinkRow, PaperCosts, computed_rows
from rose.bench.link_worker import WorkerSetup
from rose.bench.model_shapes import Shapes
from rose.bench.settings import BenchSettings
from rose.errors import RoseError
from rose.testing.namespaces import NamespacePair, why_unavailable

_NUM_RUNS = 3
_FIRST_N = 1


class Worker:
    """One of the two processes of ``link_worker``: asked one command at a time."""

    def __init__(self, process: subprocess.Popen[str], role: str) -> None:
        self._process, self._role = process, role

    def ask(self, do: str, **arguments: Any) -> None:
        """Send a command."""
        assert self._process.stdin is not None  # noqa: S101 - it was opened with pipes
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Wait for the answer to the command sent last.

        Raises:
            RoseError: The process ended instead.
        """
        assert self._process.stdout is not None  # noqa: S101 - it was opened with pipes
        line = self._process.stdout.readline()
        if not line:
            assert self._process.stderr is not None  # noqa: S101 - it was opened with pipes
            last = self._process.stderr.read().strip().splitlines()[-1:] or ["no message"]
            message = f"the {self._role}'s process of the link benchmark ended: {last[0]}"
            raise RoseError(message)
        found: dict[str, Any] = json.loads(line)
        return found

    def call(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.ask(do, **arguments)
        return self.answer()

    def close(self) -> None:
        """End the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for pipe in (self._process.stdout, self._process.stderr):
            if pipe is not None:
                pipe.close()


@attrs.frozen(kw_only=True)
class _Measured:
    """What one link gave: medians of ``_NUM_RUNS`` syncs, and the parts of each taken alone."""

    probe_gbps: float
    syncs: tuple[dict[str, Any], ...]
    encode_s: float
    decode_s: float
    bytes_sent: int
    paper: PaperCosts
    paper_sync_s: float
    num_elements: int


def measure_links(settings: BenchSettings, shapes: Shapes, lr: float) -> tuple[list[LinkRow], str | None]:
    """Sync over each emulated link, then compute the faster ones.

    Returns:
        The rows, and why nothing could be measured, if so.

    Raises:
        RoseError: A process failed or bits differed.
    """
    reason = why_unavailable()
    if reason is not None:
        return [], reason
    is_whole = shapes.sampled_fraction == 1.0
    setup = WorkerSetup(
        model=settings.model,
        tensors=() if is_whole else tuple(spec.name for spec in shapes.tensors),
        lr=lr,
        seed=settings.seed,
        targets=",".join(map(str, settings.targets)),
        num_sources=settings.num_sources,
        host=NamespacePair.addresses["a"],
    )
    rows, paper = [], None
    for gbps in settings.link_gbps:
        found = _measure(setup, gbps)
        rows.append(_row(gbps, found, shapes))
        paper = found.paper
    return [*rows, *computed_rows(rows, paper, COMPUTED_GBPS)], None


def _measure(setup: WorkerSetup, gbps: float) -> _Measured:
    with NamespacePair(rate_gbps=gbps or None) as pair, contextlib.ExitStack() as stack:
        trainer, serving = (stack.enter_context(_started(pair, side, role)) for side, role in _SIDES)
        plain = attrs.asdict(setup)
        trainer.ask("setup", **plain)
        drawn = trainer.answer()
        serving.call("setup", **plain, address=drawn["address"])
        probe_gbps = median(serving.call("probe")["gbps"] for _ in range(_NUM_RUNS))
        syncs = [_sync(trainer, serving, n) for n in range(_FIRST_N, _FIRST_N + _NUM_RUNS + 1)][1:]
        encodes, decodes = [], []
        for n in range(_FIRST_N + _NUM_RUNS + 1, _FIRST_N + 2 * _NUM_RUNS + 1):
            published = trainer.call("publish")
            encodes.append(published["visible_s"] - published["began_s"])
            local = serving.call("local", n=n)
            decodes.append(local["stage_s"] + local["activate_s"])
        papers = [_paper(trainer, serving, index) for index in range(_NUM_RUNS)]
    return _Measured(
        probe_gbps=probe_gbps,
        syncs=tuple(syncs),
        encode_s=median(encodes),
        decode_s=median(decodes),
        bytes_sent=syncs[-1]["bytes_sent"],
        paper=PaperCosts(
            bytes=papers[-1]["bytes"],
            encode_s=median(paper["encode_s"] for paper in papers),
            decode_s=median(paper["decode_s"] for paper in papers),
        ),
        paper_sync_s=median(paper["sync_s"] for paper in papers),
        num_elements=drawn["num_elements"],
    )


_SIDES = (("a", "trainer"), ("b", "serving"))


@contextlib.contextmanager
def _started(pair: NamespacePair, side: Any, role: str) -> Iterator[Worker]:
    process = pair.start(
        side,
        [sys.executable, "-m", "rose.bench.link_worker", role],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    worker = Worker(process, role)
    try:
        yield worker
    finally:
        worker.close()


def _sync(trainer: Worker, serving: Worker, n: int) -> dict[str, Any]:
    """Publish version ``n`` while the serving side waits for it; returns times from the publish's begin."""
    serving.ask("sync", n=n)
    trainer.ask("publish")
    published, taken = trainer.answer(), serving.answer()
    began_s = published["began_s"]
    reads = [(key, size, begin - began_s, end - began_s) for key, size, begin, end in taken["reads"]]
    return {
        "sync_s": taken["ended_s"] - began_s,
        "visible_s": published["visible_s"] - began_s,
        "published_s": published["ended_s"] - began_s,
        "seen_s": taken["seen_s"] - began_s,
        "staged_s": taken["staged_s"] - began_s,
        "pause_s": taken["pause_s"],
        "bytes_sent": sum(size for _, size, _, _ in reads),
        "reads": reads,
    }


def _paper(trainer: Worker, serving: Worker, index: int) -> dict[str, Any]:
    serving.ask("take_paper", index=index)
    trainer.ask("paper")
    sent, taken = trainer.answer(), serving.answer()
    if not taken["bit_exact"]:
        message = "the COO32 baseline's receiver differs from the trainer's bits"
        raise RoseError(message)
    return {
        "bytes": sent["bytes"],
        "encode_s": sent["encoded_s"] - sent["began_s"],
        "decode_s": taken["ended_s"] - taken["taken_s"],
        "sync_s": taken["ended_s"] - sent["began_s"],
    }


def _row(gbps: float, found: _Measured, shapes: Shapes) -> LinkRow:
    middle = sorted(found.syncs, key=lambda sync: sync["sync_s"])[len(found.syncs) // 2]
    shaping = f"shaped to {gbps:g} Gbps by the kernel (token bucket, no delay)" if gbps else "not shaped"
    note = (
        f"measured: two network name spaces on one machine, {shaping}, {found.probe_gbps:.2f} Gbps for one plain read; "
        f"{_sampled(shapes)}; trainer and engines share this machine's cores"
    )
    return LinkRow(
        gbps=gbps or round(found.probe_gbps, 1),
        how="measured",
        note=note,
        sync_s=middle["sync_s"],
        encode_s=found.encode_s,
        decode_s=found.decode_s,
        wire_s=middle["bytes_sent"] * 8 / (found.probe_gbps * 1e9),
        pause_s=middle["pause_s"],
        paper_sync_s=found.paper_sync_s,
        bytes_sent=middle["bytes_sent"],
        spans=_spans(middle),
    )


def _sampled(shapes: Shapes) -> str:
    if shapes.sampled_fraction == 1.0:
        return "the whole model"
    return f"a sample of {len(shapes.tensors)} tensors of {len(shapes.layers)} decoder layers, {shapes.sampled_fraction:.1%} of the model, nothing scaled"


def _spans(sync: Mapping[str, Any]) -> tuple[tuple[str, float, float], ...]:
    sends = [("send", begin, end) for key, _, begin, end in sync["reads"] if "/blob-" in key]
    return (
        ("compare, encode", 0.0, sync["visible_s"]),
        ("commit", sync["visible_s"], sync["published_s"]),
        *sends,
        ("stage", sync["seen_s"], sync["staged_s"]),
        ("activate", sync["staged_s"], sync["sync_s"]),
    )
