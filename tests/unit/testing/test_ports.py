from __future__ import annotations

import contextlib
import random
import socket
from pathlib import Path

import pytest

from rose.testing import ports
from rose.testing.ports import ephemeral_range, free_ports


def listen(port: int) -> socket.socket:
    return socket.create_server(("127.0.0.1", port))


def set_range(monkeypatch: pytest.MonkeyPatch, folder: Path, text: str) -> None:
    path = folder / "ip_local_port_range"
    path.write_text(text)
    monkeypatch.setattr(ports, "_RANGE_FILE", path)


def test_ports_differ_can_be_listened_on_and_are_no_connections():
    found = free_ports(50)
    low, high = ephemeral_range()
    assert len(set(found)) == 50
    assert all(not low <= port <= high for port in found)
    with contextlib.ExitStack() as stack:
        for port in found:
            stack.enter_context(listen(port))


@pytest.mark.parametrize("is_listening", [True, False])
def test_a_taken_port_is_passed_by(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *, is_listening: bool):
    (port,) = free_ports(1)
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", port))
        if is_listening:
            taken.listen()
        monkeypatch.setattr(ports, "_FIRST", port - 20)
        set_range(monkeypatch, tmp_path, f"{port + 1}\t60999\n")
        for _ in range(10):
            assert port not in free_ports(1)
        with pytest.raises(OSError, match=f"21 free ports were asked for, but of {port - 20}-{port} only"):
            free_ports(21)


def test_ports_above_the_range_when_there_is_no_room_below(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    set_range(monkeypatch, tmp_path, "1024\t64999\n")
    assert all(65_000 <= port <= 65_535 for port in free_ports(5))


def test_a_range_that_leaves_none_is_drawn_from(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    set_range(monkeypatch, tmp_path, "1024\t65535\n")
    assert all(10_000 <= port <= 65_535 for port in free_ports(5))


def test_more_than_there_are_is_one_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(ports, "_FIRST", 65_500)
    set_range(monkeypatch, tmp_path, "1024\t65530\n")
    with pytest.raises(OSError, match="100000 free ports were asked for, but of 65500-65535 only"):
        free_ports(100_000)


@pytest.mark.parametrize("text", [None, "", "32768\n", "some\tports\n"])
def test_a_range_that_cannot_be_read_is_the_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None):
    set_range(monkeypatch, tmp_path, text or "")
    if text is None:
        (tmp_path / "ip_local_port_range").unlink()
    assert ephemeral_range() == (32_768, 60_999)


def test_a_seeded_program_draws_anew():
    drawn = []
    for _ in range(2):
        random.seed(1)
        drawn.append(free_ports(4))
    assert drawn[0] != drawn[1]
