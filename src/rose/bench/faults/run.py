"""The same trajectories undisturbed and under faults, on real engines, and what has to be equal.

Answers are greedy and of fixed lengths, and what comes in between does not depend on them; so a trajectory is the same whenever,
wherever and in how many pieces it is computed, up to the order of sums. A turn that lost a token, got one twice or went on from
wrong ones changes all that follow.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import attrs

from rose import checks
from rose.bench.faults.faults import DoneFault, Faulter, FaultKind, PlannedFault, plan_faults
from rose.bench.faults.shapes import TrajectoryShape, new_tokens
from rose.bench.faults.site import VOCAB, Site, SiteConfig, running
from rose.errors import RoseError
from rose.observe.latency import percentile
from rose.types import HopEnd, Sampling, Turn, TurnResult

Say = Callable[[str], None]
_GROUP_SIZE = 8
_SHOWN = 20
_LOGPROB_LIMITS = {"float32": {"max": 1e-4}, "bfloat16": {"mean": 5e-3, "p99": 3e-2}}


@attrs.frozen(kw_only=True)
class FaultsConfig:
    """One benchmark.

    Attributes:
        site: Its engines.
        shapes: The trajectories.
        num_faults: In the disturbed run; ``plan`` goes before it.
        plan: The faults; drawn by the seed when left out.
        timeout_s: Of each of the two runs.
        seed: Of what comes in, and of the faults.
    """

    site: SiteConfig
    shapes: Sequence[TrajectoryShape] = attrs.field(validator=checks.Check("at least one trajectory", bool))
    num_faults: int = attrs.field(default=15, validator=checks.integer(0))
    plan: Sequence[PlannedFault] | None = None
    timeout_s: float = attrs.field(default=1800.0, validator=checks.number(above=0))
    seed: int = 0

    @property
    def num_turns(self) -> int:
        """Turns of all trajectories."""
        return sum(map(len, self.shapes))


@attrs.define(eq=False)
class Rollout:
    """One pass over all trajectories: their turns in order, what failed, and how long it took."""

    turns: list[list[TurnResult]]
    failures: list[str] = attrs.field(factory=list)
    num_done: int = 0
    wall_s: float = 0.0
    faults: list[DoneFault] = attrs.field(factory=list)


async def run_faults(config: FaultsConfig, *, say: Say = print) -> dict[str, Any]:
    """Make both runs on one site and return the figures; ``problems`` is empty when all held.

    Raises:
        ExceptionGroup: Engines do not start.
    """
    async with running(config.site) as site:
        say(f"{len(site.engines)} engines are up")
        calm = await _roll_out(config, site, (), "calm")
        say(f"undisturbed: {calm.num_done} turns in {calm.wall_s:.1f} s")
        plan = config.plan
        if plan is None:
            plan = plan_faults(config.num_faults, config.num_turns, seed=config.seed)
        hurt = await _roll_out(config, site, plan, "hurt")
        say(f"with {len(hurt.faults)} faults: {hurt.num_done} turns in {hurt.wall_s:.1f} s")
        async with asyncio.timeout(config.timeout_s):
            await site.wait_until_all_work()
        starts = {str(engine.engine_id): engine.num_starts for engine in site.engines}
    return report(config, calm, hurt, plan) | {"starts": starts}


async def _roll_out(config: FaultsConfig, site: Site, plan: Sequence[PlannedFault], label: str) -> Rollout:
    loop = asyncio.get_running_loop()
    rollout = Rollout([[] for _ in config.shapes])
    faulter = Faulter(site, plan, lambda: rollout.num_done, stop_s=2 * config.site.stall_s)
    began_s = loop.time()
    async with asyncio.timeout(config.timeout_s):
        faults = asyncio.create_task(faulter.run())
        try:
            async with asyncio.TaskGroup() as group:
                for number in range(len(config.shapes)):
                    group.create_task(_trajectory(config, site, rollout, number, label))
        finally:
            rollout.wall_s = loop.time() - began_s
            faults.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await faults
    rollout.faults = faulter.done
    return rollout


async def _trajectory(config: FaultsConfig, site: Site, rollout: Rollout, number: int, label: str) -> None:
    tokens: list[int] = []
    for index, shape in enumerate(config.shapes[number]):
        tokens += new_tokens(number, index, shape.num_new, vocab=VOCAB, seed=config.seed)
        turn = Turn(
            trajectory_id=f"{label}-{number}",
            group_id=f"{label}-{number // _GROUP_SIZE}",
            prompt_ids=tuple(tokens),
            sampling=Sampling(max_tokens=shape.num_answer, temperature=0.0, ignore_eos=True),
        )
        try:
            result = await site.pool.generate(turn)
        except RoseError as error:
            rollout.failures.append(f"trajectory {number}, turn {index}: {error}")
            return
        rollout.turns[number].append(result)
        rollout.num_done += 1
        tokens += result.token_ids


@attrs.frozen(kw_only=True)
class Comparison:
    """Two runs, trajectory by trajectory, up to the first token that differs.

    Attributes:
        num_different: Trajectories with a token that differs.
        num_tokens: Tokens that were compared.
        differences: Of their log-probs.
    """

    num_different: int
    num_tokens: int
    differences: Sequence[float]


def compare(calm: Sequence[Sequence[TurnResult]], hurt: Sequence[Sequence[TurnResult]]) -> Comparison:
    """Compare the tokens and log-probs of two runs of the same trajectories."""
    num_different, differences = 0, []
    for one, other in zip(calm, hurt, strict=True):
        left, right = _tokens(one), _tokens(other)
        equal = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a[0] != b[0]), None)
        num_different += equal is not None or len(left) != len(right)
        differences += [abs(a[1] - b[1]) for a, b in zip(left[:equal], right[:equal], strict=False)]
    return Comparison(num_different=num_different, num_tokens=len(differences), differences=differences)


def _tokens(turns: Sequence[TurnResult]) -> list[tuple[int, float]]:
    return [pair for turn in turns for pair in zip(turn.token_ids, turn.logprobs, strict=True)]


def report(config: FaultsConfig, calm: Rollout, hurt: Rollout, plan: Sequence[PlannedFault]) -> dict[str, Any]:
    """Return the figures of both runs, and as ``problems`` what did not hold."""
    compared = compare(calm.turns, hurt.turns)
    gaps = {
        "mean": math.fsum(compared.differences) / max(1, compared.num_tokens),
        "p99": percentile(compared.differences, 99) or 0.0,
        "max": max(compared.differences, default=0.0),
    }
    problems = [f"undisturbed: {text}" for text in calm.failures] + [f"disturbed: {text}" for text in hurt.failures]
    if len(hurt.faults) < len(plan):
        problems.append(f"only {len(hurt.faults)} of {len(plan)} faults happened before the run was over")
    problems += _wrong_budgets(config, calm) + _wrong_budgets(config, hurt)
    if compared.num_different and config.site.dtype == "float32":
        problems.append(f"{compared.num_different} trajectories have other tokens than undisturbed")
    problems += [
        f"log-probs differ by {gaps[name]:.2g} ({name}), more than {limit:g}"
        for name, limit in _LOGPROB_LIMITS[config.site.dtype].items()
        if gaps[name] > limit
    ]
    return {
        "problems": problems[:_SHOWN],
        "trajectories": len(config.shapes),
        "turns": config.num_turns,
        "tokens_compared": compared.num_tokens,
        "trajectories_with_other_tokens": compared.num_different,
        "logprob_differences": gaps,
        "undisturbed": _figures(calm),
        "disturbed": _figures(hurt),
        "faults": _faults(hurt.faults),
        "log": [attrs.asdict(fault) | {"kind": fault.kind.value} for fault in hurt.faults],
    }


def _wrong_budgets(config: FaultsConfig, rollout: Rollout) -> list[str]:
    return [
        f"trajectory {number}, turn {index}: {len(turn.token_ids)} tokens in place of {shape.num_answer}"
        for number, (shapes, turns) in enumerate(zip(config.shapes, rollout.turns, strict=True))
        for index, (shape, turn) in enumerate(zip(shapes, turns, strict=False))
        if len(turn.token_ids) != shape.num_answer or sum(hop.num_tokens for hop in turn.hops) != shape.num_answer
    ]


def _figures(rollout: Rollout) -> dict[str, Any]:
    turns = [turn for trajectory in rollout.turns for turn in trajectory]
    hops = [hop for turn in turns for hop in turn.hops]
    made: Counter[str] = Counter()
    for hop in hops:
        made[hop.engine_id] += hop.num_tokens
    return {
        "wall_s": round(rollout.wall_s, 1),
        "turns_finished": rollout.num_done,
        "tokens": sum(made.values()),
        "hops": dict(sorted(Counter(hop.ended.value for hop in hops).items())),
        "tokens_by_engine": dict(sorted(made.items())),
        "turns_moved_with_tokens": sum(
            any(hop.num_tokens and hop.ended is not HopEnd.FINISHED for hop in turn.hops) for turn in turns
        ),
    }


def _faults(done: Sequence[DoneFault]) -> dict[str, Any]:
    return {
        kind.value: {
            "number": sum(fault.kind is kind for fault in done),
            "turns_in_flight": sum(fault.num_in_flight for fault in done if fault.kind is kind),
        }
        for kind in FaultKind
    }
