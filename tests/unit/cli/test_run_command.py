from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.cli.main import EXIT_OK, EXIT_USER_ERROR, build_parser, main
from rose.cli.run import make_config
from rose.reference.learner_config import LearnerConfig

JOB = """
[job]
name = "lake"
seed = 7
[resources]
n_rl = 3
training = 1
rollout = 2
[model]
path = "policy"
[engines.own]
url = "http://127.0.0.1:9"
[loop]
steps = 5
[learner.policy]
max_positions = 600
"""


@pytest.fixture
def job(tmp_path: Path) -> Path:
    path = tmp_path / "job.toml"
    path.write_text(JOB)
    return path


def parse(job: Path, *arguments: str) -> argparse.Namespace:
    return build_parser().parse_args(["run", str(job), *arguments])


def test_options_go_over_the_file(job: Path):
    plain = make_config(parse(job))
    assert (plain.loop.env, plain.loop.algorithm, plain.loop.steps) == ("frozenlake", "grpo", 5)
    given = make_config(parse(job, "--env", "household", "--algorithm", "dapo", "--steps", "2", "--pool", "http://h:1"))
    assert (given.loop.env, given.loop.algorithm, given.loop.steps) == ("household", "dapo", 2)
    assert given.loop.pool == "http://h:1"


def test_the_algorithm_decides_about_loss_and_clip_and_the_job_about_seed_and_game(job: Path):
    grpo = make_config(parse(job)).learner_config
    dapo = make_config(parse(job, "--algorithm", "dapo", "--env", "household")).learner_config
    assert (grpo.grpo.loss, grpo.grpo.clip_high, grpo.seed) == ("sequence", 0.2, 7)
    assert (dapo.grpo.loss, dapo.grpo.clip_high, dapo.environment) == (
        "token",
        0.28,
        "rose.reference.household:Household",
    )
    assert dapo.policy.max_positions == 600
    assert LearnerConfig().grpo.loss == "token", "the demo's"


def test_dapo_may_start_more_groups_and_the_others_not(job: Path):
    assert make_config(parse(job)).loop.rules.max_groups == 8
    dapo = make_config(parse(job, "--algorithm", "dapo")).loop.rules
    assert (dapo.num_groups, dapo.max_groups, dapo.has_dynamic_sampling) == (8, 24, True)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--algorithm", "ppo"), "--algorithm must be one of grpo, dapo, async, got 'ppo'"),
        (("--env", "chess"), "--env must be one of frozenlake, household, alfworld or module:Class, got 'chess'"),
        (("--env", "no.such:Game"), "cannot import no.such"),
        (("--steps", "0"), "--steps must be an integer >= 1, got 0"),
        (("--pool", "nowhere"), "--pool must be a string like https?://"),
        (("--env", "household"), "learner.policy.max_positions = 600 is less than the 1820 tokens that an episode of"),
    ],
)
def test_a_wrong_option_is_named(job: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str):
    assert main(["run", str(job), "--check", *arguments]) == EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("env_timeout_s = 1800.0", "loop: trajectory_timeout_s must be above env_timeout_s = 1800, got 1800"),
        ("turn_timeout_s = 2000.0", "loop: trajectory_timeout_s must be above turn_timeout_s = 2000, got 1800"),
        ('lost = "zero"', "loop.lost: expected one of 'partial', 'refill', 'drop', got a string ('zero')"),
        ("group_size = 1", "group_size must be an integer >= 2, got 1"),
        ("max_staleness = 0", "max_staleness must be an integer >= 1, got 0"),
    ],
)
def test_a_wrong_line_is_named(job: Path, capsys: pytest.CaptureFixture[str], line: str, said: str):
    job.write_text(JOB.replace("steps = 5", line))
    assert main(["run", str(job), "--check"]) == EXIT_USER_ERROR
    assert said in capsys.readouterr().err


def test_a_file_in_order_is_told(job: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["run", str(job), "--check"]) == EXIT_OK
    assert "frozenlake by grpo, 5 steps: in order" in capsys.readouterr().err


def test_alfworld_without_its_data_says_what_to_do(
    job: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    assert main(["run", str(job), "--check", "--env", "alfworld"]) == EXIT_USER_ERROR
    assert "since ALFWORLD_DATA is not set; run alfworld-download" in capsys.readouterr().err
