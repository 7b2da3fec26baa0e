"""Two network name spaces and a cable between them, shaped by the kernel. Linux, root, iproute2.

The kernel sends and receives as it would between two machines, at the rate of a token bucket (``tc tbf``) at both ends of the
cable. There is no delay: for that use ``rose.testing.links.LinkProxy``.

Invariants: names carry the process id and a number, so pairs do not meet; what a pair made, it removes on ``close``, and at the end of
the interpreter otherwise; only processes that it started are ended.
"""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
import weakref
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Self

from rose.errors import TransportError

Side = Literal["a", "b"]
_counter = itertools.count()
_BURST_BYTES = 1 << 20
_LATENCY = "50ms"
_COMMAND_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 5.0


class NamespacePair:
    """Two sides, ``a`` and ``b``, that reach each other and nothing else.

    Args:
        rate_gbps: Rate of each direction in 10^9 bits a second, all headers counted; ``None`` is unshaped.

    Attributes:
        addresses: The side's name -> its IPv4 address.

    Raises:
        TransportError: This process may not, or cannot, make them; see ``why_unavailable``.
    """

    addresses = {"a": "10.231.0.1", "b": "10.231.0.2"}  # noqa: RUF012 - never changed; no other network is seen inside

    def __init__(self, *, rate_gbps: float | None) -> None:
        reason = why_unavailable()
        if reason is not None:
            raise TransportError(reason)
        stem = f"rose{os.getpid():x}x{next(_counter)}"
        self._names = {"a": f"{stem}a", "b": f"{stem}b"}
        self._processes: list[subprocess.Popen[Any]] = []
        self._finalizer = weakref.finalize(self, _remove, tuple(self._names.values()), self._processes)
        try:
            self._build(stem, rate_gbps)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def run(self, side: Side, command: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        """Run a command on a side and wait for it; ``options`` go to ``subprocess.run``."""
        return subprocess.run(self._inside(side, command), check=options.pop("check", True), **options)

    def start(self, side: Side, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a command on a side; it is ended by ``close`` at the latest. ``options`` go to ``subprocess.Popen``."""
        process = subprocess.Popen(self._inside(side, command), **options)
        self._processes.append(process)
        return process

    def close(self) -> None:
        """End what was started inside and remove both sides. Idempotent."""
        self._finalizer()

    def _inside(self, side: Side, command: Sequence[str]) -> list[str]:
        return ["ip", "netns", "exec", self._names[side], *command]

    def _build(self, stem: str, rate_gbps: float | None) -> None:
        for name in self._names.values():
            _ip("netns", "add", name)
        cable = {"a": f"{stem}va", "b": f"{stem}vb"}
        _ip("link", "add", cable["a"], "netns", self._names["a"], "type", "veth",
            "peer", "name", cable["b"], "netns", self._names["b"])  # fmt: skip
        for side, name in self._names.items():
            _ip("-n", name, "addr", "add", f"{self.addresses[side]}/30", "dev", cable[side])
            _ip("-n", name, "link", "set", "lo", "up")
            _ip("-n", name, "link", "set", cable[side], "up")
            if rate_gbps is not None:
                _command("tc", "-n", name, "qdisc", "add", "dev", cable[side], "root", "tbf",
                         "rate", f"{round(rate_gbps * 1000)}mbit", "burst", str(_BURST_BYTES), "latency", _LATENCY)  # fmt: skip


def why_unavailable() -> str | None:
    """Return why there can be no pairs here, with what to do; ``None`` where there can."""
    if os.geteuid() != 0:
        return "network name spaces need root; run as root, or use rose.testing.links.LinkProxy"
    missing = [program for program in ("ip", "tc") if shutil.which(program) is None]
    if missing:
        return (
            f"network name spaces need {' and '.join(missing)}; install iproute2, or use rose.testing.links.LinkProxy"
        )
    probe = f"rose{os.getpid():x}probe"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        return f"this machine makes no network name spaces ({done.stderr.strip()}); use rose.testing.links.LinkProxy"
    _ip("netns", "del", probe)
    return None


def _ip(*arguments: str) -> None:
    _command("ip", *arguments)


def _command(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=_COMMAND_TIMEOUT_S)
    if done.returncode:
        message = f"{' '.join(command)} failed: {done.stderr.strip()}"
        raise TransportError(message)


def _remove(names: tuple[str, ...], processes: list[subprocess.Popen[Any]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(_END_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    for name in names:  # the cable goes with either of them
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
