"""Errors cross between an executor and its clients in their own types."""

from __future__ import annotations

import pytest

from rose import errors
from rose.backends.remote import wire

KINDS = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, errors.RoseError) and kind is not errors.EngineLeaseError
]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_comes_back_as_it_was(kind):
    found = wire.error_from_wire(wire.error_to_wire(kind("what happened")), wire.status_of(kind("x")))
    assert type(found) is kind
    assert str(found) == "what happened"


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (501, errors.EngineUnsupportedError),
        (503, errors.EngineBusyError),
        (422, errors.RequestRefusedError),
        (502, errors.EngineLostError),
        (500, errors.EngineError),
    ],
)
def test_the_status_decides_where_the_body_says_nothing(status, kind):
    assert type(wire.error_from_wire(None, status)) is kind


def test_what_an_engine_cannot_do_has_a_status_of_its_own():
    assert wire.status_of(errors.EngineUnsupportedError("no")) == 501
