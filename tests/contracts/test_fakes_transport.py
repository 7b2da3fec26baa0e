"""A faulty transport without faults is as good as the one inside it."""

from __future__ import annotations

from rose.testing import FaultyTransport, InMemoryTransport, TransportContract


class TestFaultyTransportWithoutFaults(TransportContract):
    def make_transport(self):
        return FaultyTransport(InMemoryTransport())
