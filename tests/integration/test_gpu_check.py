"""The check for GPUs, rehearsed on the CPU: its parts run, find what is wrong, and are never taken for results of a GPU."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")

from processes import is_running
from rose.backends.torch_weights.sink import DeviceSink
from rose.bench.gpu_check import deltas, memory, page, qwen3, runner, turns
from rose.bench.gpu_check.one import outcome_of
from rose.bench.gpu_check.outcome import FAILED, NOT_RUN, PASSED, Figure, Outcome
from rose.bench.gpu_check.part import Bench, MismatchError, Part
from rose.bench.gpu_check.parts import bench_on, parts
from rose.errors import ConfigError
from rose.transfer import kernels

ROOT = Path(__file__).parents[2]
ALL = {one.name: one for one in parts()}
NEED_A_GPU = {"nccl-refusal", "memory-kvcached", "memory-vllm"}


def bench() -> Bench:
    return bench_on("cpu", is_quick=True)


@pytest.mark.parametrize("name", [name for name in ALL if name not in NEED_A_GPU | {"delta-triton"}])
def test_a_part_runs_over_the_cpu(name: str) -> None:
    outcome = outcome_of(ALL[name], bench())
    assert (outcome.status, outcome.reason) == (PASSED, "")
    assert outcome.figures
    assert Outcome.from_json(json.loads(json.dumps(outcome.to_json()))) == attrs.evolve(
        outcome, figures=list(outcome.figures)
    )


@pytest.mark.parametrize("name", sorted(NEED_A_GPU | {"delta-triton"}))
def test_a_part_that_cannot_run_says_why(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    outcome = outcome_of(ALL[name], bench())
    assert outcome.status == NOT_RUN
    assert "needs a GPU" in outcome.reason or "not installed: triton" in outcome.reason
    assert not outcome.figures


def test_without_a_gpu_one_clear_line_and_no_record(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(runner, "_DRIVER", tmp_path / "none")
    assert runner.main([]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("gpu-check: no GPU here (torch ")
    assert line.endswith("nothing was run and nothing is recorded")
    assert not list(tmp_path.iterdir())


def test_a_torch_that_does_not_see_the_card_is_no_machine_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """``make env`` installs a CPU build, and then the check would pass on any machine."""
    monkeypatch.setattr(runner, "_DRIVER", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert runner.main([]) == 2
    (line,) = capsys.readouterr().out.splitlines()
    assert "has NVIDIA's driver, but torch" in line
    assert "a CPU build, sees no GPU" in line
    assert "GPU_PYTHON=" in line


@pytest.mark.parametrize("path", [None, "gpu-cpu.json"])
def test_a_rehearsal_gets_no_place_among_results(path: str | None, tmp_path: Path) -> None:
    where = [] if path is None else ["--out", str(tmp_path / path)]
    assert runner.main(["--device", "cpu", "--quick", *where]) == 2
    assert not list(tmp_path.iterdir())


def test_the_script_runs_parts_in_processes_of_their_own(tmp_path: Path) -> None:
    out = tmp_path / "rehearsal.json"
    command = [sys.executable, "tools/gpu_check.py", "--device", "cpu", "--quick", "--out", str(out)]
    done = subprocess.run(
        [*command, "--only", "copies", "publish", "memory-vllm"],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": "src"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(out.read_text())
    assert document["is_rehearsal"] is document["is_quick"] is True
    assert [(part["name"], part["status"]) for part in document["parts"]] == [
        ("copies", PASSED),
        ("publish", PASSED),
        ("memory-vllm", NOT_RUN),
    ]
    assert {"torch", "numpy"} <= document["versions"].keys()
    assert document["commit"]


@pytest.mark.parametrize("package", ["attrs", "xxhash", "zstandard"])
def test_a_package_that_is_missing_is_named(package: str, tmp_path: Path) -> None:
    (tmp_path / f"{package}.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name='{package}')")
    command = [sys.executable, "tools/gpu_check.py", "--device", "cpu", "--quick", "--out", str(tmp_path / "x.json")]
    environment = {**os.environ, "PYTHONPATH": f"src:{tmp_path}"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    said = f"gpu-check: {package} is not installed here; nothing was run and nothing is recorded\n"
    assert (done.returncode, done.stdout) == (2 if runner._DRIVER.exists() else 0, said), done.stderr


def test_a_clone_builds_what_the_card_is_compared_with(tmp_path: Path) -> None:
    """Nothing was installed there; ``PYTHONPATH=src`` alone has no C kernels."""
    clone = tmp_path / "clone"
    for name in ("src", "tools"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    shutil.copy(ROOT / "hatch_build.py", clone)
    command = [
        sys.executable,
        "tools/gpu_check.py",
        "--device",
        "cpu",
        "--quick",
        "--out",
        "x.json",
        "--only",
        "copies",
    ]
    environment = {**os.environ, "PYTHONPATH": "src", "CC": "echo built, with"}
    done = subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "the C kernels were not built" in done.stderr, "echo builds none, and that is said"


def test_a_part_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path / "x.json"), "--only", "copies", "speed"]
    assert runner.main(arguments) == 2
    assert "there is no part speed, only copies, delta-torch" in capsys.readouterr().out


def test_a_process_that_dies_costs_its_part_alone() -> None:
    outcome = runner._isolated("cpu", is_quick=True)("no such part", "shows nothing", 0.0, 60.0)
    assert (outcome.status, outcome.reason) == (FAILED, "its process ended with exit code 1, without a word")


def test_a_part_that_hangs_leaves_no_process_behind(tmp_path: Path) -> None:
    """Its processes would keep memory and time of the card from the parts after it."""
    child = "import subprocess, sys, time; "
    grandchild = [sys.executable, "-c", "import time; time.sleep(600)"]
    text = f"{child}p = subprocess.Popen({grandchild!r}); open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid)); time.sleep(600)"
    assert runner.end_of([sys.executable, "-c", text], 3.0) == "it had not ended after 3 s"
    pid = int((tmp_path / "pid").read_text())
    deadline_s = time.monotonic() + 10.0
    while is_running(pid):
        assert time.monotonic() < deadline_s, "the process of a process lives on"
        time.sleep(0.01)


def test_the_whole_check_has_a_limit_and_records_as_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    given: list[tuple[str, float, float]] = []
    recorded: list[list[str]] = []

    def run_one(name: str, shows: str, copy_gb_s: float, limit_s: float) -> Outcome:
        given.append((name, copy_gb_s, limit_s))
        now[0] += 100.0
        figures = [Figure(name="copy within the device", value=7.0, unit="GB/s")] if name == "a" else []
        return Outcome(name=name, shows=shows, status=PASSED, figures=figures)

    def record(outcomes: Sequence[Outcome]) -> None:
        recorded.append([one.name for one in outcomes])

    wanted = dict.fromkeys("abcd", "x")
    outcomes = runner.run_parts(wanted, run_one, record, limit_s=310.0, clock=lambda: now[0])
    assert given == [("a", 0.0, 150.0), ("b", 7.0, 150.0), ("c", 7.0, 110.0)]
    assert outcomes[3].reason == "the check had taken 300 s by then"
    assert recorded == [list("a"), list("ab"), list("abc"), list("abcd")]
    assert "a                passed" in capsys.readouterr().out


class Broken(Part):
    name, shows = "broken", "nothing"

    def run(self, bench: Bench) -> Sequence[Figure]:
        message = "bits differ"
        raise MismatchError(message)


def test_a_part_that_fails_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    outcome = outcome_of(Broken(), bench())
    assert (outcome.status, outcome.reason) == (FAILED, "MismatchError: bits differ")
    assert "bits differ" in capsys.readouterr().err


def test_a_wrong_byte_fails_the_delta_path(monkeypatch: pytest.MonkeyPatch) -> None:
    real = deltas.DeviceComparer.compare

    def wrong(self: Any, cells: Any, *, is_overwrite: bool) -> Any:
        for one in real(self, cells, is_overwrite=is_overwrite):
            streams = one.streams
            if streams is None or streams.num_changed < 2:
                yield one
                continue
            codes = bytes(streams.codes)
            yield attrs.evolve(one, streams=attrs.evolve(streams, codes=bytes([codes[0] ^ 1]) + codes[1:]))

    monkeypatch.setattr(deltas.DeviceComparer, "compare", wrong)
    assert "is not coded as on the CPU" in outcome_of(ALL["delta-torch"], bench()).reason
    assert "the blobs differ" in outcome_of(ALL["publish"], bench()).reason


def test_a_write_that_did_not_arrive_fails_the_scatter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceSink, "write_sparse", lambda *args: None)
    assert "not the bits that were written: qkv" in outcome_of(ALL["scatter"], bench()).reason


def test_two_turns_at_once_fail() -> None:
    mine = np.array([[0.0, 0.0, 1.0], [1.0, 3.0, 4.0]])
    theirs = np.array([[0.5, 1.001, 2.5]])
    assert turns._handovers([mine, theirs]).tolist() == [pytest.approx(1000.0), pytest.approx(5e5)]
    theirs[0, 1] = 0.9
    with pytest.raises(MismatchError, match="two processes had the turn at once, for 100000 us"):
        turns._handovers([mine, theirs])
    with pytest.raises(MismatchError, match="neither process ever waited"):
        turns._handovers([mine, np.array([[10.0, 10.0, 11.0]])])


def test_a_process_that_ends_without_a_turn_is_told_at_once(tmp_path: Path) -> None:
    with pytest.raises(MismatchError, match="of 2 processes that take turns one ended with exit code 1"):
        turns._processes(tmp_path / "no such folder" / "device", 2, 1, 8, None)


def test_without_the_c_kernels_small_shapes_are_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """Numpy needs some six minutes for one density of a layer of Qwen3-8B; the whole check has ten."""
    monkeypatch.setattr(deltas, "_NUM_LAYERS", 1)
    seen: list[bool] = []
    shapes = qwen3.layer_shapes

    def noting(*, is_quick: bool) -> dict[str, tuple[int, ...]]:
        seen.append(is_quick)
        return shapes(is_quick=True)

    monkeypatch.setattr(qwen3, "layer_shapes", noting)
    whole = attrs.evolve(bench(), is_quick=False)
    kernels.force("numpy")
    try:
        (proven, *_), (*_, blobs) = ALL["delta-torch"].run(whole), ALL["publish"].run(whole)
    finally:
        kernels.force(None)
    assert (proven.name, blobs.name) == (
        "cells with the CPU codec's bytes and sums (tiny ones: its C kernels are not built)",
        "blobs of the last version (tiny: the C kernels are not built)",
    )
    assert seen.count(False) == 1, "the rate alone is measured on whole layers"


class Card:
    """How much of a card is free, and a pool of kvcached on it: pages that come free stay mapped unless the limit is below them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.limits: list[int] = []
        self.used = self.mapped = 0
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10 * memory._GIB - self.mapped, 0))
        monkeypatch.setattr(Bench, "wait", lambda one: None)
        monkeypatch.setattr(memory, "_kvcached_pool", lambda device: self)
        monkeypatch.setattr(memory, "KvLimiter", SimpleNamespace(open=lambda: self))

    def limit(self, num_bytes: int) -> None:
        self.limits.append(num_bytes)

    def available_size(self) -> int:
        return (self.limits[-1] - self.used) // self.block_bytes

    @property
    def block_bytes(self) -> int:
        return 2 * memory._GIB // memory._NUM_BLOCKS

    def alloc(self, num: int) -> list[int]:
        first = self.used // self.block_bytes
        self.used += num * self.block_bytes
        self.mapped = max(self.mapped, self.used)
        return list(range(first, first + num))

    def free(self, blocks: Sequence[int]) -> None:
        self.used -= len(blocks) * self.block_bytes
        self.mapped = max(self.used, min(self.mapped, self.limits[-1]))


