"""A collective's listener when accepting fails for a while."""

from __future__ import annotations

import errno
import socket
import time

from rose.backends.collective import messages
from rose.backends.collective.roster import Roster
from rose.backends.memory import wire


class OutOfDescriptors:
    """A listener whose first calls fail as they do when a process has too many files open."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self.num_failures = listener, 0

    def accept(self):
        if self.num_failures < 2:
            self.num_failures += 1
            raise OSError(errno.EMFILE, "too many open files")
        return self._listener.accept()

    def __getattr__(self, name):
        return getattr(self._listener, name)


def join(roster: Roster) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", roster.port), timeout=5)
    wire.send_frame(connection, roster.token.encode())
    answer = messages.receive(connection)
    assert answer is not None
    assert answer["kind"] == "welcome"
    return connection


def test_members_are_taken_again_after_accepting_failed() -> None:
    roster = Roster("127.0.0.1")
    try:
        roster._listener = flaky = OutOfDescriptors(roster._listener)
        connections = [join(roster), join(roster)]  # the first was accepted by the call that was under way
        assert flaky.num_failures == 2
        assert roster.has_newcomers
        for connection in connections:
            connection.close()
    finally:
        roster.close()


def test_closing_ends_the_listener_at_once() -> None:
    roster = Roster("127.0.0.1")
    began_s = time.monotonic()
    roster.close()
    assert time.monotonic() - began_s < 2
    assert not roster._acceptor.is_alive()
