"""Where the parts of a job go."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rose.policies.node_placement import Node, Part, PartRole, plan_placement

E, X, R, P = PartRole.ENGINE, PartRole.EXECUTOR, PartRole.RELAY, PartRole.POOL


def nodes(*gpus: float, **labels: dict[str, str]) -> list[Node]:
    names = "abcdefgh"[: len(gpus)]
    return [
        Node(node_id=name, resources={"GPU": amount, "CPU": 8.0}, labels=labels.get(name, {}))
        for name, amount in zip(names, gpus, strict=True)
    ]


def engines(count: int, **resources: float) -> list[Part]:
    return [Part(name=f"e{i}", role=E, resources=resources or {"GPU": 1.0}) for i in range(count)]


def test_engines_are_spread_and_the_pool_keeps_away_from_them():
    plan = plan_placement(nodes(4, 4, 0), [*engines(4), Part(name="pool", role=P)])
    assert sorted(plan.nodes[f"e{i}"] for i in range(4)) == ["a", "a", "b", "b"]
    assert plan.nodes["pool"] == "c"
    assert not plan.unplaced


def test_an_executor_goes_to_the_node_of_its_device_before_engines_take_the_room():
    there = nodes(1, 1, b={"device": "gpu7"})
    wanted = [*engines(2), Part(name="x", role=X, resources={"GPU": 1.0}, labels={"device": "gpu7"})]
    plan = plan_placement(there, wanted)
    assert plan.nodes == {"x": "b", "e0": "a"}
    assert plan.unplaced == {"e1": "a lacks 1 GPU (of 1, 0 left); b lacks 1 GPU (of 1, 0 left)"}


def test_an_executor_whose_node_is_gone_is_placed_nowhere():
    plan = plan_placement(nodes(4), [Part(name="x", role=X, labels={"device": "gpu7"})], placed={"x": "b"})
    assert plan.unplaced == {"x": "a lacks label device=gpu7"}


def test_relays_go_where_engines_are_one_a_node():
    relays = [Part(name=f"r{i}", role=R) for i in range(3)]
    plan = plan_placement(nodes(0, 2, 1), [*engines(3), *relays])
    assert [plan.nodes[f"r{i}"] for i in range(3)] == ["b", "c", "a"]


def test_what_was_placed_stays_and_the_rest_moves_off_a_lost_node():
    before = plan_placement(nodes(4, 4), engines(4))
    survivors = [node for node in nodes(4, 4) if node.node_id == "b"]
    after = plan_placement(survivors, engines(4), placed=before.nodes)
    assert set(after.nodes.values()) == {"b"}
    grown = plan_placement(nodes(4, 4), engines(6), placed=after.nodes)
    assert [grown.nodes[f"e{i}"] for i in range(6)] == ["b"] * 4 + ["a"] * 2


def test_without_nodes_everything_is_unplaced():
    assert plan_placement([], engines(1)).unplaced == {"e0": "there is no node"}


@pytest.mark.parametrize("what", ["node", "part"])
def test_names_are_unique(what):
    there, wanted = nodes(1), engines(1)
    with pytest.raises(ValueError, match=f"two {what}s are called"):
        plan_placement(there * (1 + (what == "node")), wanted * (1 + (what == "part")))


_RESOURCES = st.dictionaries(st.sampled_from(["GPU", "CPU"]), st.integers(0, 4).map(float))
_LABELS = st.dictionaries(st.sampled_from(["zone", "device"]), st.sampled_from(["1", "2"]))
_NODES = st.lists(
    st.builds(Node, node_id=st.sampled_from("abcde"), resources=_RESOURCES, labels=_LABELS),
    unique_by=lambda n: n.node_id,
)
_PARTS = st.lists(
    st.builds(
        Part, name=st.sampled_from("uvwxyz"), role=st.sampled_from(PartRole), resources=_RESOURCES, labels=_LABELS
    ),
    unique_by=lambda part: part.name,
)


@given(there=_NODES, wanted=_PARTS, shift=st.integers(0, 5))
def test_any_plan_fits_is_whole_and_does_not_depend_on_order(there, wanted, shift):
    plan = plan_placement(there, wanted)
    assert plan.nodes.keys() | plan.unplaced.keys() == {part.name for part in wanted}
    assert not plan.nodes.keys() & plan.unplaced.keys()
    by_id, by_name = {node.node_id: node for node in there}, {part.name: part for part in wanted}
    for node in there:
        mine = [by_name[name] for name, place in plan.nodes.items() if place == node.node_id]
        for resource in ("GPU", "CPU"):
            assert sum(part.resources.get(resource, 0.0) for part in mine) <= node.resources.get(resource, 0.0)
    for name, place in plan.nodes.items():
        assert by_name[name].labels.items() <= by_id[place].labels.items()
    turned = [list(reversed(there)), wanted[shift:] + wanted[:shift]]
    assert plan_placement(*turned) == plan
    assert plan_placement(there, wanted, placed=plan.nodes).nodes == plan.nodes
