"""What a fidelity run does: its options and its scripted trajectories. Pure."""

from __future__ import annotations

import random

import attrs

from rose import checks
from rose.policies.admission import Mode
from rose.reference.demo_config import DemoConfig
from rose.reference.trajectory import derive_seed
from rose.simulation.run_record import TrajectoryScript, TurnScript

# Arm -> the lender's mode; None: nothing is lent and nothing rolls out.
ARMS: dict[str, Mode | None] = {"alone": None, "ungated": Mode.UNGATED, "paper": Mode.PAPER, "slo": Mode.SLO}
FIRST_TOKENS = (1000, 2000)
LATER_TOKENS = (50, 400)
OUTPUT_TOKENS = (50, 250)
NUM_TURNS = (3, 7)
ENV_S = (0.02, 0.25)
MAX_CONTEXT_TOKENS = 16_384


@attrs.frozen(kw_only=True)
class Options:
    """What the command line sets.

    Attributes:
        load_s: Modelled seconds of serving load in each run.
        wall_limit_s: No run is begun that would end later than this after the start.
    """

    arms: tuple[str, ...] = tuple(ARMS)
    num_runs: int = attrs.field(default=3, validator=checks.integer(1))
    num_retries: int = attrs.field(default=2, validator=checks.integer(0))
    k: float = attrs.field(default=2.5, validator=checks.number(above=0))
    num_groups: int = attrs.field(default=12, validator=checks.integer(1))
    group_size: int = attrs.field(default=8, validator=checks.integer(1))
    load_s: float = attrs.field(default=18.0, validator=checks.number(above=0))
    rate_rps: float = attrs.field(default=5.6, validator=checks.number(above=0))
    trace: str | None = attrs.field(default=None, validator=checks.optional(checks.text()))
    seed: int = attrs.field(default=0, validator=checks.integer(0))
    wall_limit_s: float = attrs.field(default=1200.0, validator=checks.number(above=0))

    def fleet_config(self) -> DemoConfig:
        """Return the fleet's configuration: two dedicated engines, two serving ones with a rollout engine beside each."""
        return DemoConfig(
            seed=self.seed,
            k=self.k,
            tokens_per_token=1,
            num_dedicated=2,
            num_borrowed=2,
            num_groups=self.num_groups,
            group_size=max(2, self.group_size),
            cap_per_engine=16,
            rate_rps=self.rate_rps,
        )


def plan_trajectories(options: Options) -> tuple[TrajectoryScript, ...]:
    """Return the trajectories of every run, the same for the same seed."""
    return tuple(
        _trajectory(
            random.Random(derive_seed(options.seed, "trajectory", group, member)), f"g{group}", f"g{group}/t{member}"
        )
        for group in range(options.num_groups)
        for member in range(options.group_size)
    )


def _trajectory(rng: random.Random, group_id: str, trajectory_id: str) -> TrajectoryScript:
    num_turns = rng.randint(*NUM_TURNS)
    turns = [
        TurnScript(
            new_tokens=rng.randint(*(LATER_TOKENS if turn else FIRST_TOKENS)),
            output_tokens=rng.randint(*OUTPUT_TOKENS),
            env_s=round(rng.uniform(*ENV_S), 3) if turn < num_turns - 1 else 0.0,
        )
        for turn in range(num_turns)
    ]
    return TrajectoryScript(trajectory_id=trajectory_id, group_id=group_id, turns=tuple(turns))


def shorten(
    trajectories: tuple[TrajectoryScript, ...], *, num_trajectories: int, num_turns: int
) -> tuple[TrajectoryScript, ...]:
    """Return the first trajectories with their first turns only: a warm-up."""
    return tuple(attrs.evolve(script, turns=script.turns[:num_turns]) for script in trajectories[:num_trajectories])
