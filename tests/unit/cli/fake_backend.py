"""The command line with a serving backend ``fake``: fake engines that play FrozenLake. Run as a process by tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Self

from rose import registry
from rose.cli.main import main
from rose.interfaces import Clock
from rose.testing import FakeEngine


class Fake(FakeEngine):
    """A fake engine as a job file makes one."""

    @classmethod
    def from_options(cls, options: Mapping[str, Any], *, clock: Clock) -> Self:
        """Make one; what a real engine would want beside that is left out."""
        known = {name: value for name, value in options.items() if name != "model"}
        return cls(clock=clock, **known)


def run(argv: list[str]) -> int:
    """Run the command line."""
    load, check_name = registry.load, registry.check_name
    registry.load = lambda role, name: Fake if name == "fake" else load(role, name)
    registry.check_name = lambda role, name: None if name == "fake" else check_name(role, name)
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
