"""Catching up: deltas or an anchor, whichever is fewer bytes."""

from __future__ import annotations

import pytest
from transfer_rig import Rig

from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError, CorruptUpdateError
from rose.interfaces.trainer import TensorSpec
from rose.transfer.relay import current_version, manifest_key, plan_update, version_of_key
from rose.types import WeightVersion

SPECS = [TensorSpec(name="w", shape=(4000,), dtype="bfloat16")]


def _plan(rig: Rig, known: int | None) -> list[str]:
    update = plan_update(rig.store, None if known is None else WeightVersion("run", known))
    assert update is not None
    assert update.target == current_version(rig.store)
    assert update.address == rig.store.address()
    parts = [key.split("/") for key in update.manifest_keys]
    return [n if what == "manifest" else f"{n}/{what}" for _, n, _, what in parts]


def test_nothing_to_do() -> None:
    rig = Rig()
    assert plan_update(rig.store, None) is None
    assert current_version(rig.store) is None
    rig.publish()
    assert plan_update(rig.store, WeightVersion("run", 0)) is None


def test_deltas_while_they_are_fewer_bytes() -> None:
    """Sixteen small deltas are less than an anchor; with large ones the engine behind takes the anchor of its past."""
    rig = Rig(specs=SPECS)
    for _ in range(6):
        rig.publish()
        rig.step(0.01)
    assert _plan(rig, 1) == ["2", "3", "4", "5"]
    assert _plan(rig, 4) == ["5"]
    assert _plan(rig, None) == ["0", "1", "2", "3", "4", "5"]


def test_the_anchor_once_the_deltas_weigh_more() -> None:
    rig = Rig(specs=SPECS)
    for n in range(5):
        rig.publish(anchor=n == 3)
        rig.step(0.5)
    assert _plan(rig, 2) == ["3", "4"]
    assert _plan(rig, 1) == ["3/anchor", "4"]
    assert _plan(rig, 0) == ["3/anchor", "4"]
    assert _plan(rig, 3) == ["4"]


def test_another_run_or_a_version_ahead_gets_the_anchor() -> None:
    rig = Rig(specs=SPECS)
    for _ in range(2):
        rig.publish()
        rig.step(0.01)
    update = plan_update(rig.store, WeightVersion("other", 1))
    assert update is not None
    assert update.manifest_keys[0] == "run/0/0/manifest"
    assert _plan(rig, 9) == ["0", "1"]


def test_retired_deltas_lead_to_the_anchor() -> None:
    rig = Rig(specs=SPECS, anchor_every=3, keep=1)
    for _ in range(5):
        rig.publish()
        rig.step(0.01)
    assert _plan(rig, 0) == ["3/anchor", "4"]
    assert _plan(rig, 3) == ["4"]


def test_a_version_retired_in_mid_look_up_is_reported() -> None:
    rig = Rig(specs=SPECS)
    for _ in range(3):
        rig.publish()
        rig.step(0.01)
    rig.store.delete(["run/1/1/manifest"])
    with pytest.raises(BlobNotFoundError, match="ask again"):
        plan_update(rig.store, None)
    assert _plan(rig, 1) == ["2"]


@pytest.mark.parametrize("is_gone", [True, False])
@pytest.mark.parametrize("key", ["run/0/0/manifest", "run/1/1/manifest"])
def test_what_is_lost_in_the_past_does_not_stop_who_needs_it_not(key: str, *, is_gone: bool) -> None:
    """The only anchor, or an old delta, is gone or damaged: engines that know version 1 or later go on by deltas."""
    rig = Rig(specs=SPECS)
    for _ in range(4):
        rig.publish()
        rig.step(0.01)
    if is_gone:
        rig.store.delete([key])
    else:
        rig.store._store._blobs[key] = b"damaged"
    assert _plan(rig, 1) == ["2", "3"]
    assert _plan(rig, 2) == ["3"]
    with pytest.raises(BlobNotFoundError, match="ask again"):
        plan_update(rig.store, None)


def test_a_damaged_delta_in_the_middle_is_passed_by_an_anchor() -> None:
    rig = Rig(specs=SPECS)
    for n in range(5):
        rig.publish(anchor=n == 3)
        rig.step(0.01)
    rig.store._store._blobs["run/2/2/manifest"] = b"damaged"
    assert _plan(rig, 1) == ["3/anchor", "4"]
    assert _plan(rig, 0) == ["3/anchor", "4"]
    assert _plan(rig, 2) == ["3", "4"]


def test_the_newest_manifest_itself_cannot_be_done_without() -> None:
    rig = Rig(specs=SPECS)
    rig.publish()
    rig.store._store._blobs["run/0/0/manifest"] = b"damaged"
    with pytest.raises(CorruptUpdateError):
        plan_update(rig.store, None)


def test_keys_name_their_version() -> None:
    version = WeightVersion("a.b-c_1", 12)
    assert version_of_key(manifest_key(version, 3)) == version


def test_two_jobs_share_a_store_by_pointers() -> None:
    store = MemoryTransport()
    Rig(store=store, run="a", pointer="job-a").publish()
    Rig(store=store, run="b", pointer="job-b").publish()
    assert current_version(store, pointer="job-a") == WeightVersion("a", 0)
    assert plan_update(store, None, pointer="job-b").target == WeightVersion("b", 0)
