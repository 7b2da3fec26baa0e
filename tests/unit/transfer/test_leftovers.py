"""What stays in the store when a publish, an answer or a deletion fails: nothing that is needed goes, nothing else stays."""

from __future__ import annotations

import pytest
from transfer_rig import ArrayTrainer, Rig, bf16, publish_together

from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError, CorruptUpdateError, TransferError, TransportError
from rose.testing import FaultyTransport, TransportFault, TransportFaultKind
from rose.transfer.attempt import Attempt, announce_failure
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import current_version, plan_update
from rose.types import WeightVersion


def held_versions(store: MemoryTransport, run: str = "run") -> set[str]:
    """Return the versions of a run of which something is there; the cell map is of no version."""
    return {key.split("/")[1] for key in store._store._blobs if key.startswith(f"{run}/")} - {"cells"}


class DeafToFailures(FaultyTransport):
    """A rank that never hears that another one failed, as when it has looked just before."""

    def get(self, key):
        if key.endswith("/failed"):
            message = "not heard"
            raise BlobNotFoundError(message)
        return self.inner.get(key)


def test_an_anchor_whose_answer_was_lost_is_the_one_that_later_versions_name() -> None:
    """Rank 0 does not see the version with the anchor succeed, and with it the one before goes; late joiners must find the new one."""
    store = MemoryTransport()
    lost = TransportFault(kind=TransportFaultKind.LOSE_ANSWER, method="compare_and_set", key="current", call_index=None)
    first = FaultyTransport(store)
    rig = Rig(world_size=2, store=store, transports=[first, DeafToFailures(store)], keep=1, anchor_every=2)
    for _ in range(2):
        rig.publish()
        rig.step()
    first.faults = [lost]
    outcome = publish_together(rig.publishers)
    assert isinstance(outcome[0], TransportError)
    assert isinstance(outcome[1], PublishReport), "the version with the anchor is visible"
    first.faults = []
    rig.step()
    rig.publish()
    assert held_versions(store) == {"2", "3"}, "the first anchor is gone"
    late = rig.follow()
    late.sync()
    late.assert_current()


def test_what_a_failed_attempt_decided_to_delete_goes_with_the_next_one() -> None:
    store = MemoryTransport()
    path = FaultyTransport(store)
    rig = Rig(world_size=1, store=store, transports=[path], keep=1, anchor_every=1)
    for n in range(5):
        is_failing = n == 2
        path.faults = [TransportFault(kind=TransportFaultKind.FAIL, method="compare_and_set")] if is_failing else []
        (outcome,) = publish_together(rig.publishers)
        assert isinstance(outcome, TransportError) == is_failing
        rig.step()
    assert held_versions(store) == {"3"}


@pytest.mark.parametrize("failing", range(5))
def test_an_old_run_goes_whole_though_deleting_it_is_interrupted(failing: int) -> None:
    """With an anchor beside changes in the middle; whichever deletion fails, half of its keys being gone."""

    class Interrupted(FaultyTransport):
        num_deletes = 0

        def delete(self, keys):
            if any(key.startswith("a/") for key in keys):
                self.num_deletes += 1
                if self.num_deletes == failing:
                    self.inner.delete(keys[: len(keys) // 2 + 1])
                    message = "the link went down"
                    raise TransportError(message)
            self.inner.delete(keys)

    store = MemoryTransport()
    old = Rig(store=store, run="a", world_size=1, keep=9)
    for n in range(4):
        old.publish(anchor=n == 2)
        old.step()
    new = Rig(store=store, run="b", world_size=1, transports=[Interrupted(store)])
    for _ in range(4):
        new.publish()
        new.step()
    assert not [key for key in store._store._blobs if key.startswith("a/")]


def test_an_old_version_that_is_damaged_in_the_store_does_not_stop_the_others(caplog) -> None:
    """Deleting may need to read what is deleted; the version is visible by then."""

    class Damaged(FaultyTransport):
        def delete(self, keys):
            if any(key.startswith("run/0/") for key in keys):
                message = "no claim"
                raise CorruptUpdateError(message)
            self.inner.delete(keys)

    store = MemoryTransport()
    rig = Rig(world_size=1, store=store, transports=[Damaged(store)], keep=1, anchor_every=1)
    for n in range(4):
        assert rig.publish().version.n == n
        rig.step()
    assert held_versions(store) == {"0", "3"}
    assert caplog.text.count("left in the store") == 1


def test_a_failure_that_cannot_be_told_hides_no_other_error() -> None:
    class Damaged(FaultyTransport):
        def put(self, key, payload):
            message = f"{key} is damaged"
            raise CorruptUpdateError(message)

    attempt = Attempt(
        version=WeightVersion("r", 0), number=0, pointer_before=None, base_key=None, is_anchor_due=False, deadline_s=0.0
    )
    announce_failure(Damaged(MemoryTransport()), attempt, 0, ValueError("the real one"))


def test_a_pointer_that_names_no_version_is_said_to_be_one() -> None:
    store = MemoryTransport()
    assert store.compare_and_set("current", None, "something else")
    publisher = Publisher(ArrayTrainer({"w": bf16(4)}), store, run="r")
    for read in (lambda: current_version(store), lambda: plan_update(store, None), publisher.publish_sync):
        with pytest.raises(TransferError, match="'something else' is no key of a manifest"):
            read()