def test_kv_memory_must_really_leave_and_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    card = Card(monkeypatch)
    figures = ALL["memory-kvcached"].run(bench())
    assert [one.is_met for one in figures] == [True, None]
    assert card.limits == [2 * memory._GIB, memory._GIB, 2 * memory._GIB]
    assert card.mapped == card.used == 2 * memory._GIB
    monkeypatch.setattr(memory, "_WAIT_S", 0.01)
    card = Card(monkeypatch)
    card.free = lambda blocks: None  # type: ignore[method-assign]
    with pytest.raises(MismatchError, match="bytes of the card were free"):
        ALL["memory-kvcached"].run(bench())


def test_the_page_is_what_the_records_say() -> None:
    shows = {one.name: one.shows for one in parts()}
    expected = page.page(shows, page.records(ROOT / runner.RESULTS))
    assert (ROOT / page.PAGE).read_text() == expected, "make it anew: PYTHONPATH=src python tools/gpu_check.py --page"
    assert page.WITHOUT_A_GPU.keys() == shows.keys()


def record(**options: Any) -> dict[str, Any]:
    figure = Figure.at_least("rate", 0.25, "", 0.5)
    outcomes = [
        Outcome(name="copies", shows="c", status=PASSED, figures=[Figure(name="copy", value=2000.0, unit="GB/s")]),
        Outcome(name="delta-torch", shows="d", status=PASSED, figures=[figure]),
        Outcome(name="scatter", shows="s", status=FAILED, reason="MismatchError: bits"),
        Outcome(name="memory-vllm", shows="m", status=NOT_RUN, reason="not installed: vllm"),
    ]
    card = {"name": "NVIDIA H200", "type": "cuda", "cuda": "13.0"}
    return {**runner._document(card, outcomes, is_quick=False, is_rehearsal=False), **options}


