"""The master's start, with a stand-in for the program."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from rose.backends.mooncake import MooncakeMaster, master
from rose.errors import DeadlineExceededError


def stand_in(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_stranger_on_the_port_is_not_taken_for_the_master(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case O01: the port was lost between choosing and binding, and whoever has it would answer a connection."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:
        port = stranger.getsockname()[1]
        monkeypatch.setattr(master, "_find_program", lambda: stand_in(tmp_path / "program", "exec sleep 10"))
        monkeypatch.setattr(master, "_free_ports", lambda _count: [port, port])
        with pytest.raises(DeadlineExceededError, match=f"did not listen on 127.0.0.1:{port}"):
            MooncakeMaster(timeout_s=0.2)


def test_a_process_that_listens_itself_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as own:
        pid = int(Path("/proc/self").resolve().name)
        assert master._is_listening(pid, own.getsockname()[1])
