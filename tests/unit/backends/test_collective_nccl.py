"""The NCCL group over a double with the signatures that torch publishes in its stubs; no GPU, no NCCL."""

from __future__ import annotations

import ast
import contextlib
import inspect
import os
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[collective]'")
import torch.distributed as dist

from rose.backends.collective import nccl
from rose.backends.collective.group import Group, host_store
from rose.errors import TransportError

STUB = Path(torch.__file__).parent / "_C" / "_distributed_c10d.pyi"
TIMEOUT = timedelta(seconds=0.3)


def stub_class(path: str, text: str) -> ast.ClassDef:
    body: list[ast.stmt] = ast.parse(text).body
    found: ast.ClassDef | None = None
    for name in path.split("."):
        found = next(one for one in body if isinstance(one, ast.ClassDef) and one.name == name)
        body = found.body
    assert found is not None
    return found


def parameters(path: str, method: str, text: str) -> list[str]:
    """Return the names of a method's parameters as the stub has them, without self."""
    methods = [one for one in stub_class(path, text).body if isinstance(one, ast.FunctionDef) and one.name == method]
    return [one.arg for one in methods[0].args.args if one.arg != "self"]


def problems(text: str) -> list[str]:
    """Say where torch's published interface is not what the NCCL group uses."""
    wanted = {
        ("ProcessGroupNCCL", "__init__"): ["store", "rank", "size", "options"],
        ("ProcessGroupNCCL", "abort"): [],
        ("Work", "is_completed"): [],
        ("Work", "wait"): ["timeout"],
        ("Backend.Options", "_timeout"): [],
    }
    found = []
    for (path, method), names in wanted.items():
        try:
            got = parameters(path, method, text)
        except (IndexError, StopIteration):
            found.append(f"{path}.{method} is gone")
            continue
        if got != names:
            found.append(f"{path}.{method} takes {got}, not {names}")
    options = {
        one.target.id
        for one in stub_class("BroadcastOptions", text).body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    }
    found += [
        f"BroadcastOptions.{name} is gone" for name in ("rootRank", "rootTensor", "timeout") if name not in options
    ]
    return found


def test_torch_has_the_interface_that_is_used() -> None:
    assert problems(STUB.read_text()) == []


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("def is_completed(self)", "def is_done(self)", "Work.is_completed is gone"),
        (
            "        size: int,\n        options: Options,",
            "        options: Options,\n        size: int,",
            "ProcessGroupNCCL.__init__ takes",
        ),
        (
            "    rootTensor: int\n    timeout: timedelta\n    asyncOp",
            "    timeout: timedelta\n    asyncOp",
            "BroadcastOptions.rootTensor is gone",
        ),
    ],
)
def test_a_changed_interface_is_noticed(old: str, new: str, problem: str) -> None:
    text = STUB.read_text()
    assert old in text
    assert any(one.startswith(problem) for one in problems(text.replace(old, new)))


class Link:
    """What connects the doubles of one group: the bytes of rank 0, and how many collectives every rank has joined."""

    def __init__(self) -> None:
        self.sent: list[Any] = []
        self.error: str | None = None
        self.is_hanging = False
        self.environments: list[dict[str, str | None]] = []
        self.num_aborted = 0