def test_a_record_changes_the_page() -> None:
    shows = dict.fromkeys(("copies", "delta-torch", "scatter", "memory-vllm", "nccl"), "text")
    text = page.page(shows, [record()])
    assert "No GPU was at hand" not in text
    rows = {line.split(" | ")[0].strip("| `"): line for line in text.splitlines() if line.startswith("| `")}
    assert "| passed on NVIDIA H200 |" in text
    assert "passed on NVIDIA H200, 1 aim missed" in text
    assert "| failed on NVIDIA H200 |" in text
    assert "not run on a GPU (NVIDIA H200: not installed: vllm)" in rows["memory-vllm"]
    assert "| not run on a GPU |" in rows["nccl"]
    assert "| `delta-torch` | rate | 0.25 | at least 0.5: missed |" in text
    assert "`scatter` failed: MismatchError: bits" in text


@pytest.mark.parametrize(
    "options", [{"is_rehearsal": True}, {"schema": "other"}, {"card": {"name": "cpu", "type": "cpu", "cuda": ""}}]
)
def test_what_is_no_record_of_a_gpu_is_refused(options: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "gpu-x.json").write_text(json.dumps(record(**options)))
    with pytest.raises(ConfigError, match=r"gpu-x\.json is no record of a GPU"):
        page.records(tmp_path)


def test_a_cards_name_makes_a_file_name() -> None:
    assert runner.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"
