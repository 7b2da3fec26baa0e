"""What a pool knows for ``rose.policies.weight_pull``: how long loans last, how fast engines work, what a version costs to fetch.

Borrowed engines count as one cluster: what one of them has fetched has crossed the link for all. Figures are of this pool's own
engines; without any, the policy lets engines pull.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import attrs

from rose.policies.routing import EngineState
from rose.policies.weight_pull import (
    ClusterSnapshot,
    PullAction,
    PullCandidate,
    PullConfig,
    PullPlan,
    estimate_loan,
    plan_pulls,
)
from rose.pool.membership import Member, Membership
from rose.types import Activation, EngineId, EngineKind, WeightUpdate

_SMOOTHING = 0.3
_MAX_KEYS = 4096


@attrs.frozen(kw_only=True)
class PullCost:
    """What an update costs an engine of another cluster.

    Attributes:
        pieces: Key of a manifest -> bytes of it that cross the link.
        present: Keys that have crossed already, as far as the source knows; the pool adds what its engines fetched.
        link_bytes_per_s: What the link has left; ``None``: the pool goes by what its engines measured.
        stage_s: Fetching and decoding once the pieces are in the cluster.
    """

    pieces: Mapping[str, int]
    present: frozenset[str] = frozenset()
    link_bytes_per_s: float | None = None
    stage_s: float = 0.0


@runtime_checkable
class SupportsPullCost(Protocol):
    """A source of updates that knows what they cost."""

    async def cost(self, update: WeightUpdate) -> PullCost:
        """Return what an update costs.

        Raises:
            BlobNotFoundError: A version was retired; plan again.
        """


class PullDesk:
    """Weighs updates of borrowed engines.

    Args:
        config: Terms.
        engines: The pool's.
    """

    def __init__(self, config: PullConfig, engines: Membership) -> None:
        self._config, self._engines = config, engines
        self._present: dict[str, None] = {}
        self._was_pulling: dict[EngineId, bool] = {}
        self._bytes_per_s: float | None = None
        self._pause_s = 0.0

    def decide(self, wanted: Sequence[tuple[Member, WeightUpdate, PullCost]], now_s: float) -> dict[EngineId, PullPlan]:
        """Return what each borrowed engine does about its update; remembers that for the next time."""
        candidates = [self._candidate(member, update, cost, now_s) for member, update, cost in wanted]
        costs = [cost for _, _, cost in wanted]
        rates = [cost.link_bytes_per_s for cost in costs if cost.link_bytes_per_s is not None]
        cluster = ClusterSnapshot(
            candidates=candidates,
            present=frozenset(self._present).union(*(cost.present for cost in costs)),
            link_bytes_per_s=min(rates) if rates else self._bytes_per_s,
            job_tokens_per_s=self._others_rate([member for member, _, _ in wanted], now_s),
        )
        plans = plan_pulls(self._config, cluster)
        self._was_pulling.update({name: plan.action is PullAction.PULL for name, plan in plans.items()})
        return plans

    def note(self, member: Member, update: WeightUpdate, activation: Activation) -> None:
        """Learn from an update that a borrowed engine acknowledged."""
        if member.kind is not EngineKind.BORROWED:
            return
        is_first = not all(key in self._present for key in update.manifest_keys)
        self._present.update(dict.fromkeys(update.manifest_keys))
        while len(self._present) > _MAX_KEYS:
            del self._present[next(iter(self._present))]
        self._pause_s = _smoothed(self._pause_s or None, activation.pause_s)
        if is_first and activation.stage_s > 0 and activation.fetched_bytes:
            self._bytes_per_s = _smoothed(self._bytes_per_s, activation.fetched_bytes / activation.stage_s)

    def _candidate(self, member: Member, update: WeightUpdate, cost: PullCost, now_s: float) -> PullCandidate:
        version = None if member.state is EngineState.FENCED else member.version
        is_same_run = version is not None and version.run == update.target.run
        borrowed = [each for each in self._engines.members.values() if each.kind is EngineKind.BORROWED]
        return PullCandidate(
            engine_id=member.engine_id,
            is_dedicated=member.kind is EngineKind.DEDICATED,
            pieces=cost.pieces,
            versions_behind=update.target.n - version.n if version is not None and is_same_run else None,
            loan=estimate_loan(
                self._config,
                ended_s=self._engines.ended_loans_s,
                running_s=[now_s - each.joined_s for each in borrowed if each is not member],
                age_s=now_s - member.joined_s,
            ),
            tokens_per_s=_rate(member, now_s) or self._mean_rate(member.kind, now_s),
            stage_s=cost.stage_s,
            pause_s=self._pause_s,
            was_pulling=self._was_pulling.get(member.engine_id),
        )

    def _mean_rate(self, kind: EngineKind, now_s: float) -> float | None:
        """Return the mean rate of the engines of a kind; of all engines when none of that kind has worked."""
        for members in (
            [each for each in self._engines.members.values() if each.kind is kind],
            list(self._engines.members.values()),
        ):
            rates = [rate for each in members if (rate := _rate(each, now_s)) is not None]
            if rates:
                return sum(rates) / len(rates)
        return None

    def _others_rate(self, candidates: Sequence[Member], now_s: float) -> float | None:
        """Return the rate of the engines that work without the candidates; ``None`` when none was seen working."""
        others = [
            each
            for each in self._engines.members.values()
            if each not in candidates
            and (each.state in (EngineState.READY, EngineState.UPDATING) or each.kind is EngineKind.DEDICATED)
            and self._engines.is_present(each)
        ]
        if not others:
            return 0.0 if self._mean_rate(EngineKind.DEDICATED, now_s) is not None else None
        rates = [_rate(each, now_s) or self._mean_rate(each.kind, now_s) for each in others]
        known = [rate for rate in rates if rate is not None]
        return sum(known) if known else None


def _rate(member: Member, now_s: float) -> float | None:
    """Return the tokens a second that an engine made for the pool; ``None`` before the first.

    While it had work for one of the job's own, which also waits while the job trains; while it was here for a borrowed one, whose loan
    runs on when there is nothing for it to do.
    """
    account = member.account
    if member.kind is EngineKind.BORROWED:
        time_s = account.present_s + now_s - member.joined_s
    else:
        time_s = account.busy_s + (now_s - member.busy_since_s if member.held else 0.0)
    return account.num_tokens / time_s if account.num_tokens and time_s > 0 else None


def _smoothed(before: float | None, found: float) -> float:
    return found if before is None else before + _SMOOTHING * (found - before)
