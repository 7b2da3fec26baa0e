"""What a check may find, in the standard library's terms: pytest knows them, and so does ``rose.testing.conformance`` without it."""

from __future__ import annotations

import contextlib
import unittest
from collections.abc import Iterator
from typing import NoReturn

from rose.errors import EngineUnsupportedError


def cannot(why: str) -> NoReturn:
    """End a check that cannot be made of this backend.

    Raises:
        unittest.SkipTest: Always.
    """
    raise unittest.SkipTest(why)


@contextlib.contextmanager
def raising(*kinds: type[Exception]) -> Iterator[None]:
    """Check that the block raises one of these.

    Raises:
        AssertionError: It did not.
    """
    try:
        yield
    except kinds:
        return
    names = " or ".join(kind.__name__ for kind in kinds)
    message = f"nothing was raised where {names} is due"
    raise AssertionError(message)


@contextlib.contextmanager
def skipping_what_is_unsupported() -> Iterator[None]:
    """Turn ``EngineUnsupportedError`` into a check that cannot be made.

    Raises:
        unittest.SkipTest: The block met one.
    """
    try:
        yield
    except EngineUnsupportedError as error:
        cannot(str(error))
