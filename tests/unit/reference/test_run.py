"""``rose run`` as a whole, on fake engines, with a stand-in learner and environments in this process."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any, Self

import attrs
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from loop_rig import Episodes, Learner, lake_policy

from rose.config import load
from rose.errors import ConfigError
from rose.hosts.http.pool_service import PoolService, serve_pool
from rose.hosts.job import OpenJob
from rose.interfaces import ServingEngine
from rose.pool import RolloutPool
from rose.reference import run as run_module
from rose.reference.lake import FrozenLake
from rose.reference.loop_config import RunConfig
from rose.reference.run import check_run, run_job, save_model
from rose.testing import FakeEngine, FakeTrainer, FakeUpdateSource
from rose.transfer.publisher import Publisher
from rose.types import EngineId, EngineKind


class LearnerGroup(Learner):
    """A learner of version numbers that publishes real blobs, so that any pool can plan from the store."""

    made: list[LearnerGroup] = []  # noqa: RUF012 - the tests look at it

    def __init__(self, config: Any) -> None:
        super().__init__(FakeUpdateSource())
        self.config = config
        self.trainer = FakeTrainer()
        self.saved: list[Path] = []
        self.store: Any = None
        self.made.append(self)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None

    async def warm_start(self) -> list[float]:
        return [2.0, 1.0]

    async def save_checkpoint(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        self.saved.append(folder)

    async def publish(self, *, run: str, address: Any, is_anchor: bool = False) -> Any:
        self.published.append(is_anchor)
        if not hasattr(self, "publisher"):
            self.publisher = Publisher(self.trainer, self.store, run=run)
        self.trainer.step()
        return attrs.asdict(await self.publisher.publish(anchor=is_anchor))


class Environments(Episodes):
    def __init__(self, spec: str, **options: Any) -> None:
        super().__init__(FrozenLake)
        self.options = options

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        return None


def engines(num: int = 2) -> list[ServingEngine]:
    return [FakeEngine(engine_id=EngineId(f"own{i}"), next_token=lake_policy) for i in range(num)]


@pytest.fixture(autouse=True)
def parts(monkeypatch: pytest.MonkeyPatch) -> None:
    LearnerGroup.made.clear()
    monkeypatch.setattr(run_module, "LearnerGroup", LearnerGroup)
    monkeypatch.setattr(run_module, "EnvironmentPool", Environments)
    opened = run_module.open_store

    @contextlib.contextmanager
    def open_store(config):
        with opened(config) as store:
            given = LearnerGroup.__init__

            def init(self, learner_config):
                given(self, learner_config)
                self.store = store

            monkeypatch.setattr(LearnerGroup, "__init__", init)
            yield store

    @contextlib.asynccontextmanager
    async def open_job(config):
        async with RolloutPool(engines()) as pool:
            await pool.add_engine(FakeEngine(engine_id=EngineId("lent"), next_token=lake_policy), EngineKind.BORROWED)
            yield OpenJob(config=config, pool=pool, lender=None)

    monkeypatch.setattr(run_module, "open_store", open_store)
    monkeypatch.setattr(run_module, "open_job", open_job)


def config(folder: Path, **loop: Any) -> RunConfig:
    document = {
        "job": {"name": "lake"},
        "resources": {"n_rl": 3, "training": 1, "rollout": 2},
        "model": {"path": str(folder / "policy")},
        "engines": {"own": {"url": "http://127.0.0.1:9"}},
        "loop": {"steps": 2, "num_groups": 2, "group_size": 4, "out": str(folder / "out")} | loop,
    }
    return load(RunConfig, document)


@pytest.mark.parametrize("algorithm", ["grpo", "dapo", "async"])
async def test_a_run_leaves_a_summary_and_metrics(tmp_path: Path, algorithm: str):
    said: list[str] = []
    summary = await run_job(config(tmp_path, algorithm=algorithm), say=said.append)
    out = tmp_path / "out"
    assert json.loads((out / "summary.json").read_text())["num_steps"] == 2
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["event"] == "step"] == [1, 2]
    assert (summary["job"], summary["algorithm"], len(summary["rewards"])) == ("lake", algorithm, 2)
    assert set(summary["engines"]) == {"own0", "own1", "lent"}
    assert summary["num_tokens"] <= sum(engine["num_tokens"] for engine in summary["engines"].values())
    assert 0 <= summary["borrowed_token_fraction"] < 1
    (learner,) = LearnerGroup.made
    assert learner.published == [True, False, False]
    assert learner.saved == [tmp_path / "policy"]
    assert any(line.startswith("warm start: loss 2.000 to 1.000") for line in said)
    assert sum(line.startswith("step 2/2: reward") for line in said) == 1


async def test_a_checkpoint_that_is_there_is_kept(tmp_path: Path):
    (tmp_path / "policy").mkdir()
    (tmp_path / "policy" / "config.json").write_text("{}")
    await run_job(config(tmp_path, steps=1), say=lambda _: None)
    assert LearnerGroup.made[0].saved == []


async def test_a_run_uses_a_pool_that_runs_elsewhere(tmp_path: Path):
    async with RolloutPool(engines()) as pool, serve_pool(PoolService(pool, name="policy")) as url:
        summary = await run_job(config(tmp_path, pool=url), say=lambda _: None)
        assert summary["num_steps"] == 2
        assert set(summary["engines"]) == {"own0", "own1"}
        assert summary["most_leases"] is None
        assert pool.snapshot().version is not None
        assert pool.snapshot().version.n == 2


async def test_only_the_checkpoint_is_written_on_demand(tmp_path: Path):
    await save_model(config(tmp_path), say=lambda _: None)
    (learner,) = LearnerGroup.made
    assert (learner.saved, learner.published) == ([tmp_path / "policy"], [])


def test_episodes_that_do_not_fit_are_refused_before_anything_starts(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"max_positions = 512 is less than the 1820 tokens"):
        check_run(config(tmp_path, env="household"))
    assert check_run(config(tmp_path)) is FrozenLake


async def test_an_out_folder_that_cannot_be_made_is_told(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"loop\.out: .* cannot be made"):
        await run_job(config(tmp_path, out=str(tmp_path / "file" / "out")), say=lambda _: None)
