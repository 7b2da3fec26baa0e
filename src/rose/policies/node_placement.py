"""On which node of a cluster each part of a job runs. Pure: nodes and wanted parts in, assignments out.

Invariants:

* The same nodes and parts give the same plan, in whatever order they come.
* No node is given more than it has, and a part with labels only goes to a node that has all of them.
* A part that was placed before stays where it is as long as its node is there and fits.
"""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

import attrs

from rose import checks

_TOLERANCE = 1e-9


class PartRole(enum.Enum):
    """What a part is, in the order in which parts are placed. Closed list.

    ``executor``: shares a device, so it is bound to that device's node by labels. ``engine``: a dedicated engine; spread over the nodes.
    ``relay``: one copy of the weights; wanted once for each node that it is to serve, or once for all. ``pool``: away from the engines
    where there is room, since the loss of a node should cost as little as possible.
    """

    EXECUTOR = "executor"
    ENGINE = "engine"
    RELAY = "relay"
    POOL = "pool"


@attrs.frozen(kw_only=True)
class Node:
    """One machine of the cluster.

    Attributes:
        node_id: Its name, unique.
        resources: What it has in all, by resource name: ``{"CPU": 16.0, "GPU": 8.0}``.
        labels: Plain labels, for instance of its devices.
    """

    node_id: str = attrs.field(validator=checks.text(r".+"))
    resources: Mapping[str, float] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Part:
    """One part that is to run somewhere.

    Attributes:
        name: Unique among the parts.
        role: What it is.
        resources: What it takes of its node.
        labels: What its node must have.
    """

    name: str = attrs.field(validator=checks.text(r".+"))
    role: PartRole = attrs.field(validator=checks.instance(PartRole))
    resources: Mapping[str, float] = attrs.field(factory=dict)
    labels: Mapping[str, str] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Placement:
    """Where parts run.

    Attributes:
        nodes: Part name -> node id.
        unplaced: Part name -> why no node takes it; says what is missing.
    """

    nodes: Mapping[str, str]
    unplaced: Mapping[str, str]


def plan_placement(
    nodes: Iterable[Node], wanted: Iterable[Part], *, placed: Mapping[str, str] | None = None
) -> Placement:
    """Say where each part runs.

    Executors come first, since they cannot choose; engines go where the fewest engines are; a relay goes to the node with the most
    engines that has none yet; the pool goes where the fewest engines are. Among equals the node with most of the scarcest wanted
    resource left wins, then the first by id.

    Args:
        nodes: The machines that are there.
        wanted: The parts.
        placed: Part name -> node id of an earlier plan, kept where possible.

    Raises:
        ValueError: Two nodes or two parts have one name.
    """
    plan = _Plan([*nodes])
    order = list(PartRole)
    parts = sorted(wanted, key=lambda part: (order.index(part.role), part.name))
    _check_unique("part", [part.name for part in parts])
    kept = {part.name: place for part in parts if (place := (placed or {}).get(part.name)) is not None}
    for part in parts:
        if part.name in kept and plan.lacks(kept[part.name], part) is None:
            plan.put(kept[part.name], part)
    for part in parts:
        if part.name not in plan.chosen:
            plan.place(part)
    return Placement(nodes=plan.chosen, unplaced=plan.unplaced)


class _Plan:
    """A plan in the making: what is left of each node and what runs there."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        _check_unique("node", [node.node_id for node in nodes])
        self._nodes = {node.node_id: node for node in sorted(nodes, key=lambda node: node.node_id)}
        self._left: dict[str, Counter[str]] = {name: Counter(node.resources) for name, node in self._nodes.items()}
        self._roles: dict[str, Counter[PartRole]] = {name: Counter() for name in self._nodes}
        self.chosen: dict[str, str] = {}
        self.unplaced: dict[str, str] = {}

    def lacks(self, node_id: str, part: Part) -> str | None:
        """Return what the node lacks for the part, ``None`` when it can run there."""
        node = self._nodes.get(node_id)
        if node is None:
            return "it is gone"
        wrong = [f"label {key}={value}" for key, value in part.labels.items() if node.labels.get(key) != value]
        left = self._left[node_id]
        short = [
            f"{amount:g} {name} (of {node.resources.get(name, 0.0):g}, {left[name]:g} left)"
            for name, amount in part.resources.items()
            if left[name] + _TOLERANCE < amount
        ]
        return ", ".join(wrong + short) or None

    def put(self, node_id: str, part: Part) -> None:
        self._left[node_id].subtract(part.resources)
        self._roles[node_id][part.role] += 1
        self.chosen[part.name] = node_id

    def place(self, part: Part) -> None:
        lacking = {node_id: self.lacks(node_id, part) for node_id in self._nodes}
        fitting = [node_id for node_id, what in lacking.items() if what is None]
        if fitting:
            self.put(min(fitting, key=lambda node_id: self._rank(node_id, part)), part)
            return
        reasons = "; ".join(f"{node_id} lacks {what}" for node_id, what in lacking.items())
        self.unplaced[part.name] = reasons or "there is no node"

    def _rank(self, node_id: str, part: Part) -> tuple[float, ...]:
        """Order of preference; smaller is better. Ties are broken by the order of ``_nodes``, which is that of the ids."""
        roles, left = self._roles[node_id], self._left[node_id]
        num_engines = roles[PartRole.ENGINE]
        room = min((left[name] / amount for name, amount in part.resources.items() if amount > 0), default=math.inf)
        crowd = sum(roles.values())
        if part.role is PartRole.RELAY:
            return (roles[PartRole.RELAY], -(num_engines + roles[PartRole.EXECUTOR]), -room)
        return (num_engines, crowd, -room)


def _check_unique(what: str, names: Collection[str]) -> None:
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        message = f"two {what}s are called {twice[0]!r}; names must be unique"
        raise ValueError(message)
