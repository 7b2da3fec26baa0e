from __future__ import annotations

import subprocess
import sys

import pytest

from rose.errors import ConfigError
from rose.reference.environment import SupportsDemonstrations, load_environment
from rose.reference.lake import FrozenLake


def test_loads_a_class_by_its_name():
    assert load_environment("rose.reference.lake:FrozenLake") is FrozenLake
    assert isinstance(FrozenLake(), SupportsDemonstrations)


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("rose.reference.lake", ("expected module:Class", "rose.reference.lake:FrozenLake")),
        (":FrozenLake", ("expected module:Class",)),
        ("rose.reference.lake:", ("expected module:Class",)),
        ("no.such.module:Game", ("cannot import no.such.module", "PYTHONPATH")),
        ("rose.reference.lake:Frozen", ("has no class Frozen", "after the colon")),
        ("toy_games:not_a_class", ("has no class not_a_class",)),
        ("toy_games:NoStep", ("NoStep lacks step, max_tokens_per_turn", "environment.Environment")),
        ("toy_games:BadWords", ("without blanks", "'two words', '<pad>'")),
        ("toy_games:StrangeAction", (".action_words", "jump")),
        ("toy_games:NoTurns", (".max_turns must be", "got 0")),
    ],
)
def test_a_wrong_spec_gives_one_line_that_says_what_to_do(spec: str, parts: tuple[str, ...]):
    with pytest.raises(ConfigError) as caught:
        load_environment(spec)
    message = str(caught.value)
    assert "\n" not in message
    assert message.startswith(f"--env {spec!r}: ")
    for part in parts:
        assert part in message


def test_the_job_side_modules_load_no_torch():
    modules = "environment, lake, tokenizer, env_workers, trajectory, rollout, grpo, learner_group, learner_config"
    code = f"import sys; from rose.reference import {modules}; print(sorted({{'torch', 'transformers', 'vllm'}} & set(sys.modules)))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
