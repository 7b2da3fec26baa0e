"""Weights over a real Mooncake Store: publish, follow, catch up."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from rose.backends.mooncake import MooncakeMaster, MooncakeTransport
from rose.backends.mooncake.objects import load_library
from rose.errors import BackendUnavailableError
from rose.policies.retention import RetentionConfig
from rose.registry import open_transport
from rose.testing import FakeTrainer
from rose.transfer.publisher import Publisher
from rose.transfer.relay import plan_update
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import WeightVersion

pytestmark = pytest.mark.mooncake


@pytest.fixture(scope="module")
def relay() -> Iterator[MooncakeTransport]:
    try:
        load_library()
        master = MooncakeMaster()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with master:
        transport = MooncakeTransport(master=master.address, segment_bytes=64 << 20, buffer_bytes=16 << 20)
        yield transport
        transport.close()


def test_engines_follow_two_ranks_over_the_relay(relay: MooncakeTransport) -> None:
    """Each engine opens the store from the update's address, as another process would."""
    trainers = FakeTrainer.group(2)
    publishers = [
        Publisher(
            trainer,
            open_transport(relay.address()),
            run="run",
            retention=RetentionConfig(anchor_every=2, keep=1),
            timeout_s=60.0,
        )
        for trainer in trainers
    ]
    sink = ArraySink(trainers[0].tensors())
    subscriber = Subscriber(sink)
    with ThreadPoolExecutor(2) as threads:
        for n in range(5):
            list(threads.map(Publisher.publish_sync, publishers))
            update = plan_update(relay, subscriber.version)
            assert update is not None
            subscriber.stage(update)
            assert subscriber.activate(verify=True).version == WeightVersion("run", n)
            for name, bits in trainers[0].full().items():
                np.testing.assert_array_equal(sink.array(name), bits, err_msg=name)
            for trainer in trainers:
                trainer.step(0.1)
    late = Subscriber(ArraySink(trainers[0].tensors()))
    late.stage(plan_update(relay, None))
    assert late.activate(verify=True).is_verified
    for opened in (subscriber, late):
        opened.close()
    for publisher in publishers:
        publisher._transport.close()


def test_a_master_gives_its_port_back() -> None:
    try:
        first, second = MooncakeMaster(), MooncakeMaster()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    assert first.address != second.address
    first.close()
    first.close()
    second.close()
