"""One engine process that follows published weights, or reads blobs, as told on stdin. Started by test_collective.py.

Each line is a JSON command; each answer is a JSON line.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

from rose.backends.collective import CollectiveMember
from rose.errors import BlobNotFoundError
from rose.interfaces.transport import Transport
from rose.registry import open_transport
from rose.testing import FakeTrainer
from rose.transfer.delta import digest
from rose.transfer.relay import plan_update
from rose.transfer.sink import ArraySink
from rose.transfer.subscriber import Subscriber
from rose.types import TransportAddress

_POLL_S = 0.01


def open_store(name: str, options: dict[str, Any]) -> Transport:
    if name == "collective":
        return CollectiveMember(**options)
    return open_transport(TransportAddress(name=name, options=tuple(options.items())))


class Engine:
    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._sink = ArraySink(FakeTrainer.group(1)[0].tensors())
        self._subscriber = Subscriber(self._sink)

    def follow(self, n: int) -> dict[str, Any]:
        """Apply whatever is published until version ``n``; return the digest of every tensor after each version."""
        digests = {}
        while self._subscriber.version is None or self._subscriber.version.n < n:
            update = plan_update(self._transport, self._subscriber.version)
            if update is None:
                time.sleep(_POLL_S)
                continue
            self._subscriber.stage(update, self._transport)
            version = self._subscriber.activate(verify=True).version
            digests[str(version.n)] = {name: digest(self._sink.array(name)) for name in self._sink.tensors()}
        return {"digests": digests}

    def get(self, key: str) -> dict[str, Any]:
        try:
            return {"digest": digest(self._transport.get(key))}
        except BlobNotFoundError:
            return {"digest": None}

    def counts(self) -> dict[str, Any]:
        assert isinstance(self._transport, CollectiveMember)
        counts = self._transport.counts()
        return {name: getattr(counts, name) for name in ("num_delivered", "num_from_collective", "num_from_origin")}


def main() -> None:
    engine = Engine(open_store(sys.argv[1], json.loads(sys.argv[2])))
    sys.stdout.write('{"is_ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin:
        command = json.loads(line)
        answer = getattr(engine, command.pop("do"))(**command)
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
