"""The trainer's side: a transport that puts into its origin and, at the same time, to the members of a group of its own.

Invariants:

* The origin has every blob; the collective only saves its members the way there. Nothing that fails here fails a ``put``.
* A ``put`` is held up by the group for a bounded time: ``timeout_s`` a chunk when a member freezes, nothing when one dies.
* One thread talks to the members and the group, in the order of the puts.

A group that failed is thrown away. The next put calls the roll, which takes newcomers in and lets go of whoever does not answer,
and makes the next one; while that does not succeed it is tried ever more rarely, and members read from the origin.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Sequence
from typing import Any

import attrs
import numpy as np

from rose.backends.collective.group import Group, check_backend, current_gpu, host_store
from rose.backends.collective.messages import RootAddress
from rose.backends.collective.over import OverOrigin
from rose.backends.collective.roster import Roster
from rose.errors import TransportError
from rose.interfaces.transport import Payload, Transport
from rose.transfer.delta import digest

_logger = logging.getLogger(__name__)
_MAX_BACKOFF_S = 60.0
_KEYS_PER_MESSAGE = 1000


@attrs.define
class _Job:
    """Something for the sender: a blob, or something to tell the members, or (neither) a wish for a new group."""

    key: str = ""
    data: memoryview | None = None
    kind: str = ""
    fields: dict[str, Any] = attrs.Factory(dict)
    is_done: threading.Event = attrs.Factory(threading.Event)


class CollectiveMirror(OverOrigin):
    """One trainer rank's transport, with its rank as the root of a group. Its address is the origin's, for who is no member.

    Args:
        origin: The store that everybody can reach; stays its owner's to close.
        host: Address that members reach this process under; loopback unless another is named. A token guards it.
        backend: ``gloo``, or ``nccl`` where every member has a GPU of its own.
        timeout_s: How long a group may take to meet, and one chunk of 32 MB to arrive.
        roll_call_s: How long a member may take to answer.
        device: Index of this process's GPU for groups over NCCL; -1 is the current one of the thread that makes the mirror.

    Raises:
        ConfigError: There is no such backend.
        BackendUnavailableError: This torch does not have it.

    Attributes:
        root: What members need to find this rank; see ``member_address``.
    """

    def __init__(
        self,
        origin: Transport,
        *,
        host: str = "127.0.0.1",
        backend: str = "gloo",
        timeout_s: float = 10.0,
        roll_call_s: float = 2.0,
        device: int = -1,
    ) -> None:
        check_backend(backend)
        self._gpu = current_gpu() if device < 0 else device
        super().__init__(origin)
        self._host, self._backend = host, backend
        self._timeout_s, self._roll_call_s = timeout_s, roll_call_s
        self._roster = Roster(host)
        self._store, store_port = host_store(host, timeout_s)
        self.root = str(RootAddress(host=host, port=self._roster.port, store_port=store_port, token=self._roster.token))
        self._group: Group | None = None
        self._num_groups = 0
        self._next_try_s, self._backoff_s = 0.0, 1.0
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, name="rose-collective-send", daemon=True)
        self._is_closed = False
        self._sender.start()

    def put(self, key: str, payload: Payload) -> None:
        """Write a blob once, and send it to the members meanwhile."""
        data = memoryview(payload).cast("B")
        job = _Job(key=key, data=data)
        self._submit(job)
        verdict = "refuse"
        try:
            self._origin.put(key, data)
            verdict = "keep"
        finally:
            job.is_done.wait()  # the caller may change the buffer afterwards
            self._submit(_Job(kind=verdict, fields={"key": key}))

    def delete(self, keys: Sequence[str]) -> None:
        """Remove blobs, here and, once they hear of it, from what members hold."""
        super().delete(keys)
        for start in range(0, len(keys), _KEYS_PER_MESSAGE):
            self._run(_Job(kind="drop", fields={"keys": list(keys[start : start + _KEYS_PER_MESSAGE])}))

    def regroup(self) -> int:
        """Call the roll and make a group of whoever answers; return how many members it has (0: none could be made)."""
        self._next_try_s = 0.0
        self._run(_Job())
        return self._roster.num_members if self._group is not None else 0

    def close(self) -> None:
        """Let the members go. The origin stays open. Idempotent."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._jobs.put(None)
        self._sender.join()

    def _submit(self, job: _Job) -> None:
        """Hand a job to the sender; after ``close`` it counts as done."""
        with self._lock:
            if self._is_closed:
                job.is_done.set()
            else:
                self._jobs.put(job)

    def _run(self, job: _Job) -> None:
        self._submit(job)
        job.is_done.wait()

    def _send_all(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._do(job)
            except TransportError as error:
                _logger.warning("the collective failed, its members read from the origin for now: %s", error)
                self._throw_away()
            except Exception:  # the thread's root: a put must never wait for a thread that is gone
                _logger.exception(
                    "the collective failed in an unforeseen way, its members read from the origin for now"
                )
                self._throw_away()
            finally:
                job.is_done.set()
        self._throw_away()
        self._roster.close()

    def _do(self, job: _Job) -> None:
        if job.kind:
            self._roster.tell(job.kind, **job.fields)
            return
        is_broken = self._group is None and self._roster.num_members > 0
        is_wished = job.data is None or self._roster.has_newcomers
        if is_wished or (is_broken and time.monotonic() >= self._next_try_s):
            self._make_group()
        if job.data is not None and self._group is not None:
            self._roster.tell("blob", key=job.key, length_bytes=len(job.data), checksum=digest(job.data))
            self._group.broadcast(np.frombuffer(job.data, dtype=np.uint8))

    def _make_group(self) -> None:
        self._throw_away()
        self._next_try_s = time.monotonic() + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, _MAX_BACKOFF_S)
        num_members = self._roster.roll_call(self._roll_call_s)
        if not num_members:
            return
        name = f"{self._roster.token}/{self._num_groups}"
        self._num_groups += 1
        options: dict[str, Any] = {"size": num_members + 1, "backend": self._backend, "timeout_s": self._timeout_s}
        self._roster.tell_ranks("group", name=name, **options)
        self._group = Group(self._store, name, rank=0, host=self._host, device=self._gpu, **options)
        self._backoff_s, self._next_try_s = 1.0, 0.0

    def _throw_away(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None
