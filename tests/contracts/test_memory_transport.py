"""The transport contract on the memory transport: owner in process, and client of a served store."""

from __future__ import annotations

from rose.backends.memory import MemoryTransport
from rose.interfaces.transport import Transport
from rose.testing import TransportContract


class TestLocal(TransportContract):
    def make_transport(self) -> Transport:
        return MemoryTransport()


class TestServed(TransportContract):
    """Here ``transport`` is the owner and ``open_second`` a client over TCP."""

    def make_transport(self) -> Transport:
        transport = MemoryTransport()
        transport.serve()
        return transport


class _Client(MemoryTransport):
    """A client that closes its owner with itself."""

    def __init__(self) -> None:
        self.owner = MemoryTransport()
        super().__init__(**dict(self.owner.serve().options))

    def close(self) -> None:
        super().close()
        self.owner.close()


class TestClient(TransportContract):
    def make_transport(self) -> Transport:
        return _Client()
