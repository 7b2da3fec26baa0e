"""KV limits of kvcached over doubles that have its signatures; no GPU is asked for."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from gpu_doubles import doubles
from gpu_doubles.kvcached_model import Kvcached, install
from rose.backends.cuda import KvLimiter, LimitedBlocks
from rose.backends.cuda.kv_limit import check_adapter
from rose.backends.in_flight import InFlight
from rose.errors import BackendUnavailableError, EngineError


@pytest.fixture
def kvcached(monkeypatch: pytest.MonkeyPatch) -> Kvcached:
    model = Kvcached()
    install(model, monkeypatch)
    return model


@pytest.fixture
def in_flight() -> InFlight:
    return InFlight()


@pytest.fixture
def held(kvcached: Kvcached, in_flight: InFlight) -> LimitedBlocks:
    return LimitedBlocks(kvcached.pool, KvLimiter.open(), in_flight)


@pytest.mark.parametrize(
    ("version", "message"), [("0.1.5", "too old.*0.1.6"), ("0.0.9", "too old"), ("0.1.7", "newer than")]
)
def test_versions_outside_the_window_are_refused(
    kvcached: Kvcached, monkeypatch: pytest.MonkeyPatch, version: str, message: str
) -> None:
    install(kvcached, monkeypatch, version)
    with pytest.raises(BackendUnavailableError, match=rf"kvcached {version} is {message}.*memory='sleep'"):
        KvLimiter.open()


@pytest.mark.parametrize("version", ["0.1.6", "0.1.6.post1", "0.1.6+cu130"])
def test_versions_inside_the_window_are_taken(
    kvcached: Kvcached, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    install(kvcached, monkeypatch, version)
    assert KvLimiter.open().limit(80).is_applied


def test_an_interface_that_changed_is_refused(kvcached: Kvcached, monkeypatch: pytest.MonkeyPatch) -> None:
    control: Any = sys.modules["kvcached.control"]
    monkeypatch.setattr(control, "set_instance_memory_limit", lambda limit_bytes, generation: None)
    with pytest.raises(BackendUnavailableError, match="takes limit_bytes, generation where"):
        KvLimiter.open()
    monkeypatch.setitem(sys.modules, "kvcached.control", ModuleType("kvcached.control"))
    with pytest.raises(BackendUnavailableError, match="too old"):
        KvLimiter.open()
    monkeypatch.setitem(sys.modules, "kvcached.control", None)
    with pytest.raises(BackendUnavailableError, match=r"does not import.*memory='sleep'"):
        KvLimiter.open()


def test_a_vllm_without_an_adapter_is_refused(kvcached: Kvcached) -> None:
    check_adapter("0.30.1")
    with pytest.raises(BackendUnavailableError, match=r"no adapter for vLLM 0.32.0 .*>=0.29.0,<0.31.0.*memory='sleep'"):
        check_adapter("0.32.0")
    with pytest.raises(BackendUnavailableError, match=r"vLLM 0\.28\.0"):
        check_adapter("0.28.0")


@pytest.mark.parametrize("module", ["kvcached.integration.vllm.patches", "kvcached.integration.version_utils"])
def test_adapters_that_are_not_there_are_our_error(
    kvcached: Kvcached, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(BackendUnavailableError, match="not where they were"):
        check_adapter("0.30.0")


def test_every_status_of_the_library_is_known(kvcached: Kvcached) -> None:
    """A status that a later version adds must not pass as success."""
    assert set(doubles.statuses()) == {"applied", "conflict", "deferred", "rejected", "stale", "unavailable"}
    assert set(doubles.statuses("kv_cache_manager.py")) < set(doubles.statuses())
    kvcached.status = "something new"
    with pytest.raises(EngineError, match="something new"):
        KvLimiter.open().limit(80)


def test_limits_have_growing_revisions_above_what_pools_have_seen(kvcached: Kvcached) -> None:
    kvcached.set_limit(200, revision=41)
    limiter = KvLimiter.open()
    assert limiter.limit(80).is_applied
    assert limiter.limit(120).effective_bytes == 120
    assert kvcached.calls[1:] == [(80, 42), (120, 43)]


def test_a_limit_that_was_overtaken_is_made_once_more(kvcached: Kvcached) -> None:
    limiter = KvLimiter.open()
    limiter.limit(80)
    kvcached.set_limit(200, revision=9)
    assert limiter.limit(120).is_applied
    assert kvcached.calls[-2:] == [(120, 1 + 1), (120, 10)]
    kvcached.status = "stale"
    with pytest.raises(EngineError, match=r"'stale'.*another writer set 120 bytes at revision 10.*only one"):
        limiter.limit(160)
    assert len(kvcached.calls) == 6, "one more attempt and no loop"


def test_a_conflict_names_the_other_writer(kvcached: Kvcached) -> None:
    limiter = KvLimiter.open()
    limiter.limit(80)
    kvcached.set_limit(200, revision=2)
    with pytest.raises(EngineError, match=r"'conflict'.*revision 2: another writer set 200 bytes at revision 2"):
        limiter.limit(120)


@pytest.mark.parametrize(
    ("status", "message"), [("rejected", "restart the engine"), ("unavailable", "ENABLE_KVCACHED=true")]
)
def test_a_refused_limit_says_what_to_do(kvcached: Kvcached, status: str, message: str) -> None:
    kvcached.status = status
    with pytest.raises(EngineError, match=rf"'{status}'.*why.*{message}"):
        KvLimiter.open().limit(80)


def test_what_the_library_raises_is_ours(kvcached: Kvcached) -> None:
    kvcached.failure = ValueError("cannot resize a pool with quarantined pages")
    with pytest.raises(EngineError, match="ValueError: cannot resize"):
        KvLimiter.open().limit(80)


def test_an_engine_on_vllm_s_own_pool_is_refused(kvcached: Kvcached, in_flight: InFlight) -> None:
    with pytest.raises(EngineError, match=r"SimpleNamespace.*ENABLE_KVCACHED=true KVCACHED_AUTOPATCH=1"):
        LimitedBlocks(SimpleNamespace(num_gpu_blocks=4), KvLimiter.open(), in_flight)


def test_a_cut_of_free_blocks_is_in_force_at_once(kvcached: Kvcached, held: LimitedBlocks) -> None:
    kvcached.use(1, 2, 3, 4)
    assert (held.num_blocks, held.num_used) == (31, 4)
    assert held.resize(16) == 0
    assert (held.num_held, kvcached.capacity, kvcached.in_shrink) == (16, 4, False)
    assert held.num_bytes_given == 160
    assert held.resize(0) == 0
    assert (held.num_held, kvcached.capacity) == (0, 8)


def test_cached_prefixes_go_before_requests(kvcached: Kvcached, held: LimitedBlocks) -> None:
    kvcached.use(*range(1, 24))
    kvcached.end(*range(4, 16), is_cached=True)
    assert held.num_used == 11
    assert held.resize(20) == 0, "three pages of the six hold nothing but cached prefixes"
    assert (kvcached.capacity, held.num_used, held.num_held) == (3, 11, 20)
    assert "evict 12" in kvcached.log


def test_what_requests_hold_beyond_it_is_missing_until_they_end(kvcached: Kvcached, held: LimitedBlocks) -> None:
    kvcached.use(*range(1, 24))
    assert held.resize(20) == 12, "three pages too many"
    assert (held.num_held, kvcached.in_shrink) == (8, True)
    kvcached.end(*range(12, 24))
    assert held.resize(20) == 0
    assert (held.num_held, kvcached.capacity) == (20, 3)


def test_pages_that_wait_for_batches_in_flight_end_no_request(
    kvcached: Kvcached, held: LimitedBlocks, in_flight: InFlight
) -> None:
    kvcached.manager.defer_physical_release = True
    in_flight.launch("batch", is_charged=True)
    kvcached.use(*range(1, 24))
    assert held.resize(20) == 12
    kvcached.end(*range(12, 24))
    assert held.resize(20) == 0, "the victims' pages are retired: no further request need go"
    assert kvcached.in_shrink, "they are still mapped"
    assert not [line for line in kvcached.log if line.startswith("barrier")], "its own step lets them go"
    in_flight.land("batch")
    held.settle()
    assert kvcached.log[-1] == "barrier, 3 pages"
    assert (kvcached.capacity, kvcached.in_shrink) == (3, False)
    held.settle()
    assert len([line for line in kvcached.log if line.startswith("barrier")]) == 1


def test_an_idle_engine_lets_pages_go_at_once(kvcached: Kvcached, held: LimitedBlocks) -> None:
    kvcached.manager.defer_physical_release = True
    kvcached.use(*range(1, 24))
    kvcached.end(*range(4, 24), is_cached=True)
    assert held.resize(24) == 0
    assert (kvcached.capacity, held.num_used) == (2, 3)


def test_pages_kept_ready_are_given_while_a_cut_waits(kvcached: Kvcached, held: LimitedBlocks) -> None:
    kvcached.num_reserved = 2
    assert held.resize(8) == 0
    assert kvcached.num_reserved == 2, "they are within the limit"
    kvcached.use(*range(1, 24))
    assert held.resize(24) > 0
    assert (kvcached.num_reserved, kvcached.log[-1]) == (0, "trim")


def test_a_sleeping_engine_keeps_the_null_block_s_page(kvcached: Kvcached, held: LimitedBlocks) -> None:
    held.hold_every_page()
    assert (kvcached.capacity, kvcached.in_shrink, held.num_held) == (1, False, 31)
    with held.lent():
        assert held.num_held == 31
