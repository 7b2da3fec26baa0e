from __future__ import annotations

import json

import pytest

from rose.backends.memory import MemoryTransport
from rose.cli.main import main
from rose.observe.turns import TurnLog
from rose.policies.retention import RetentionConfig
from rose.testing import FakeTrainer
from rose.transfer.lineage import sum_text
from rose.transfer.publisher import Publisher
from rose.transfer.sums import trainer_sums
from rose.types import FinishReason, Sampling, Turn, TurnResult, VersionSpan, WeightVersion


@pytest.fixture
def site(monkeypatch):
    """A served store with the newest of twelve versions; gives its address and the trainer's sums at each."""
    store = MemoryTransport()
    options = dict(store.serve().options)
    monkeypatch.setenv("ROSE_UPSTREAM_TOKEN", str(options["token"]))
    trainer = FakeTrainer()
    publisher = Publisher(trainer, store, run="job", retention=RetentionConfig(keep=3, max_chain=3))
    sums = []
    for _ in range(12):
        publisher.publish_sync()
        sums.append({name: sum_text(total) for name, total in trainer_sums(trainer).items()})
        trainer.step()
    yield f"memory:{options['host']}:{options['port']}", sums
    store.close()


@pytest.fixture
def turns(tmp_path):
    """Two trajectories: "old" was made by versions 0 and 11, "new" by 10 and 11 with a token of no version between them."""
    path = tmp_path / "turns.jsonl"
    with TurnLog(path) as log:
        for name, spans in (("old", [(0, 0, 2), (11, 2, 6)]), ("new", [(10, 0, 3), (11, 4, 6)])):
            log.write(
                Turn(trajectory_id=name, group_id="g", prompt_ids=(1,), sampling=Sampling(max_tokens=6)),
                TurnResult(
                    token_ids=(1,) * 6,
                    logprobs=(),
                    finish_reason=FinishReason.STOP,
                    versions=tuple(
                        VersionSpan(version=WeightVersion("job", n), start=start, end=end) for n, start, end in spans
                    ),
                    hops=(),
                ),
            )
    return str(path)


def asked(capsys, *arguments, code=0):
    assert main(["lineage", *arguments, "--json"]) == code
    return json.loads(capsys.readouterr().out)["versions"]


def test_a_version_leads_to_the_trainers_sums(site, capsys):
    place, sums = site
    (row,) = asked(capsys, "job:11", "--transport", place)
    assert (row["version"], row["tokens"]) == ("job:11", 0)
    assert {name: tensor["sum"] for name, tensor in row["tensors"].items()} == sums[11]
    assert row["tensors"]["model.norm.weight"]["shape"] == [3]
    assert row["chain"][-1] == "job:11"
    assert row["manifest"].startswith("job/11/")


def test_a_token_leads_to_the_version_that_made_it(site, turns, capsys):
    place, sums = site
    (row,) = asked(capsys, turns, "--trajectory", "new", "--turn", "0", "--token", "2", "--transport", place)
    assert (row["version"], row["tokens"]) == ("job:10", 1)
    assert row["tensors"]["model.scale"]["sum"] == sums[10]["model.scale"]


def test_a_trajectory_leads_to_all_of_its_versions(site, turns, capsys):
    rows = asked(capsys, turns, "--trajectory", "new", "--transport", site[0], "--tensor", "model.scale")
    assert [(row["version"], row["tokens"], list(row["tensors"])) for row in rows] == [
        ("job:10", 3, ["model.scale"]),
        ("job:11", 2, ["model.scale"]),
    ]


def test_a_version_that_retention_deleted_is_told_and_the_others_are_shown(site, turns, capsys):
    rows = asked(capsys, turns, "--trajectory", "old", "--transport", site[0], code=2)
    assert [row["version"] for row in rows] == ["job:0", "job:11"]
    assert "was deleted by retention; kept are" in rows[0]["gone"]
    assert rows[1]["tensors"]


def test_as_text(site, turns, capsys):
    place, sums = site
    assert main(["lineage", turns, "--trajectory", "new", "--token", "5", "--transport", place]) == 0
    out = capsys.readouterr().out
    assert out.startswith("job:11 made token 5\n  manifest job/11/")
    assert sums[11]["model.embed_tokens.weight"] in out
    assert "10x4" in out
    assert main(["lineage", turns, "--transport", place]) == 2
    out = capsys.readouterr().out
    assert "job:0 made 2 tokens: the manifest of version job:0 was deleted by retention" in out
    assert "job:11 made 6 tokens" in out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["/nowhere"], "cannot read turns from /nowhere"),
        ([""], "RUN:N|FILE is empty"),
        (["job:11", "--token", "3"], "choose from a file of turns"),
        (["job:11", "--tensor", "nothing"], "version job:11 has no tensor nothing"),
        (["job:11", "--pointer", ""], "--pointer is empty"),
        (["TURNS", "--token", "3"], "--token names a token of one turn, and 2 are chosen"),
        (["TURNS", "--trajectory", "new", "--token", "3"], "token 3 was made by weights of no published version"),
        (["TURNS", "--trajectory", "new", "--token", "9"], "there is no token 9"),
        (["TURNS", "--turn", "1"], "has no such turn"),
        (["job:11", "--transport", "ftp:there"], "is neither memory:HOST:PORT"),
    ],
)
def test_what_can_be_put_right_is_one_line(site, turns, capsys, arguments, complaint):
    arguments = [turns if each == "TURNS" else each for each in arguments]
    assert main(["lineage", "--transport", site[0], *arguments]) == 2
    said = capsys.readouterr()
    assert complaint in said.err
    assert said.out == ""
