"""The transport contract on a real Mooncake Store over TCP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rose.backends.mooncake import MooncakeMaster, MooncakeTransport
from rose.backends.mooncake.objects import load_library
from rose.errors import BackendUnavailableError
from rose.interfaces.transport import Transport
from rose.testing import TransportContract


@pytest.fixture(scope="module")
def master_address() -> Iterator[str]:
    try:
        load_library()
        master = MooncakeMaster()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with master:
        yield master.address


@pytest.mark.mooncake
class TestMooncake(TransportContract):
    large_bytes = (64 << 20) + 17  # two chunks and a bit, larger than the staging buffer

    @pytest.fixture(autouse=True)
    def use_master(self, master_address: str) -> None:
        self.master_address = master_address

    def make_transport(self) -> Transport:
        return MooncakeTransport(master=self.master_address, segment_bytes=256 << 20, buffer_bytes=16 << 20)
