"""``[loop]`` of a job file, and the whole file as ``rose run`` reads it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Literal, get_args

import attrs

from rose import checks
from rose.hosts.job import JobConfig, load_job
from rose.reference.algorithms import ALGORITHMS, Algorithm
from rose.reference.groups import GroupRules, LostPolicy
from rose.reference.learner_config import LearnerConfig
from rose.reference.loop import LoopSettings

AlgorithmName = Literal["grpo", "dapo", "async"]

ENVIRONMENTS = {
    "frozenlake": "rose.reference.lake:FrozenLake",
    "household": "rose.reference.household:Household",
    "alfworld": "rose.reference.alfworld:AlfWorld",
}


@attrs.frozen(kw_only=True)
class LoopConfig:
    """``[loop]``.

    Attributes:
        env: ``frozenlake``, ``household``, ``alfworld``, or another environment as ``module:Class``.
        algorithm: ``grpo``, ``dapo`` or ``async``.
        steps: RL steps.
        num_groups: Groups that a step trains on.
        group_size: Trajectories a group.
        temperature: Of sampling.
        lost: What becomes of a group that lost a trajectory: ``refill``, ``partial`` or ``drop``.
        max_refills: Replacements a group.
        max_groups_factor: ``dapo``: groups started a step, at most, over ``num_groups``.
        max_staleness: ``async``: versions by which the oldest token of a trajectory may lie behind the weights that are trained.
        turn_timeout_s: Longest wait for one turn.
        trajectory_timeout_s: Longest time for one trajectory; more than for a turn.
        env_timeout_s: Longest wait for one answer of an environment, whose process is ended then; less than for a trajectory.
        num_env_processes: Processes that run the environments.
        pool: URL of a running ``rose pool``; without it the pool runs in this process.
        pool_token_file: The bearer token for that.
        out: Folder for ``summary.json`` and ``metrics.jsonl``; made when missing.
    """

    env: str = attrs.field(default="frozenlake", validator=checks.text(r"[A-Za-z_][\w.]*(:[A-Za-z_]\w*)?"))
    algorithm: AlgorithmName = "grpo"
    steps: int = attrs.field(default=4, validator=checks.integer(1))
    num_groups: int = attrs.field(default=8, validator=checks.integer(1))
    group_size: int = attrs.field(default=8, validator=checks.integer(2))
    temperature: float = attrs.field(default=1.0, validator=checks.number(above=0))
    lost: LostPolicy = LostPolicy.REFILL
    max_refills: int = attrs.field(default=8, validator=checks.integer(0))
    max_groups_factor: float = attrs.field(default=3.0, validator=checks.number(at_least=1))
    max_staleness: int = attrs.field(default=1, validator=checks.integer(1))
    turn_timeout_s: float = attrs.field(default=300.0, validator=checks.number(above=0))
    trajectory_timeout_s: float = attrs.field(default=1800.0, validator=checks.number(above=0))
    env_timeout_s: float = attrs.field(default=60.0, validator=checks.number(above=0))
    num_env_processes: int = attrs.field(default=2, validator=checks.integer(1))
    pool: str | None = attrs.field(default=None, validator=checks.optional(checks.text(r"https?://\S+")))
    pool_token_file: Path | None = None
    out: Path = Path("rose-run")

    def __attrs_post_init__(self) -> None:
        """Check what fields mean together.

        Raises:
            ValueError: One of them does not fit another.
        """
        if self.turn_timeout_s >= self.trajectory_timeout_s:
            message = (
                f"trajectory_timeout_s must be above turn_timeout_s = {self.turn_timeout_s:g}, got "
                f"{self.trajectory_timeout_s:g}; a turn that hangs is given up before its trajectory"
            )
            raise ValueError(message)
        if self.env_timeout_s >= self.trajectory_timeout_s:
            message = (
                f"trajectory_timeout_s must be above env_timeout_s = {self.env_timeout_s:g}, got "
                f"{self.trajectory_timeout_s:g}; an environment that hangs is ended before its trajectory"
            )
            raise ValueError(message)
        if ":" not in self.env and self.env not in ENVIRONMENTS:
            message = f"env must be one of {', '.join(ENVIRONMENTS)} or module:Class, got {self.env!r}"
            raise ValueError(message)
        if self.algorithm not in get_args(AlgorithmName):
            message = f"algorithm must be one of {', '.join(get_args(AlgorithmName))}, got {self.algorithm!r}"
            raise ValueError(message)

    @property
    def environment(self) -> str:
        """Return the environment as ``module:Class``."""
        return ENVIRONMENTS.get(self.env, self.env)

    @property
    def algorithm_values(self) -> Algorithm:
        """Return what the algorithm does."""
        return ALGORITHMS[self.algorithm]

    @property
    def rules(self) -> GroupRules:
        """Return how a step's groups are made whole."""
        is_dynamic = self.algorithm_values.has_dynamic_sampling
        return GroupRules(
            num_groups=self.num_groups,
            max_groups=math.ceil(self.num_groups * self.max_groups_factor) if is_dynamic else self.num_groups,
            has_dynamic_sampling=is_dynamic,
            lost=self.lost,
            max_refills=self.max_refills,
        )


@attrs.frozen(kw_only=True)
class RunConfig(JobConfig):
    """A job file with the loop's tables.

    Attributes:
        loop: What the loop does.
        learner: The learner; its environment, seed and loss are the loop's and the job's.
    """

    loop: LoopConfig = attrs.field(factory=LoopConfig)
    learner: LearnerConfig = attrs.field(factory=LearnerConfig)

    @property
    def settings(self) -> LoopSettings:
        """Return what the loop does."""
        return LoopSettings(
            run=self.job.name,
            seed=self.job.seed,
            num_steps=self.loop.steps,
            group_size=self.loop.group_size,
            rules=self.loop.rules,
            algorithm=self.loop.algorithm_values,
            max_staleness=self.loop.max_staleness,
        )

    @property
    def learner_config(self) -> LearnerConfig:
        """Return the learner's configuration as this job and its algorithm want it."""
        return attrs.evolve(
            self.learner,
            environment=self.loop.environment,
            seed=self.job.seed,
            grpo=self.loop.algorithm_values.configure(self.learner.grpo),
        )


def load_run(path: Path | str) -> RunConfig:
    """Read and check a job file for the loop.

    Raises:
        ConfigError: One line a problem.
    """
    return load_job(RunConfig, path)
