"""A ``mooncake_master`` of one's own, on loopback, for tests and jobs on one machine.

Invariants: the process ends with its owner's ``close`` or context; a port lost to another process between choosing and
binding costs one of a bounded number of tries, and whoever took it is never mistaken for the master.
"""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from rose.errors import BackendUnavailableError, DeadlineExceededError, TransportError

_MAX_TRIES = 5
_POLL_S = 0.05
_LISTEN = "0A"


class MooncakeMaster:
    """Starts ``mooncake_master`` (Linux) and waits until it listens.

    Args:
        lease_ttl_ms: How long a read keeps an object from being removed unforced.
        timeout_s: How long one start may take.

    Attributes:
        address: ``host:port`` for ``MooncakeTransport(master=...)``.

    Raises:
        BackendUnavailableError: The program is not installed.
        TransportError: It does not start, even on other ports.
        DeadlineExceededError: It starts but does not listen in time.
    """

    def __init__(self, *, lease_ttl_ms: int = 5000, timeout_s: float = 30.0) -> None:
        self._program = _find_program()
        self._lease_ttl_ms = lease_ttl_ms
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._process: subprocess.Popen[bytes] | None = None
        self.address = ""
        self._ports: list[int] = []
        for _ in range(_MAX_TRIES):
            if self._try_start(timeout_s, _free_ports(2)):
                return
        message = f"mooncake_master did not start in {_MAX_TRIES} tries; its last words: {self._last_words()}"
        self.close()
        raise TransportError(message)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close."""
        self.close()

    def kill(self) -> None:
        """End the process at once, as a failing machine does; every blob is lost. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, timeout_s: float = 30.0) -> None:
        """Start an empty master at the same address, where the store's members find it by themselves after some seconds.

        Raises:
            TransportError: It does not start there.
            DeadlineExceededError: It does not listen in time.
        """
        self.kill()
        if not self._try_start(timeout_s, self._ports):
            message = f"mooncake_master did not start again on {self.address}; its last words: {self._last_words()}"
            raise TransportError(message)

    def close(self) -> None:
        """End the process and drop its log. Idempotent."""
        self.kill()
        self._log.close()

    def _try_start(self, timeout_s: float, ports: list[int]) -> bool:
        """Start on these ports; returns whether the process lives and listens."""
        rpc_port, metrics_port = self._ports = ports
        self._process = subprocess.Popen(
            [
                self._program,
                f"--rpc_port={rpc_port}",
                "--rpc_address=127.0.0.1",
                f"--metrics_port={metrics_port}",
                "--metrics_host=127.0.0.1",
                f"--default_kv_lease_ttl={self._lease_ttl_ms}",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        self.address = f"127.0.0.1:{rpc_port}"
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            if _is_listening(self._process.pid, rpc_port):
                return True
            if time.monotonic() > deadline:
                words = self._last_words()
                self.close()
                message = (
                    f"mooncake_master did not listen on {self.address} within {timeout_s} s; its last words: {words}"
                )
                raise DeadlineExceededError(message)
            time.sleep(_POLL_S)
        return False

    def _last_words(self) -> str:
        self._log.seek(0)
        return self._log.read()[-500:].decode(errors="replace")


def _find_program() -> str:
    beside = Path(sys.executable).with_name("mooncake_master")
    found = str(beside) if beside.exists() else shutil.which("mooncake_master")
    if found is None:
        message = "mooncake_master is not installed; pip install 'rose-rl[mooncake]'"
        raise BackendUnavailableError(message)
    return found


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [sock.getsockname()[1] for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _is_listening(pid: int, port: int) -> bool:
    """Tell whether this very process listens there; another one that took the port would answer a connection, too."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    owned = {f"socket:[{row[9]}]" for row in rows if row[3] == _LISTEN and row[1].endswith(f":{port:04X}")}
    try:
        return any(str(fd.readlink()) in owned for fd in Path(f"/proc/{pid}/fd").iterdir())
    except FileNotFoundError:  # a descriptor was closed meanwhile, or the process ended
        return False
