"""The reference loop on fake engines, with stand-ins for learner and policy. No torch, no process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from rose.pool import PoolConfig, RolloutPool
from rose.reference.algorithms import ALGORITHMS
from rose.reference.environment import Environment, Step
from rose.reference.groups import GroupRules, LostPolicy
from rose.reference.household import Household, Teacher
from rose.reference.household_world import House
from rose.reference.lake import FrozenLake
from rose.reference.learner_group import TrainReport
from rose.reference.loop import Loop, LoopSettings, StepReport
from rose.reference.tokenizer import WordTokenizer
from rose.reference.trajectory import Trajectory, derive_seed
from rose.testing import FakeEngine, FakeUpdateSource
from rose.types import EngineId, EngineKind, Sampling, TransportAddress, Turn, TurnResult, WeightVersion

ADDRESS = TransportAddress(name="scripted")


class Episodes:
    """Episodes in this process; ``by_text`` is which seed a first observation belongs to."""

    def __init__(self, kind: type[Environment]) -> None:
        self.kind = kind
        self.running: dict[str, Environment] = {}
        self.by_text: dict[str, int] = {}
        self.dropped: list[str] = []

    async def reset(self, trajectory_id: str, seed: int) -> str:
        episode = self.running[trajectory_id] = self.kind()
        text = episode.reset(seed)
        self.by_text[text] = seed
        return text

    async def step(self, trajectory_id: str, text: str | None) -> Step:
        step = self.running[trajectory_id].step(text)
        if step.is_done:
            del self.running[trajectory_id]
        return step

    async def drop(self, trajectory_id: str) -> None:
        self.dropped.append(trajectory_id)
        self.running.pop(trajectory_id, None)


class Learner:
    """Publishes version numbers, notes what it was given."""

    def __init__(self, source: FakeUpdateSource) -> None:
        self.source = source
        self.given: list[list[Trajectory]] = []
        self.published: list[bool] = []

    async def train(self, trajectories: Sequence[Trajectory]) -> TrainReport:
        self.given.append(list(trajectories))
        zeros = dict.fromkeys((field.name for field in attrs.fields(TrainReport)), 0)
        return TrainReport(**(zeros | {"num_samples": len(trajectories)}))

    async def publish(self, *, run: str, address: TransportAddress, is_anchor: bool = False) -> Mapping[str, Any]:
        assert address == ADDRESS
        self.source.run = run
        self.published.append(is_anchor)
        return {"version": str(self.source.publish())}


@functools.cache
def _lake_moves() -> tuple[int, ...]:
    return WordTokenizer.for_environment(FrozenLake).encode("right down down right")


def lake_policy(ids: Sequence[int], sampling: Sampling, version: WeightVersion | None) -> int:
    """Go right and down, drawn by the request's seed: right about once in three episodes."""
    del version
    moves = _lake_moves()
    return moves[derive_seed(sampling.seed or 0, len(ids)) % len(moves)]


def household_policy(episodes: Episodes, *, mistake: int = 40) -> Any:
    """Return a policy that plays as the teacher does; one turn in ``mistake`` gives the episode up by walking in circles."""
    tokenizer = WordTokenizer.for_environment(Household)

    @functools.cache
    def choose(past: tuple[str, ...], seed: int) -> tuple[int, ...]:
        house = House.generate(episodes.by_text[f"{past[0].strip()} >"])
        teacher, has_given_up = Teacher(house), False
        for text in past[1:]:
            answer = text.split(".")[0].split()
            has_given_up = has_given_up or answer == ["look"]
            house.act(answer)
            teacher.look()
        is_mistake = derive_seed(seed, len(past)) % mistake == 0
        action = "look" if has_given_up or is_mistake else teacher.choose()
        return tokenizer.encode((*action.split(), "."))

    def next_token(ids: Sequence[int], sampling: Sampling, version: WeightVersion | None) -> int:
        del version
        *past, partial = tokenizer.decode(ids[1:]).split(">")
        return choose(tuple(past), sampling.seed or 0)[len(partial.split())]

    return next_token


@attrs.define(kw_only=True, slots=False)
class Rig:
    """A loop with its parts; ``run`` runs it on ``num_dedicated`` fake engines and ``num_borrowed`` slower ones."""

    env: str = "frozenlake"
    algorithm: str = "grpo"
    num_steps: int = 3
    num_groups: int = 3
    group_size: int = 4
    lost: LostPolicy = LostPolicy.REFILL
    max_staleness: int = 1
    max_refills: int = 4
    num_dedicated: int = 2
    num_borrowed: int = 1
    first_sync_timeout_s: float = 5.0
    borrowed: Mapping[str, Any] = attrs.field(factory=dict)
    context: Mapping[str, Any] = attrs.field(factory=dict)
    pool_config: PoolConfig = attrs.field(factory=PoolConfig)

    def __attrs_post_init__(self) -> None:
        self.kind = {"frozenlake": FrozenLake, "household": Household}[self.env]
        self.episodes = Episodes(self.kind)
        self.source = FakeUpdateSource()
        self.learner = Learner(self.source)
        self.steps: list[StepReport] = []
        self.phases: list[tuple[int, str]] = []
        self.announced: list[tuple[int, float]] = []
        self.policy: Any = lake_policy if self.env == "frozenlake" else household_policy(self.episodes)
        self.engines = [self._engine(f"own{i}") for i in range(self.num_dedicated)]
        self.lent = [self._engine(f"lent{i}", **self.borrowed) for i in range(self.num_borrowed)]
        self.pool: Any = None
        self.change_result: Callable[[TurnResult, Turn], TurnResult] = lambda result, _: result

    def _engine(self, name: str, **changes: Any) -> FakeEngine:
        return FakeEngine(engine_id=EngineId(name), next_token=lambda *args: self.policy(*args), **changes)

    @property
    def settings(self) -> LoopSettings:
        algorithm = ALGORITHMS[self.algorithm]
        is_dynamic = algorithm.has_dynamic_sampling
        return LoopSettings(
            run="job",
            seed=1,
            num_steps=self.num_steps,
            group_size=self.group_size,
            rules=GroupRules(
                num_groups=self.num_groups,
                max_groups=self.num_groups * (3 if is_dynamic else 1),
                has_dynamic_sampling=is_dynamic,
                lost=self.lost,
                max_refills=self.max_refills,
            ),
            algorithm=algorithm,
            max_staleness=self.max_staleness,
            first_sync_timeout_s=self.first_sync_timeout_s,
        )

    async def run(self) -> list[StepReport]:
        async with RolloutPool(self.engines, config=self.pool_config) as pool:
            for engine in self.lent:
                await pool.add_engine(engine, EngineKind.BORROWED)
            self.pool, generate = pool, pool.generate

            async def changed(turn: Turn) -> TurnResult:
                return self.change_result(await generate(turn), turn)

            def expect(num_trajectories: int, *, at_s: float | None = None) -> None:
                assert at_s is not None
                self.announced.append((num_trajectories, at_s - pool.clock.now()))

            pool.generate, pool.expect = changed, expect  # type: ignore[method-assign]
            loop = Loop(
                self.settings,
                pool=pool,
                learner=self.learner,
                episodes=self.episodes,
                environment=self.kind,
                source=self.source,
                address=ADDRESS,
                clock=pool._clock,
                context=self.context,
                on_step=self.steps.append,
                on_phase=lambda step, phase: self.phases.append((step, phase)),
            )
            return await loop.run()
