"""The transport contract on both sides of a collective, with a group of two behind it."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'rose-rl[collective]'")

from rose.backends.collective import CollectiveMember, CollectiveMirror, member_address
from rose.backends.collective.over import OverOrigin
from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError
from rose.interfaces.transport import Transport
from rose.testing import TransportContract


class _OneSide(OverOrigin):
    """One side of a pair, which ends with it; ``get`` is the member's where blobs are to take the collective's way."""

    def __init__(self, side: str) -> None:
        self.store = MemoryTransport()
        self.store.serve()
        self.mirror = CollectiveMirror(self.store)
        self.member = CollectiveMember(**dict(member_address(self.store.address(), [self.mirror.root]).options))
        assert self.mirror.regroup() == 1
        super().__init__(self.member if side == "member" else self.mirror)
        self.get = self.mirror.get if side == "mirror" else self.member.get
        self._is_apart = side == "both"

    def delete(self, keys: Sequence[str]) -> None:
        """Delete, and let the member hear of it: until then it serves what it holds, which is never wrong, only old."""
        super().delete(keys)
        deadline_s = time.monotonic() + 5.0
        while self._is_apart and any(map(self._is_held, keys)) and time.monotonic() < deadline_s:
            time.sleep(0.005)

    def _is_held(self, key: str) -> bool:
        try:
            self.member.get(key)
        except BlobNotFoundError:
            return False
        return True

    def close(self) -> None:
        for part in (self.mirror, self.member, self.store):
            part.close()


@pytest.mark.distributed
class TestMirror(TransportContract):
    def make_transport(self) -> Transport:
        return _OneSide("mirror")


@pytest.mark.distributed
class TestMember(TransportContract):
    def make_transport(self) -> Transport:
        return _OneSide("member")

    def open_second(self, transport: Transport) -> Transport:
        return CollectiveMember(**dict(transport.address().options))


@pytest.mark.distributed
class TestWhatIsPutHereIsReadThere(TransportContract):
    def make_transport(self) -> Transport:
        return _OneSide("both")
