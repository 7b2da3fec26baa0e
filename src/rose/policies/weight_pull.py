"""Whether a borrowed engine should get a new version of the weights now: only when its loan is likely to pay for the bytes. Pure.

The exchange: bytes occupy the link between the clusters, which costs the job ``link_price`` rollout seconds a second. An engine
that makes r of the job's R tokens a second, and that is expected to be useful for u more seconds once the version is in place,
saves it u * r / R rollout seconds. Engines of one cluster share what has crossed, so they are weighed together and what is there
already is free.

Invariants:

* Dedicated engines always pull.
* Nothing is held back for want of figures: an engine, link or job that was never measured pulls.
* A decision is changed only when the figures are clear: one that waits begins to pull when the cautious estimate of its loan pays
  with a margin, one that pulls stops when even the hopeful one does not.
* Loans are judged by how long other loans of that age went on. A loan that may end before the version is in place is not
  refused for that alone; it counts with the time that is left on average.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence

import attrs

from rose import checks
from rose.types import EngineId


class PullAction(enum.Enum):
    """What an engine does about the newest version."""

    PULL = "pull"
    WAIT = "wait"
    SKIP = "skip"


class PullReason(enum.Enum):
    """Why. Closed list."""

    DEDICATED = "the engine is the job's own"
    UNMEASURED = "there are no figures yet to decide by"
    FREE = "what it needs has crossed the link already"
    PAYS = "the loan pays for the bytes"
    DOES_NOT_PAY = "the loan does not pay for the bytes"
    LOAN_TOO_SHORT = "the loan is over before the version could be in place"
    STILL_ADMISSIBLE = "its version will do for the next version too"


@attrs.frozen(kw_only=True)
class PullConfig:
    """Terms of the exchange.

    Attributes:
        link_price: Rollout seconds that the job loses for each second the link is taken; 0 where nobody else wants it.
        margin_fraction: By how much a gain must be above, or below, its cost to change a decision.
        max_staleness: Versions that an engine may be behind and still be of use. One that has reached that is weighed as if it
            were of none, since the next version makes it so.
        prior_loan_s: How long a loan lasts as long as none has been seen; weighs as much as one loan.
    """

    link_price: float = attrs.field(default=1.0, validator=checks.number(at_least=0))
    margin_fraction: float = attrs.field(default=0.2, validator=checks.number(at_least=0, at_most=1))
    max_staleness: int = attrs.field(default=0, validator=checks.integer(0))
    prior_loan_s: float = attrs.field(default=600.0, validator=checks.number(above=0))


@attrs.frozen(kw_only=True)
class LoanEstimate:
    """How much longer a loan is expected to last.

    Attributes:
        mean_s: The expectation; ``inf`` for what never ends.
        error_fraction: Its relative standard error; it may as well be 1 + this times larger or smaller.
    """

    mean_s: float
    error_fraction: float = 0.0

    @property
    def cautious_s(self) -> float:
        """Return the low end."""
        return self.mean_s / (1 + self.error_fraction)

    @property
    def hopeful_s(self) -> float:
        """Return the high end."""
        return self.mean_s * (1 + self.error_fraction)


@attrs.frozen(kw_only=True)
class PullCandidate:
    """One engine that is not at the newest version.

    Attributes:
        engine_id: The engine.
        is_dedicated: It is the job's own.
        pieces: What it needs: key of a manifest -> bytes of the update, as they cross the link.
        versions_behind: How many versions; ``None`` when it has none of this run, or is fenced.
        loan: What is left of its loan.
        tokens_per_s: What it makes when it works; ``None`` when that was never seen.
        stage_s: Fetching from its own cluster and decoding, the crossing not counted.
        pause_s: It stands still to activate.
        was_pulling: The last decision about this engine was to pull; ``None`` when there was none.
    """

    engine_id: EngineId
    is_dedicated: bool
    pieces: Mapping[str, int]
    versions_behind: int | None
    loan: LoanEstimate
    tokens_per_s: float | None
    stage_s: float = 0.0
    pause_s: float = 0.0
    was_pulling: bool | None = None


@attrs.frozen(kw_only=True)
class ClusterSnapshot:
    """The engines of one cluster and its link.

    Attributes:
        candidates: Those that could pull.
        present: Keys that have crossed the link.
        link_bytes_per_s: What the link has left for this; ``None`` when that is not known.
        job_tokens_per_s: Of all engines of the job that are at an admissible version, the candidates not counted;
            ``None`` when that was never seen.
    """

    candidates: Sequence[PullCandidate]
    present: frozenset[str] = frozenset()
    link_bytes_per_s: float | None
    job_tokens_per_s: float | None


@attrs.frozen(kw_only=True)
class PullPlan:
    """What one engine does, and the figures it rests on, in rollout seconds of the job.

    Attributes:
        action: Pull now; wait until the next version or until its lease is renewed; skip this version.
        reason: Why.
        gain_s: What the engines that share the crossing save.
        cost_s: What the crossing costs.
    """

    action: PullAction
    reason: PullReason
    gain_s: float = 0.0
    cost_s: float = 0.0


def estimate_loan(
    config: PullConfig, *, ended_s: Iterable[float], running_s: Iterable[float], age_s: float
) -> LoanEstimate:
    """Return how much longer a loan of age ``age_s`` goes on, from how long others did that were as old.

    Args:
        config: Has what is believed at first.
        ended_s: How long loans lasted that are over.
        running_s: How old the others are that still run.
        age_s: The loan's own.
    """
    rests = [duration_s - age_s for duration_s in ended_s if duration_s > age_s]
    so_far = sum(duration_s - age_s for duration_s in running_s if duration_s > age_s)
    weight = len(rests) + 1
    mean_s = (sum(rests) + so_far + config.prior_loan_s) / weight
    return LoanEstimate(mean_s=mean_s, error_fraction=1 / math.sqrt(weight))


def useful_s(loan_s: float, ready_s: float) -> float:
    """Return the expected time that is left after ``ready_s`` of a loan whose rest is ``loan_s`` on average, exponential."""
    if math.isinf(loan_s):
        return loan_s
    return loan_s * math.exp(-ready_s / loan_s) if loan_s > 0 else 0.0


def plan_pulls(config: PullConfig, cluster: ClusterSnapshot) -> dict[EngineId, PullPlan]:
    """Return what each candidate does.

    Candidates that need the same pieces are weighed together, the cheapest group first; what a group that pulls brings over is
    free for the next.
    """
    plans: dict[EngineId, PullPlan] = {}
    present = set(cluster.present)
    for group in _groups(cluster, plans, present):
        new_bytes = sum(size for key, size in group[0].pieces.items() if key not in present)
        verdict = _weigh(config, cluster, group, new_bytes)
        plans.update(verdict)
        if any(plan.action is PullAction.PULL for plan in verdict.values()):
            present |= group[0].pieces.keys()
    return plans


def _groups(cluster: ClusterSnapshot, plans: dict[EngineId, PullPlan], present: set[str]) -> list[list[PullCandidate]]:
    """Plan what needs no weighing; return the rest by pieces, fewest bytes first."""
    by_pieces: dict[frozenset[str], list[PullCandidate]] = {}
    for each in cluster.candidates:
        if each.is_dedicated:
            plans[each.engine_id] = PullPlan(action=PullAction.PULL, reason=PullReason.DEDICATED)
        elif not cluster.link_bytes_per_s or cluster.job_tokens_per_s is None or each.tokens_per_s is None:
            plans[each.engine_id] = PullPlan(action=PullAction.PULL, reason=PullReason.UNMEASURED)
        else:
            by_pieces.setdefault(frozenset(each.pieces), []).append(each)
            continue
        present |= each.pieces.keys()
    return sorted(by_pieces.values(), key=lambda group: sum(group[0].pieces.values()))


def _weigh(
    config: PullConfig, cluster: ClusterSnapshot, group: Sequence[PullCandidate], new_bytes: int
) -> dict[EngineId, PullPlan]:
    """Decide for engines that need the same pieces, ``new_bytes`` of which have yet to cross."""
    crossing_s = new_bytes / (cluster.link_bytes_per_s or math.inf)
    cost_s = crossing_s * config.link_price
    total = (cluster.job_tokens_per_s or 0.0) + sum(each.tokens_per_s or 0.0 for each in group)
    gains_s = [_gain_s(config, each, total, crossing_s) for each in group]
    gain_s = sum(gains_s)
    plans = {}
    for each, own_s in zip(group, gains_s, strict=True):
        if own_s > 0 and gain_s >= cost_s:
            action, reason = PullAction.PULL, PullReason.PAYS if new_bytes else PullReason.FREE
        else:
            action, reason = _put_off(config, each, crossing_s + each.stage_s + each.pause_s, is_free=not new_bytes)
        plans[each.engine_id] = PullPlan(action=action, reason=reason, gain_s=gain_s, cost_s=cost_s)
    return plans


def _gain_s(config: PullConfig, each: PullCandidate, total_tokens_per_s: float, crossing_s: float) -> float:
    """Return the rollout seconds that a candidate saves, leaning to the decision that is in force."""
    if _can_wait(config, each) or not total_tokens_per_s:
        return 0.0
    loan_s, lean = each.loan.mean_s, 1.0
    if each.was_pulling is not None:
        loan_s = each.loan.hopeful_s if each.was_pulling else each.loan.cautious_s
        lean = 1 + config.margin_fraction if each.was_pulling else 1 / (1 + config.margin_fraction)
    rest_s = useful_s(loan_s, crossing_s + each.stage_s + each.pause_s)
    return lean * rest_s * (each.tokens_per_s or 0.0) / total_tokens_per_s


def _can_wait(config: PullConfig, each: PullCandidate) -> bool:
    """Tell whether the engine will be of use at the version it has even when the next one is out."""
    return each.versions_behind is not None and each.versions_behind < config.max_staleness


def _put_off(
    config: PullConfig, each: PullCandidate, ready_s: float, *, is_free: bool
) -> tuple[PullAction, PullReason]:
    if _can_wait(config, each):
        if is_free:
            return PullAction.PULL, PullReason.FREE
        return PullAction.WAIT, PullReason.STILL_ADMISSIBLE
    if each.loan.hopeful_s <= ready_s:
        return PullAction.SKIP, PullReason.LOAN_TOO_SHORT
    return PullAction.WAIT, PullReason.DOES_NOT_PAY
