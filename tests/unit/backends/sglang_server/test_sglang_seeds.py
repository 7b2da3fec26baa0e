"""Seeds inside the server: the hash against a published value, and what reaches the sampler."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rose.backends.sglang_server import seeds

torch = pytest.importorskip("torch")


def murmur3(data: bytes) -> int:
    """MurmurHash3_x86_32 with seed 0 of whole words, one number at a time."""

    def rotated(word: int, bits: int) -> int:
        return (word << bits | word >> (32 - bits)) % 2**32

    found = 0
    for at in range(0, len(data), 4):
        word = int.from_bytes(data[at : at + 4], "little")
        found ^= rotated(word * 0xCC9E2D51 % 2**32, 15) * 0x1B873593 % 2**32
        found = (rotated(found, 13) * 5 + 0xE6546B64) % 2**32
    found ^= len(data)
    found = (found ^ found >> 16) * 0x85EBCA6B % 2**32
    found = (found ^ found >> 13) * 0xC2B2AE35 % 2**32
    return found ^ found >> 16


def ids(*values: int) -> Any:
    return torch.tensor(values, dtype=torch.int64)


def test_the_hash_is_murmur_hash_3_of_seed_position_and_column():
    assert murmur3(b"test") == 0xBA6BD213, "as published"
    rows = [(1, 2**32 - 1, 17), (0xDEADBEEF, 0, 2**31)]
    columns = [0, 5, 319]
    found = seeds.murmur_hash([ids(*word) for word in zip(*rows, strict=True)], ids(*columns))
    assert found.tolist() == [
        [murmur3(b"".join(word.to_bytes(4, "little") for word in (*row, column))) for column in columns] for row in rows
    ]


def test_a_negative_seed_is_hashed_as_the_server_holds_it():
    seed = torch.tensor([-2, 3], dtype=torch.int64).to(torch.uint64)
    found = seeds._hash(None, seed, ids(4, 4), ids(0))
    low, high = (2**64 - 2) % 2**32, (2**64 - 2) >> 32
    assert found[0, 0] == murmur3(b"".join(word.to_bytes(4, "little") for word in (low, high, 4, 0)))


def req(rid: str, seed: int | None) -> Any:
    return SimpleNamespace(rid=rid, sampling_params=SimpleNamespace(sampling_seed=seed))


def info_of(*, need_min_p: bool, device: str = "cpu") -> SimpleNamespace:
    temperatures = SimpleNamespace(device=SimpleNamespace(type=device))
    return SimpleNamespace(need_min_p_sampling=need_min_p, sampling_seed=None, temperatures=temperatures)


def run(batch: Any) -> Any:
    return seeds._run_batch(lambda _scheduler, batch: batch.sampling_info.sampling_seed, None, batch)


def test_every_request_of_a_batch_has_its_seed_or_one_of_its_own():
    info = info_of(need_min_p=False)
    found = run(SimpleNamespace(sampling_info=info, reqs=[req("a", 7), req("b", None), req("c", None)]))
    assert found[0] == 7
    assert len({int(seed) for seed in found}) == 3
    again = run(SimpleNamespace(sampling_info=info, reqs=[req("b", None), req("a", 7)]))
    assert again.tolist() == [int(found[1]), 7], "the same on every rank, in every batch"


def test_a_batch_that_the_seeded_sampler_cannot_draw_from_keeps_the_other_one():
    info = info_of(need_min_p=True)
    assert run(SimpleNamespace(sampling_info=info, reqs=[req("a", 7)])) is None


def test_draws_follow_the_distribution():
    """Gumbel noise made of the hash, as SGLang makes it: frequencies over many seeds are the probabilities."""
    probabilities = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    num = 4000
    hashed = seeds._hash(None, torch.arange(num).to(torch.uint64), torch.full((num,), 9), torch.arange(3))
    noise = -torch.log(-torch.log((hashed.double() / 2**32).clamp(1e-12, 1 - 1e-12)))
    drawn = torch.argmax(noise + probabilities.log(), dim=1)
    assert torch.bincount(drawn, minlength=3) / num == pytest.approx(probabilities, abs=0.03)


def test_nothing_is_hooked_unless_it_is_asked_for(monkeypatch):
    monkeypatch.delenv(seeds.SWITCH, raising=False)
    seeds.install(None)  # a registry would be used


def test_a_batch_on_another_device_is_left_to_sglang():
    assert run(SimpleNamespace(sampling_info=info_of(need_min_p=False, device="cuda"), reqs=[req("a", 7)])) is None