class Work:
    def __init__(self, link: Link, *, is_done: bool) -> None:
        self._link, self._is_done = link, is_done

    def is_completed(self) -> bool:
        return self._is_done

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Torch before 2.9 says what a collective failed of only to who gives a limit; else the stream waits, without one."""
        if self._link.error and timeout is not None:
            raise RuntimeError(self._link.error)
        return True


def double(link: Link) -> Any:
    """Return a class with the signatures of ``ProcessGroupNCCL``."""

    class ProcessGroupNCCL:
        class Options:
            _timeout = timedelta(minutes=10)

        def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
            assert options._timeout == TIMEOUT
            self._rank = rank
            names = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_ENABLE_MONITORING")
            link.environments.append({name: os.environ.get(name) for name in names})

        def broadcast(self, tensors: Any, opts: Any) -> Work:
            assert (opts.rootRank, opts.rootTensor, opts.timeout) == (0, 0, TIMEOUT)
            (tensor,) = tensors
            if self._rank == 0:
                link.sent.append(tensor.clone())
            elif link.sent:
                tensor.copy_(link.sent[-1][: tensor.numel()])
            return Work(link, is_done=not link.is_hanging)

        def abort(self) -> None:
            link.num_aborted += 1

    expected = parameters("ProcessGroupNCCL", "__init__", STUB.read_text())
    assert list(inspect.signature(ProcessGroupNCCL).parameters) == expected
    return ProcessGroupNCCL


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Link:
    """Let NCCL be the double, and the CPU a GPU without queues."""
    link = Link()
    stream = SimpleNamespace(synchronize=lambda: None)
    real_empty = torch.empty
    cuda = SimpleNamespace(
        Stream=lambda device: stream,
        stream=lambda one: contextlib.nullcontext(),
        device=lambda one: contextlib.nullcontext(),
        is_initialized=lambda: False,
        current_device=lambda: 0,
    )
    monkeypatch.setattr(dist, "ProcessGroupNCCL", double(link), raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(nccl.torch, "cuda", cuda)
    monkeypatch.setattr(nccl.torch, "empty", lambda size, dtype, **_: real_empty(size, dtype=dtype))
    return link


def group(rank: int, size: int = 2) -> Group:
    store, _ = host_store("127.0.0.1", 1.0)
    seconds = TIMEOUT.total_seconds()
    return Group(store, "g", rank=rank, size=size, backend="nccl", host="127.0.0.1", timeout_s=seconds, device=0)


def test_bytes_go_through_the_staging_blocks(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rose.backends.collective.group.CHUNK_BYTES", 100)
    root, member = group(0), group(1)
    data = np.arange(250, dtype=np.uint8)
    link.sent.clear()
    for start in range(0, 250, 100):  # the ranks take turns, as the double does not wait
        got = np.zeros(min(100, 250 - start), dtype=np.uint8)
        root.broadcast(data[start : start + 100])
        member.broadcast(got)
        assert got.tolist() == data[start : start + 100].tolist()
    assert [one.numel() for one in link.sent] == [100, 100, 50]


def test_the_watchdog_may_not_end_the_process_and_other_groups_keep_theirs(
    link: Link, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    monkeypatch.delenv("TORCH_NCCL_ENABLE_MONITORING", raising=False)
    group(0)
    assert link.environments == [{"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0", "TORCH_NCCL_ENABLE_MONITORING": "0"}]
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "3"
    assert "TORCH_NCCL_ENABLE_MONITORING" not in os.environ


def test_a_peer_that_never_comes_costs_the_timeout(link: Link) -> None:
    link.is_hanging = True
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"group g of 2 did not meet within 0\.3 s"):
        group(0)
    assert time.monotonic() - started < 2.0
    for _ in range(100):
        if link.num_aborted:
            break
        time.sleep(0.01)
    assert link.num_aborted == 1


def test_a_communicator_that_cannot_be_made_is_left_behind(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inside the library, where nothing but time ends it."""
    release = threading.Event()

    def hangs(self: Any, tensors: Any, opts: Any) -> Work:
        release.wait(10.0)
        return Work(link, is_done=True)

    monkeypatch.setattr(dist.ProcessGroupNCCL, "broadcast", hangs)
    started = time.monotonic()
    with pytest.raises(TransportError, match=r"the communicator was not made within 0\.3 s"):
        group(0)
    assert time.monotonic() - started < 2.0
    release.set()
    for thread in threading.enumerate():
        if thread.name == "rose-nccl-connect":
            thread.join(5.0)


def test_a_peer_that_dies_or_freezes_later_fails_the_broadcast(link: Link) -> None:
    root = group(0)
    link.error = "NCCL error: remote process exited"
    with pytest.raises(TransportError, match="failed at byte 0: NCCL error: remote process exited"):
        root.broadcast(np.zeros(5, dtype=np.uint8))
    link.error, link.is_hanging = None, True
    with pytest.raises(TransportError, match=r"a peer did not take part within 0\.3 s"):
        root.broadcast(np.zeros(5, dtype=np.uint8))
    root.close()
    with pytest.raises(TransportError, match="the group is closed"):
        root.broadcast(np.zeros(5, dtype=np.uint8))
