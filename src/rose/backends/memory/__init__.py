"""The memory transport: blobs in one process, served to others over loopback TCP when asked."""

from rose.backends.memory.server import StoreServer
from rose.backends.memory.transport import MemoryTransport

__all__ = ["MemoryTransport", "StoreServer"]
