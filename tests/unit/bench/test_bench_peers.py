from __future__ import annotations

import attrs
import numpy as np
import pytest

from rose.bench.peers import PeerFigures, fill_buckets, measure, peers
from rose.errors import RoseError

PEERS = {peer.name: peer for peer in peers()}


def pair(shape, fraction, dtype=np.uint16, seed=0):
    rng = np.random.default_rng(seed)
    old = rng.integers(0, np.iinfo(dtype).max, size=shape, dtype=dtype)
    new = old + (rng.random(shape) < fraction).astype(dtype)
    return old, new


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.3, 1.0])
def test_every_peer_restores_the_bits(name, fraction):
    """``measure`` itself compares; sizes are no multiple of a block, and gaps need escapes."""
    tensors = {"a": (37, 301), "b": (1024,), "c": (5,), "d": (3000,)}
    pairs = {key: pair(shape, fraction, seed=i) for i, (key, shape) in enumerate(tensors.items())}
    pairs["e"] = pair((700,), fraction, np.uint32)
    new, old = {key: both[1] for key, both in pairs.items()}, {key: both[0] for key, both in pairs.items()}
    figures = measure(PEERS[name], new, old)
    assert figures.encode_s > 0
    assert figures.decode_s > 0


def test_sizes_are_what_the_schemes_say():
    old = np.zeros(4096, dtype=np.uint16)
    new = old.copy()
    new[[5, 2000]] = 1
    found = {name: measure(peer, {"a": new}, {"a": old}).bytes for name, peer in PEERS.items()}
    assert found["full"] == 8192
    assert found["coo32"] == 2 * 6
    assert found["blocks"] == 8 + 2 * 4 + 2 * 2048
    assert found["xor_zstd1"] < 64
    assert found["gap_value_zstd1"] < 64


def test_a_peer_that_loses_a_change_is_refused():
    lossy = attrs.evolve(PEERS["full"], apply=lambda payload, target: None)
    with pytest.raises(RoseError, match=r"a sent by full differs from the sender's bits"):
        measure(lossy, {"a": np.ones(3, dtype=np.uint16)}, {"a": np.zeros(3, dtype=np.uint16)})


def test_buckets_are_full_ones_in_order():
    assert fill_buckets([b"aa", b"b", b"ccc", b"d"], 3) == [b"aab", b"ccc", b"d"]
    assert fill_buckets([b"aa", b"b"], 0) == [b"aa", b"b"]
    assert fill_buckets([], 3) == []


@pytest.mark.parametrize("bucket_bytes", [1, 7, 20, 1 << 20])
def test_payloads_survive_any_bucket(bucket_bytes):
    scheme = attrs.evolve(PEERS["coo32"], bucket_bytes=bucket_bytes)
    pairs = {str(i): pair((40,), 0.1 * (i % 3), seed=i) for i in range(12)}
    figures = measure(scheme, {k: both[1] for k, both in pairs.items()}, {k: both[0] for k, both in pairs.items()})
    assert isinstance(figures, PeerFigures)
