"""A server process ends with its launcher, however that ends."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from rose.backends.sglang_server.lifeline import launcher_mark, wait_for_end

_TIED = """
import sys, time
from rose.backends.sglang_server.lifeline import tie_to_launcher
tie_to_launcher(sys.argv[1])
print("up", flush=True)
time.sleep(60)
"""


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_a_tied_process_ends_with_its_launcher() -> None:
    launcher = sleeper()
    tied = subprocess.Popen([sys.executable, "-c", _TIED, launcher_mark(launcher.pid)], stdout=subprocess.PIPE)
    try:
        assert tied.stdout is not None
        assert tied.stdout.readline() == b"up\n"
        time.sleep(0.2)
        assert tied.poll() is None, "it ends while its launcher lives"
        launcher.kill()
        launcher.wait()
        assert tied.wait(timeout=10) != 0
    finally:
        for process in (launcher, tied):
            process.kill()
            process.wait()
        tied.stdout.close()  # type: ignore[union-attr]


@pytest.mark.parametrize("mark", ["999999999:1", f"{os.getpid()}:0"])
def test_a_launcher_that_is_gone_already_is_not_waited_for(mark: str) -> None:
    """No such process, or another one under the same id."""
    wait_for_end(mark)
