"""The exception tree: every error is ROSE's and its standard kin, and travels between processes."""

from __future__ import annotations

import inspect
import pickle

import pytest

from rose import errors
from rose.types import EngineId, Hop, HopEnd, RouteReason

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if cls.__module__ == "rose.errors"]


@pytest.mark.parametrize("cls", CLASSES)
def test_errors_pickle_with_their_message(cls):
    copy = pickle.loads(pickle.dumps(cls("what happened, and what to do")))  # noqa: S301 - our own bytes
    assert type(copy) is cls
    assert str(copy) == "what happened, and what to do"


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls is not errors.RoseError])
def test_errors_have_a_standard_parent(cls):
    assert issubclass(cls, errors.RoseError)
    standard = (ValueError, ImportError, RuntimeError, KeyError, ConnectionError, TimeoutError)
    assert issubclass(cls, standard)


def test_the_tree_in_the_docstring_is_the_tree():
    drawn = [line for line in errors.__doc__.splitlines() if "─ " in line]
    assert {line.split("─ ")[1].split()[0] for line in drawn} == {cls.__name__ for cls in CLASSES} - {"RoseError"}


def test_a_failed_turn_keeps_its_hops():
    hop = Hop(engine_id=EngineId("e0"), reason=RouteReason.DEDICATED, num_tokens=3, ended=HopEnd.LOST)
    copy = pickle.loads(pickle.dumps(errors.TurnFailedError("gave up", (hop,))))  # noqa: S301 - our own bytes
    assert copy.hops == (hop,)
    assert str(copy) == "gave up"
