"""What is to run on a cluster, said once."""

from __future__ import annotations

import builtins
import pickle

import pytest

import rose.hosts.ray
from ray_parts import fake
from rose.errors import BackendUnavailableError
from rose.hosts.ray.specs import DeploymentSpec, PoolSpec, ProcessSpec
from rose.policies.node_placement import PartRole


def relay(name: str = "relay") -> ProcessSpec:
    return ProcessSpec(name=name, role=PartRole.RELAY, arguments=("relay",), environment={"TOKEN": "secret"})


def test_parts_have_the_names_of_their_actors():
    spec = DeploymentSpec(
        pool=PoolSpec(name="p", engines=(fake("own"),)),
        engines=(fake("e", resources={"GPU": 1.0}, labels={"zone": "x"}),),
        processes=(relay(), ProcessSpec(name="gpu0", role=PartRole.EXECUTOR, arguments=("serve", "gpu0.toml"))),
    )
    parts = {part.name: part for part in spec.parts()}
    assert {name: part.role for name, part in parts.items()} == {
        "pool": PartRole.POOL,
        "engine/e": PartRole.ENGINE,
        "process/relay": PartRole.RELAY,
        "process/gpu0": PartRole.EXECUTOR,
    }
    assert (parts["engine/e"].resources, parts["engine/e"].labels) == ({"GPU": 1.0}, {"zone": "x"})


def test_specs_pickle_and_do_not_show_tokens():
    spec = DeploymentSpec(pool=PoolSpec(name="p"), engines=(fake("e"),), processes=(relay(),))
    assert pickle.loads(pickle.dumps(spec)) == spec  # noqa: S301 - our own
    assert "secret" not in repr(spec)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engines": (fake("e"), fake("e"))}, "two of the engines are called 'e'"),
        (
            {"pool": PoolSpec(name="p", engines=(fake("e"),)), "engines": (fake("e"),)},
            "two of the engines are called 'e'",
        ),
        ({"processes": (relay(), relay())}, "two of the processes are called 'relay'"),
        ({"engines": (fake("e", relay="r"),)}, "engine 'e': relay 'r' is none of the relays, which are []"),
        ({"pool": PoolSpec(name="p")}, None),
    ],
)
def test_what_does_not_fit_together_is_refused(given, message):
    given = {"pool": PoolSpec(name="p"), **given}
    if message is None:
        DeploymentSpec(**given)
        return
    with pytest.raises(ValueError, match=message.replace("[", r"\[").replace("]", r"\]")):
        DeploymentSpec(**given)


@pytest.mark.parametrize("name", ["", "a/b", "a b"])
def test_names_can_be_parts_of_actor_names(name):
    with pytest.raises(ValueError, match="name must be a string like"):
        PoolSpec(name=name)


def test_without_ray_the_extra_is_named(monkeypatch):
    real = builtins.__import__

    def without_ray(name, *arguments, **options):
        if name.partition(".")[0] == "ray":
            message = "No module named 'ray'"
            raise ModuleNotFoundError(message, name="ray")
        return real(name, *arguments, **options)

    for module in ("rose.hosts.ray.actors", "rose.hosts.ray.deployment"):
        monkeypatch.delitem(__import__("sys").modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", without_ray)
    with pytest.raises(BackendUnavailableError, match=r"pip install 'rose-rl\[ray\]'"):
        rose.hosts.ray.deploy  # noqa: B018 - the lookup is what is tested
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        rose.hosts.ray.nothing  # noqa: B018
