"""The demo names what is missing before it starts anything."""

from __future__ import annotations

import pytest

from rose.errors import BackendUnavailableError
from rose.reference import demo


def test_all_missing_libraries_are_named_with_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name in {"gymnasium", "torch"} else object())
    with pytest.raises(
        BackendUnavailableError, match=r"the demo needs torch, gymnasium, .*pip install 'rose-rl\[demo\]'"
    ):
        demo.check_libraries()


def test_nothing_is_said_when_all_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: object())
    demo.check_libraries()


def test_megatron_is_missed_only_where_it_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda name: None if name == "megatron" else object())
    demo.check_libraries("fsdp")
    with pytest.raises(BackendUnavailableError, match="the demo needs megatron, "):
        demo.check_libraries("megatron")
