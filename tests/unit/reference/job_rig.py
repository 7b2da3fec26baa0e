"""A whole reference job on scripted parts: engines, learner, relay, serving. No torch, no vLLM, no process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs

from rose.coserving.ledger import Ledger
from rose.coserving.lender import Lender
from rose.observe.latency import RequestRecord, Slo
from rose.observe.live import LiveState
from rose.pool import Borrower, RolloutPool
from rose.reference.arms import Job
from rose.reference.demo_config import DemoConfig
from rose.reference.environment import Step
from rose.reference.learner_group import TrainReport
from rose.reference.progress import Progress
from rose.reference.serving_site import ServingArm
from rose.reference.tokenizer import WordTokenizer
from rose.reference.trajectory import Trajectory
from rose.testing import FakeEngine, ManualClock
from rose.types import DeviceId, EngineId, JobId, TransportAddress, WeightUpdate, WeightVersion

SLO = Slo(ttft_ms=500, tpot_ms=150)
CONFIG = DemoConfig(
    steps=2, num_groups=3, group_size=2, num_eval_maps=6, num_eval_episodes=1, cap_per_engine=2, sparse_fraction=0.5
)


class TwoGoes:
    """Done after two ``go``, reward 1."""

    words = ("left", "go")
    action_words = ("go",)
    max_turns = 4
    max_tokens_per_turn = 3

    def reset(self, seed: int) -> str:
        self.rest = 2
        return "left left"

    def step(self, text: str | None) -> Step:
        self.rest -= text == "go"
        is_done = self.rest <= 0
        return Step(observation="" if is_done else "left", reward=float(is_done), is_done=is_done)


GO = WordTokenizer.for_environment(TwoGoes).encode("go")[0]


class FreezableClock(ManualClock):
    """Counts freezes; time is moved by the test in any case."""

    def __init__(self) -> None:
        super().__init__()
        self.is_frozen = True

    def freeze(self) -> None:
        self.is_frozen = True

    def unfreeze(self) -> None:
        self.is_frozen = False


@attrs.define(eq=False, kw_only=True, slots=False)
class CheckedEngine(FakeEngine):
    """Its weights are its version; ``is_wrong`` spoils them. Notes whether the clock stood still at each request."""

    is_wrong: bool = False
    frozen_at: list[bool] = attrs.field(factory=list, init=False)

    def generate(self, request: Any) -> Any:
        self.frozen_at.append(self.clock.is_frozen)  # type: ignore[attr-defined]
        return super().generate(request)

    async def weight_checksums(self) -> dict[str, str]:
        return {"w": "spoilt" if self.is_wrong else str(self.weight_version)}


class Episodes:
    def __init__(self) -> None:
        self.running: dict[str, TwoGoes] = {}
        self.seeds: list[int] = []

    async def reset(self, trajectory_id: str, seed: int) -> str:
        self.seeds.append(seed)
        self.running[trajectory_id] = TwoGoes()
        return self.running[trajectory_id].reset(seed)

    async def step(self, trajectory_id: str, text: str | None) -> Step:
        return self.running[trajectory_id].step(text)

    async def drop(self, trajectory_id: str) -> None:
        self.running.pop(trajectory_id)


class Relay:
    """An update source whose newest version the learner sets."""

    newest: WeightVersion | None = None

    def address(self) -> TransportAddress:
        return TransportAddress(name="scripted")

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        if self.newest is None or known == self.newest:
            return None
        return WeightUpdate(target=self.newest, manifest_keys=("m",), address=self.address())


class Learner:
    def __init__(self, relay: Relay) -> None:
        self.relay = relay
        self.calls: list[Any] = []

    async def reset(self) -> None:
        self.calls.append("reset")

    async def train(self, trajectories: Sequence[Trajectory], *, lr: float, num_minibatches: int) -> TrainReport:
        self.calls.append((len(trajectories), lr, num_minibatches))
        zeros = {field.name: 0 for field in attrs.fields(TrainReport)}
        return TrainReport(**zeros)

    async def publish(self, *, run: str, address: TransportAddress, is_anchor: bool) -> Mapping[str, Any]:
        n = 0 if is_anchor or self.relay.newest is None else self.relay.newest.n + 1
        self.relay.newest = WeightVersion(run, n)
        return {
            "codec_elements": {"sparse": 10, "dense": 90, "none": 900},
            "num_changed": 50,
            "num_elements": 1000,
            "bytes_dense": 2000,
            "bytes_sent": 300,
        }

    async def state_checksums(self) -> dict[str, str]:
        return {"w": str(self.relay.newest)}


class Site:
    """Serving that answers one request an arm."""

    def __init__(self, clock: FreezableClock) -> None:
        self.clock = clock
        self.labels: list[str] = []
        self.began_s = 0.0

    async def begin(self, label: str) -> None:
        self.labels.append(label)
        self.began_s = self.clock.now()

    async def end(self, slo: Slo) -> ServingArm:
        record = RequestRecord.from_token_times(index=0, device="serving0", arrived_s=0.0, token_times_s=[0.1, 0.2])
        duration_s = self.clock.now() - self.began_s
        return ServingArm(records=(record,), num_sent=1, num_unanswered=0, duration_s=duration_s, rate_rps=5.6)


class Metrics:
    def __init__(self) -> None:
        self.lines: list[dict[str, Any]] = []

    def write(self, event: str, **fields: Any) -> None:
        self.lines.append({"event": event, **fields})

    def of(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.lines if line["event"] == event]


@attrs.define
class Rig:
    job: Job
    clock: FreezableClock
    dedicated: list[CheckedEngine]
    borrowed: list[CheckedEngine]
    learner: Learner
    episodes: Episodes
    site: Site
    metrics: Metrics
    views: list[LiveState]
    lender: Lender


def make_rig(folder: Path, config: DemoConfig = CONFIG) -> Rig:
    """Two dedicated and one borrowed engine, 0.1 s a token."""
    clock, relay, views = FreezableClock(), Relay(), []

    def engine(name: str) -> CheckedEngine:
        return CheckedEngine(engine_id=EngineId(name), clock=clock, token_s=0.1, next_token=lambda *_: GO)

    dedicated, borrowed = [engine("dedicated0"), engine("dedicated1")], [engine("borrowed0")]
    ledger = Ledger.create(folder / "ledger")
    ledger.beat(0.0)
    device = DeviceId("shared0")
    lender = Lender({device: ledger}, clock)

    def lend_to(pool: RolloutPool) -> Borrower:
        return Borrower(lender, pool, {device: borrowed[0]}, job=JobId("demo"), clock=clock)

    fleet: Any = SimpleNamespace(
        clock=clock,
        relay=relay,
        dedicated=dedicated,
        borrowed=borrowed,
        engines=[*dedicated, *borrowed],
        lender=lender,
        lend_to=lend_to,
    )
    learner, episodes, site, metrics = Learner(relay), Episodes(), Site(clock), Metrics()
    blank = LiveState(arm="", step=0, num_steps=2, phase="", slo_ttft_ms=500, slo_tpot_ms=150)
    view: Any = SimpleNamespace(update=views.append)
    job = Job(
        config=config,
        environment=TwoGoes,
        fleet=fleet,
        learner=learner,  # type: ignore[arg-type]
        episodes=episodes,  # type: ignore[arg-type]
        site=site,  # type: ignore[arg-type]
        metrics=metrics,  # type: ignore[arg-type]
        progress=Progress(view, clock, blank),
        slo=SLO,
    )
    return Rig(job, clock, dedicated, borrowed, learner, episodes, site, metrics, views, lender)
