"""RDMA options and memory of a GPU, over a double; and that the installed library has the signatures that are used.

The CUDA build has the same binding as the installed one; neither RDMA nor GPU memory has run (docs/gpu.md).
"""

from __future__ import annotations

import ctypes
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rose.backends.mooncake import MooncakeTransport, objects
from rose.backends.mooncake import transport as transport_module
from rose.backends.mooncake.library import load_library
from rose.errors import BackendUnavailableError, BlobNotFoundError, ConfigError, CorruptUpdateError

SIGNATURES = {
    "setup": [
        "local_hostname: str",
        "metadata_server: str",
        "global_segment_size: int",
        "local_buffer_size: int",
        "protocol: str",
        "rdma_devices: str",
        "master_server_addr: str",
    ],
    "register_buffer": ["buffer_ptr: int", "size: int"],
    "unregister_buffer": ["buffer_ptr: int"],
    "put_from": ["key: str", "buffer_ptr: int", "size: int"],
    "get_into": ["key: str", "buffer_ptr: int", "size: int"],
    "remove": ["key: str", "force: bool"],
    "is_exist": ["arg0: str"],
}
"""The first parameters of each call, as the binding's own documentation has them."""


def problems(docs: dict[str, str | None]) -> list[str]:
    """Say which call has no overload that begins as it is called."""
    found = []
    for name, wanted in SIGNATURES.items():
        overloads = re.findall(rf"{name}\(self: [\w.]+, (.*?)\) -> int", docs.get(name) or "")
        heads = [[re.split(r" =", one)[0] for one in each.split(", ")][: len(wanted)] for each in overloads]
        if wanted not in heads:
            found.append(f"{name} takes {heads}, not {wanted}")
    return found


@pytest.fixture
def docs() -> dict[str, str | None]:
    try:
        store = load_library().MooncakeDistributedStore
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    return {name: getattr(store, name, None) and getattr(store, name).__doc__ for name in SIGNATURES}


def test_the_library_has_the_signatures(docs: dict[str, str | None]) -> None:
    assert problems(docs) == []


@pytest.mark.parametrize(
    ("call", "old", "new"), [("setup", "rdma_devices", "devices"), ("get_into", "size", "num_bytes")]
)
def test_a_changed_signature_is_noticed(docs: dict[str, str | None], call: str, old: str, new: str) -> None:
    before = docs[call]
    assert before is not None
    assert old in before
    (problem,) = problems({**docs, call: before.replace(old, new)})
    assert problem.startswith(f"{call} takes")


class Store:
    """Registers, keeps and gives back memory by address, whoever's it is."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.held: dict[str, bytes] = {}
        self.registered: set[int] = set()

    def setup(self, *args: Any) -> int:
        self.log.append(("setup", *args))
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        self.registered.add(address)
        return 0

    def unregister_buffer(self, address: int) -> int:
        self.registered.remove(address)
        return 0

    def put_from(self, key: str, address: int, size: int, config: Any) -> int:
        assert address in self.registered
        self.held.setdefault(key, ctypes.string_at(address, size))
        return 0

    def get_into(self, key: str, address: int, size: int) -> int:
        assert address in self.registered
        if key not in self.held:
            return -704
        ctypes.memmove(address, self.held[key], len(self.held[key]))
        return len(self.held[key])


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Store:
    store = Store()
    library = SimpleNamespace(MooncakeDistributedStore=lambda: store, ReplicateConfig=SimpleNamespace)
    monkeypatch.setattr(objects, "load_library", lambda: library)
    monkeypatch.setattr(objects, "check_reachable", lambda *args: None)
    monkeypatch.setattr(transport_module, "CHUNK_BYTES", 10)
    monkeypatch.setattr(transport_module, "INLINE_BYTES", 4)
    return store


class GpuTensor:
    """As much of a CUDA tensor as is asked of it, over an array."""

    def __init__(self, size: int, itemsize: int = 1) -> None:
        self.memory = np.zeros(size, dtype=f"u{itemsize}")
        self.dtype, self.shape = f"u{itemsize}", (size,)
        self.is_fill_queued = True

    def is_contiguous(self) -> bool:
        return True

    def element_size(self) -> int:
        return self.memory.itemsize

    def numel(self) -> int:
        return self.memory.size

    def data_ptr(self) -> int:
        return self.memory.ctypes.data

    def cpu(self) -> Any:
        """Wait for what is queued: the tensor was made by ``torch.zeros``, say."""
        if self.is_fill_queued:
            self.memory[:] = 0
        self.is_fill_queued = False
        return SimpleNamespace(numpy=lambda: self.memory)

    def __getitem__(self, part: slice) -> Any:
        return SimpleNamespace(cpu=self.cpu)


def open_transport(**options: Any) -> MooncakeTransport:
    return MooncakeTransport(master="m:1", protocol="rdma", retry_s=0.05, **options)


def test_protocol_and_devices_reach_the_library(store: Store) -> None:
    transport = open_transport(rdma_devices="mlx5_0,mlx5_1", segment_bytes=7)
    assert store.log == [("setup", "127.0.0.1", "P2PHANDSHAKE", 7, 16 << 20, "rdma", "mlx5_0,mlx5_1", "m:1")]
    assert dict(transport.address().options) == {"master": "m:1", "protocol": "rdma", "metadata": "P2PHANDSHAKE"}
    with pytest.raises(ConfigError, match="rdma_devices='mlx5_0' needs protocol='rdma'"):
        MooncakeTransport(master="m:1", rdma_devices="mlx5_0")


def test_a_blob_is_read_into_registered_memory_of_a_gpu(store: Store) -> None:
    transport, target = open_transport(), GpuTensor(35)
    transport.put("k", bytes(range(35)))
    scratch = set(store.registered)
    transport.get_into("k", target)
    assert bytes(target.memory) == bytes(range(35))
    assert store.registered == scratch, "what is registered for a transfer is let go after it"


def test_what_cannot_be_read_into_a_gpu_is_refused(store: Store) -> None:
    transport = open_transport()
    transport.put("small", b"abc")
    transport.put("k", bytes(20))
    with pytest.raises(ConfigError, match="'small' has 3 bytes: only one of more than 4"):
        transport.get_into("small", GpuTensor(3))
    for target in (GpuTensor(19), GpuTensor(10, itemsize=2)):
        with pytest.raises(ConfigError, match="'k' has 20 bytes"):
            transport.get_into("k", target)
    with pytest.raises(BlobNotFoundError, match="there is no blob 'none'"):
        transport.get_into("none", GpuTensor(3))
    store.held["chunk/k/1"] = b"\1" * 10
    with pytest.raises(CorruptUpdateError, match="other bytes for 'k'"):
        transport.get_into("k", GpuTensor(20))
