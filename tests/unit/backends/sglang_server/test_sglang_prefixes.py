"""Keys of cached prefixes by the generation of the weights."""

from __future__ import annotations

import pytest

from rose.backends.sglang_server.prefixes import keyed


@pytest.mark.parametrize("own", [None, "tenant", "a|b"])
def test_requests_of_one_generation_share_and_of_two_do_not(own: str | None) -> None:
    assert keyed(own, 0) == own
    first, second = keyed(own, 1), keyed(own, 2)
    assert len({own, first, second}) == 3
    assert keyed(first, 1) == first
    assert keyed(first, 2) == second, "a request that waits over an update belongs to the new weights"


def test_requests_keep_apart_by_their_own_keys() -> None:
    assert keyed("a", 3) != keyed("b", 3)
    assert keyed("", 0) is None
