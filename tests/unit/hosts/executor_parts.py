"""What tests of the executor share: a fake engine, served in this process under a lease, with a client."""

from __future__ import annotations

import contextlib
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs

from rose.backends.remote import RemoteEngine
from rose.clocks import MonotonicClock
from rose.coserving.ledger import Ledger
from rose.hosts.http.executor_lease import HoldWatch, LeaseGate
from rose.hosts.http.executor_rollout import RestartConfig, RolloutSupervisor
from rose.hosts.http.executor_service import RolloutService
from rose.hosts.http.server import bind, make_app, parse_place, served
from rose.interfaces import ServingEngine
from rose.policies.admission import AdmissionConfig, Budget
from rose.testing import FakeEngine
from rose.types import EngineRequest, RequestId, Sampling, WeightVersion

QUICK = RestartConfig(first_s=0.01, longest_s=0.05, look_s=0.01, hang_s=0.2)


@attrs.define
class Parts:
    """One executor's interface and all behind it."""

    folder: Path
    ledgers: list[Ledger]
    fakes: list[FakeEngine] = attrs.field(factory=list)
    said: list[str] = attrs.field(factory=list)
    service: Any = None
    supervisor: Any = None
    holds: Any = None
    remote: Any = None
    url: str = ""

    @property
    def fake(self) -> FakeEngine:
        """The engine of the latest start."""
        return self.fakes[-1]

    async def start(self) -> ServingEngine:
        self.fakes.append(FakeEngine(token_s=0.002, weight_version=WeightVersion("run", 3)))
        return self.fake

    def lend(self, token: int, index: int = 0, *, is_granted: bool = True, expires_s: float = math.inf) -> None:
        budget = Budget(fencing_token=token, expires_s=expires_s, is_granted=is_granted)
        self.ledgers[index].publish_budget(budget)


@contextlib.asynccontextmanager
async def executor_parts(folder: Path, num_devices: int = 1) -> AsyncIterator[Parts]:
    """Serve a fake engine on devices that are lent under token 7."""
    parts = Parts(folder, [Ledger.create(folder / f"gpu{i}.ledger") for i in range(num_devices)])
    for index in range(num_devices):
        parts.lend(7 + index, index)
    clock = MonotonicClock()
    parts.holds = HoldWatch(parts.ledgers, clock, AdmissionConfig())
    async with RolloutSupervisor(parts.start, QUICK, parts.said.append) as parts.supervisor:
        await parts.supervisor.wait_until_up()
        async with RolloutService(parts.supervisor, LeaseGate(parts.ledgers, clock), parts.holds) as parts.service:
            listener = bind(parse_place("127.0.0.1:0"), ())
            async with served(make_app(parts.service.routes()), listener) as parts.url:
                parts.remote = RemoteEngine(parts.url, engine_id="remote")
                parts.remote.set_lease(*range(7, 7 + num_devices))
                try:
                    yield parts
                finally:
                    await parts.remote.close()


def request(name: str = "r1", max_tokens: int = 8, **sampling: Any) -> EngineRequest:
    options = {"temperature": 0.0, "ignore_eos": True, **sampling}
    return EngineRequest(
        request_id=RequestId(name), prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=max_tokens, **options)
    )
