"""The group's side of the protocol against scripted ranks; real ones are in tests/integration."""

from __future__ import annotations

import asyncio
import sys

import pytest

from rose.errors import TrainerError
from rose.reference import learner_group
from rose.reference.learner_config import GrpoConfig, LearnerConfig
from rose.reference.learner_group import LearnerGroup
from rose.reference.trajectory import Trajectory
from rose.types import TransportAddress

SCRIPTED_RANK = """
import json, sys, time
from rose.reference.worker_process import take_over_stdout
answers = take_over_stdout()
rank = int(sys.argv[1])
for line in sys.stdin:
    name, arguments = json.loads(line)
    text = json.dumps(arguments)
    if rank == 1 and "die" in text:
        print("rank 1 met its end", file=sys.stderr)
        sys.exit(7)
    if rank == 0 and "die" in text or rank == 1 and "hang" in text:
        time.sleep(60)
    if name == "train":
        reply = {"ok": {"mismatch_sum": 3.0, "mismatch_max": 1.0 + rank, "num_clipped": 1, "ratio_max": 2.0 + rank,
                        "objective_sum": 0.0, "gradient_norms": [0.5, 1.5 + rank]}}
        print(json.dumps(arguments), file=open(f"{sys.argv[2]}-train-{rank}", "a"))
    elif "blame" in text:
        if rank == 1:
            time.sleep(0.3)
            sys.exit("the real cause")
        reply = {"error": "connection reset by peer"}
    elif "refuse" in text:
        reply = {"error": "BlobNotFoundError: no such key"}
    else:
        reply = {"ok": {"rank": rank, "losses": [2.0, 1.0]}}
    answers.write(json.dumps(reply) + "\\n")
    answers.flush()
"""


@pytest.fixture
async def group(tmp_path, monkeypatch):
    (tmp_path / "scripted_rank.py").write_text(SCRIPTED_RANK)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(learner_group, "_MODULE", "scripted_rank")
    async with LearnerGroup(LearnerConfig(timeout_s=60.0, grpo=GrpoConfig(lr=0.25))) as started:
        yield started


def step(rewards: tuple[float, ...]) -> list[Trajectory]:
    return [
        Trajectory(
            trajectory_id=f"t{i}",
            group_id="g",
            environment_seed=0,
            token_ids=(1, 5),
            mask=(0, 1),
            logprobs=(0.0, -0.5),
            reward=reward,
            started_s=0,
            ended_s=1,
        )
        for i, reward in enumerate(rewards)
    ]


def address(run: str) -> dict:
    return {"run": run, "address": TransportAddress(name="memory", options=(("port", 1),))}


async def test_reports_join_the_ranks(group: LearnerGroup):
    report = await group.train(step((1, 0, 0, 1)))
    assert (report.num_samples, report.num_tokens, report.num_flat_groups, report.num_optimizer_steps) == (4, 4, 0, 2)
    assert report.mismatch_mean == pytest.approx(6.0 / 2)
    assert (report.mismatch_max, report.ratio_max, report.gradient_norm) == (2.0, 3.0, 2.5)
    assert report.clipped_fraction == pytest.approx(2 / 4)
    assert await group.warm_start() == [2.0, 1.0]
    assert (await group.publish(**address("a")))["rank"] == 0


async def test_each_rank_gets_its_own_share(group: LearnerGroup):
    await group.train(step((1, 0, 0)), num_minibatches=1)
    lines = [learner_group.json.loads((group._folder / f"rendezvous-train-{rank}").read_text()) for rank in (0, 1)]
    assert [line["lr"] for line in lines] == [0.25, 0.25]
    assert [len(line["minibatches"][0]["micro"][0]) for line in lines] == [2, 1]
    assert {line["minibatches"][0]["divisor"] for line in lines} == {3}


async def test_tensor_parallel_ranks_get_all_samples_and_count_once(
    group: LearnerGroup, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(group, "_config", LearnerConfig(timeout_s=60.0, trainer="megatron"))
    report = await group.train(step((1, 0, 0)), num_minibatches=1)
    lines = [(group._folder / f"rendezvous-train-{rank}").read_text() for rank in (0, 1)]
    assert lines[0] == lines[1]
    assert len(learner_group.json.loads(lines[0])["minibatches"][0]["micro"][0]) == 3
    assert report.mismatch_mean == pytest.approx(3.0 / 3)
    assert report.clipped_fraction == pytest.approx(1 / 3)


async def test_an_all_flat_step_asks_no_rank(group: LearnerGroup):
    report = await group.train(step((1, 1, 1)))
    assert (report.num_optimizer_steps, report.num_flat_groups, report.num_tokens) == (0, 1, 0)
    assert not (group._folder / "rendezvous-train-0").exists()


async def test_a_dead_rank_ends_all_with_its_last_words(group: LearnerGroup):
    ranks = list(group._ranks)
    with pytest.raises(TrainerError, match=r"(?s)learner rank 1 ended with code 7.*rank 1 met its end"):
        await group.publish(**address("die"))
    with pytest.raises(TrainerError, match="the learner cannot train: learner rank 1 ended"):
        await group.train(step((1, 0)))
    await group.close()
    assert all(rank.has_ended for rank in ranks)


async def test_the_rank_that_died_is_named_not_the_one_that_noticed(group: LearnerGroup):
    with pytest.raises(TrainerError, match=r"(?s)learner rank 1 ended with code 1.*the real cause"):
        await group.publish(**address("blame"))


async def test_a_late_rank_ends_all(group: LearnerGroup, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(group, "_config", LearnerConfig(timeout_s=0.3))
    with pytest.raises(TrainerError, match=r"publish: no answer within 0.3 s"):
        await group.publish(**address("hang"))
    with pytest.raises(TrainerError, match="cannot publish"):
        await group.publish(**address("a"))


async def test_an_error_that_every_rank_survived_leaves_the_group_alive(group: LearnerGroup):
    with pytest.raises(TrainerError, match="learner rank 0: BlobNotFoundError: no such key"):
        await group.publish(**address("refuse"))
    assert (await group.publish(**address("a")))["rank"] == 0


async def test_a_cancelled_operation_ends_the_ranks(group: LearnerGroup):
    task = asyncio.ensure_future(group.publish(**address("hang")))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    with pytest.raises(TrainerError, match="cancelled half-way"):
        await group.reset()


async def test_a_closed_group_says_so_and_leaves_nothing_behind(group: LearnerGroup):
    folder = group._folder
    await group.close()
    assert not folder.exists()
    with pytest.raises(TrainerError, match="not started or is closed"):
        await group.reset()
