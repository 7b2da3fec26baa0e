"""``rose demo`` on other engines: its options, and what is said where an engine is missing. No engine is started."""

from __future__ import annotations

import asyncio
import sys

import pytest

from rose.cli import demo, main
from rose.errors import BackendUnavailableError, ConfigError
from rose.observe.live import LiveView
from rose.reference import demo as reference
from rose.reference.demo_config import DemoConfig


def configured(*argv: str) -> DemoConfig:
    return demo.make_config(main.build_parser().parse_args(["demo", *argv]))


def test_engines_are_chosen_a_side():
    assert configured().engines == ("vllm", "vllm")
    assert configured("--rollout-engine", "sglang").engines == ("sglang", "vllm")
    assert configured("--serving-engine", "sglang").engines == ("vllm", "sglang")


def test_an_option_stretches_time_over_a_file_that_says_nothing_of_it(tmp_path):
    path = tmp_path / "demo.toml"
    path.write_text("steps = 3\n")
    config = configured("--config", str(path), "--serving-engine", "sglang")
    assert (config.steps, config.stretch) == (3, 6.0)


@pytest.mark.parametrize("side", ["rollout", "serving"])
def test_an_unknown_engine_is_refused_in_the_words_of_its_option(side):
    with pytest.raises(ConfigError, match=rf"^--{side}-engine must be one of vllm, sglang, got 'vlm'; "):
        configured(f"--{side}-engine", "vlm")


def test_without_sglangs_environment_nothing_starts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setattr(reference, "find_spec", lambda _: object())
    out = tmp_path / "out"
    config = DemoConfig(rollout_engine="sglang", serving_engine="sglang", out=str(out))
    with LiveView(is_json=True) as view, pytest.raises(BackendUnavailableError, match="run make sglang-env"):
        asyncio.run(reference.run_demo(config, view=view))
    assert not out.exists()
