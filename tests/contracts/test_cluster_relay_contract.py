"""The transport contract on a cluster's relay: in process, as its engines see it, and over an origin that cannot wait."""

from __future__ import annotations

from rose.backends.memory import MemoryTransport, StoreServer
from rose.interfaces.transport import Transport
from rose.testing import FaultyTransport, TransportContract
from rose.transfer.cluster import ClusterRelay


class _ServedRelay(ClusterRelay):
    """A relay that closes its server and its origin with itself."""

    def __init__(self, origin: Transport) -> None:
        super().__init__(origin, max_bytes=64 << 20)
        self.origin = origin
        self.server = StoreServer(self, "127.0.0.1", 0, is_public=False)
        self.advertise(self.server.address())

    def close(self) -> None:
        self.server.close()
        super().close()
        self.origin.close()


class _Engine(MemoryTransport):
    """What an engine of the cluster holds; it closes the relay with itself."""

    def __init__(self) -> None:
        self.relay = _ServedRelay(MemoryTransport())
        super().__init__(**dict(self.relay.address().options))

    def close(self) -> None:
        super().close()
        self.relay.close()


class _FarRelay(_ServedRelay):
    """A relay whose origin is reached over TCP."""

    def __init__(self) -> None:
        self.owner = MemoryTransport()
        super().__init__(MemoryTransport(**dict(self.owner.serve().options)))

    def close(self) -> None:
        super().close()
        self.owner.close()


class TestRelayInProcess(TransportContract):
    def make_transport(self) -> Transport:
        return _ServedRelay(MemoryTransport())


class TestRelaySeenByAnEngine(TransportContract):
    def make_transport(self) -> Transport:
        return _Engine()


class TestRelayOverTcp(TransportContract):
    def make_transport(self) -> Transport:
        return _FarRelay()


class TestRelayWithoutMemory(TransportContract):
    """Nothing fits, nothing of it is a version: everything passes through."""

    def make_transport(self) -> Transport:
        relay = _ServedRelay(FaultyTransport(MemoryTransport()))
        relay._memory.max_bytes = 0
        return relay
