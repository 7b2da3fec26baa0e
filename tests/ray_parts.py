"""Parts of the tests of ``rose.hosts.ray``: a registry with a fake engine in it, hosts without Ray, connections that break."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

from rose.errors import EngineLostError, RoseError
from rose.hosts.ray.engine_host import EngineHost
from rose.hosts.ray.peers import LocalPeer, Peer
from rose.hosts.ray.pool_host import PoolHost
from rose.hosts.ray.specs import EngineSpec, PoolSpec
from rose.pool import PoolConfig
from rose.types import EngineId, Sampling, Turn

FAKES = """
from rose.testing import FakeEngine
from rose.types import EngineId, WeightVersion

class Fake(FakeEngine):
    def __init__(self, engine_id, *, version=None, **options):
        version = None if version is None else WeightVersion.parse(version)
        super().__init__(engine_id=EngineId(engine_id), weight_version=version, **options)

class NeverStarts(Fake):
    async def start(self):
        raise RuntimeError("no such GPU")
"""


def install_fakes(folder: Path) -> None:
    """Write a distribution into ``folder`` that offers the serving backends ``fake`` and ``never-starts``."""
    info = folder / "ray_fakes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray-fakes\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[rose.serving]\nfake = ray_fakes:Fake\nnever-starts = ray_fakes:NeverStarts\n"
    )
    (folder / "ray_fakes.py").write_text(FAKES)


def fake(engine_id: str, *, backend: str = "fake", **options: Any) -> EngineSpec:
    """Return the spec of a fake engine: a token a millisecond, the same tokens on all."""
    own = {name: options.pop(name) for name in ("kind", "resources", "labels", "is_pinned", "relay") if name in options}
    return EngineSpec(engine_id=engine_id, backend=backend, options={"token_s": 0.001, **options}, **own)


def turn(number: int = 0, *, num_tokens: int = 8) -> Turn:
    """Return the first turn of a trajectory."""
    return Turn(
        trajectory_id=f"t{number}",
        group_id="g",
        prompt_ids=(1, 2, number),
        sampling=Sampling(max_tokens=num_tokens, temperature=0.0),
    )


class Cable:
    """A connection that can be cut: calls raise, those under way included; and plugged into another host."""

    def __init__(self, host: object, unreachable: type[RoseError] = EngineLostError) -> None:
        self.host: object | None = host
        self.calls: list[str] = []
        self.is_gone = False
        self._unreachable = unreachable
        self._cut = asyncio.Event()

    def cut(self) -> None:
        self.host = None
        self._cut.set()

    def plug(self, host: object) -> None:
        self.host, self._cut = host, asyncio.Event()

    def _error(self) -> RoseError:
        return self._unreachable("the cable was cut")

    async def call(self, method: str, *arguments: Any) -> Any:
        self.calls.append(method)
        if self.host is None:
            raise self._error()
        work = asyncio.ensure_future(LocalPeer(self.host).call(method, *arguments))
        cut = asyncio.ensure_future(self._cut.wait())
        try:
            await asyncio.wait({work, cut}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            raise self._error()
        finally:
            work.cancel()
            cut.cancel()


class Site:
    """Engine hosts by id, and pools over them, in this process."""

    def __init__(self, **engines: EngineSpec) -> None:
        self.cables = {
            EngineId(name): Cable(EngineHost(spec, node_id=f"node-{name}")) for name, spec in engines.items()
        }
        self.pools: list[PoolHost] = []

    async def find(self) -> Mapping[EngineId, Peer]:
        return dict(self.cables)

    def pool(self, **options: Any) -> PoolHost:
        config = PoolConfig(reading_interval_s=0.02, close_timeout_s=0.5)
        spec = PoolSpec(**{"name": "p", "config": config, "rejoin_s": 0.02, **options})
        self.pools.append(PoolHost(spec, find=self.find, node_id="node-pool"))
        return self.pools[-1]

    def engine(self, engine_id: str) -> Any:
        """Return the fake engine behind a host that has started it."""
        return self.cables[EngineId(engine_id)].host._engine.result()  # type: ignore[union-attr]

    async def close(self) -> None:
        for pool in self.pools:
            await pool.close()
        for cable in self.cables.values():
            if cable.host is not None:
                await cable.host.close()  # type: ignore[attr-defined]


@contextlib.asynccontextmanager
async def site(**engines: EngineSpec) -> AsyncIterator[Site]:
    """Give a site whose tasks have all ended afterwards."""
    made = Site(**engines)
    try:
        yield made
    finally:
        await made.close()


async def until(is_true: Any, what: str = "it") -> None:
    """Wait until a condition holds; the suite's own timeout bounds it."""
    async with asyncio.timeout(20.0):
        while not is_true():
            await asyncio.sleep(0.005)
