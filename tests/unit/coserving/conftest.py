"""A device and a clock that live in one thread: blocking moves the time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rose.coserving.ledger import Ledger
from rose.interfaces.clock import Clock
from rose.interfaces.device import Device, StepWork
from rose.policies.admission import Budget, Mode
from rose.types import DeviceId


class ThreadClock(Clock):
    def __init__(self) -> None:
        self.time_s = 10.0
        self.is_frozen = False
        self.on_block: Callable[[], None] = lambda: None

    def now(self) -> float:
        return self.time_s

    def block(self, duration_s: float) -> None:
        self.time_s += 0.0 if self.is_frozen else max(0.0, duration_s)
        self.on_block()

    async def sleep(self, duration_s: float) -> None:
        self.block(duration_s)


class Turn:
    """What two handles of one device share."""

    def __init__(self) -> None:
        self.holder: object | None = None
        self.free_at_s = 0.0
        self.turns: list[tuple[str, float, float]] = []


class ThreadDevice(Device):
    """10 ms a step and 1 ms for 32 prompt tokens."""

    def __init__(self, name: str, turn: Turn, clock: ThreadClock) -> None:
        self.device_id = DeviceId("dev")
        self.name = name
        self.turn = turn
        self.clock = clock

    @property
    def expected_release_s(self) -> float:
        return self.turn.free_at_s

    def acquire(self, *, is_blocking: bool) -> bool:
        if self.turn.holder not in (None, self):
            assert not is_blocking, "this would wait for ever in one thread"
            return False
        self.turn.holder = self
        return True

    def release(self) -> None:
        if self.turn.holder is self:
            self.turn.holder = None

    def predict_s(self, work: StepWork) -> float:
        return 0.010 + 0.001 * work.num_prefill_tokens / 32

    def begin_step(self, work: StepWork, ready_at_s: float) -> float:
        assert self.turn.holder is self
        start_s = max(ready_at_s, self.turn.free_at_s)
        self.turn.free_at_s = start_s + self.predict_s(work)
        self.turn.turns.append((self.name, start_s, self.turn.free_at_s))
        return self.turn.free_at_s

    def finish_step(self, end_s: float) -> float:
        self.clock.block(end_s - self.clock.now())
        return 0.0

    def give_pages(self, address: int, num_bytes: int) -> int:
        return 0


class Site:
    """One shared device with its ledger."""

    def __init__(self, path: Path) -> None:
        self.clock = ThreadClock()
        self.turn = Turn()
        self.ledger = Ledger.create(path)

    def device(self, name: str) -> ThreadDevice:
        return ThreadDevice(name, self.turn, self.clock)

    def grant(self, mode: Mode = Mode.SLO, token: int = 1, expires_s: float = 1e9) -> None:
        self.ledger.publish_budget(Budget(mode=mode, fencing_token=token, expires_s=expires_s, is_granted=True))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path / "ledger")


@pytest.fixture
def make_site() -> type[Site]:
    return Site
