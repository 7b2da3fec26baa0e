"""New weights without weights: updates that a ``FakeEngine`` takes by their version number alone."""

from __future__ import annotations

import attrs

from rose.types import TransportAddress, WeightUpdate, WeightVersion


def fake_update(target: WeightVersion) -> WeightUpdate:
    """Return an update that a ``FakeEngine`` takes without looking at any blob."""
    return WeightUpdate(target=target, manifest_keys=("fake",), address=TransportAddress(name="memory"))


@attrs.define
class FakeUpdateSource:
    """Where a pool under test learns of new weights: a version number, no blobs.

    Example:
        >>> source = FakeUpdateSource()
        >>> source.publish()
        WeightVersion(run='fake', n=0)
    """

    run: str = "fake"
    version: WeightVersion | None = None

    def publish(self) -> WeightVersion:
        """Make the next version and return it."""
        self.version = WeightVersion(self.run, 0 if self.version is None else self.version.n + 1)
        return self.version

    async def plan(self, known: WeightVersion | None) -> WeightUpdate | None:
        """Return the update to the newest version, or ``None`` when the engine has it."""
        if self.version is None or self.version == known:
            return None
        return fake_update(self.version)
