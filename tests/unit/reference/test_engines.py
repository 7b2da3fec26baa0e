"""Engines by name: what each library is told, and what is said where it is missing. No library is loaded."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import attrs
import pytest

from rose.backends.sglang import LaunchedSglang
from rose.backends.vllm import VllmEngine
from rose.errors import BackendUnavailableError
from rose.interfaces import ServingEngine, SupportsStart, SupportsStepLog, SupportsWeightChecksums
from rose.reference import engines
from rose.reference.demo_config import ENGINES
from rose.reference.engines import NAMES, EngineSpec, check_engines, find_sglang, make_engine
from rose.testing import ManualClock

SPEC = EngineSpec(
    kind="vllm",
    engine_id="borrowed0",
    model="/models/policy",
    max_len=448,
    max_requests=80,
    kv_tokens=64 * 32,
    kv_token_bytes=512,
    seed=7,
    rose={"role": "alone"},
)


@pytest.fixture
def python(tmp_path) -> str:
    path = tmp_path / "python"
    path.touch()
    return str(path)


def test_the_configuration_knows_the_same_names():
    assert ENGINES == NAMES


@pytest.mark.parametrize("kind", NAMES)
def test_every_engine_has_the_abilities_that_the_demo_needs(kind, python):
    engine = make_engine(attrs.evolve(SPEC, kind=kind, python=python), clock=ManualClock())
    assert engine.engine_id == "borrowed0"
    for ability in (ServingEngine, SupportsStart, SupportsStepLog, SupportsWeightChecksums):
        assert isinstance(engine, ability)


def test_vllm_is_told_blocks_and_bytes():
    engine = make_engine(SPEC, clock=ManualClock())
    assert isinstance(engine, VllmEngine)
    options = engine.options
    assert (options.kv_cache_bytes, options.block_size) == (64 * 32 * 512, 32)
    assert (options.max_model_len, options.max_num_seqs, options.seed) == (448, 80, 7)
    assert (options.max_num_batched_tokens, options.rose) == (None, {"role": "alone"})


def test_sglang_is_told_tokens_and_has_room_for_the_longest_request(python):
    engine = make_engine(attrs.evolve(SPEC, kind="sglang", python=python, chunk_tokens=512), clock=ManualClock())
    assert isinstance(engine, LaunchedSglang)
    options = engine.options
    assert (options.python, options.max_total_tokens, options.max_running_requests) == (python, 64 * 32, 80)
    assert options.max_context_tokens == 448 + 6, "its requests are at most six tokens shorter than its context"
    assert options.is_deterministic, "the demo's arms draw the same samples"
    command = options.command(1)
    assert command[command.index("--chunked-prefill-size") + 1] == "512"
    assert command[command.index("--random-seed") + 1] == "7"
    settings = options.server_environment({})["ROSE_SGLANG_SETTINGS"]
    assert json.loads(settings) == {"role": "alone"}


@pytest.mark.parametrize(("role", "has_warm_up"), [("alone", True), ("rollout", True), ("serving", False)])
def test_a_serving_engine_whose_clock_stands_still_makes_no_token_at_its_start(role, has_warm_up, python):
    spec = attrs.evolve(SPEC, kind="sglang", python=python, rose={"role": role})
    engine = make_engine(spec, clock=ManualClock())
    assert isinstance(engine, LaunchedSglang)
    assert engine.options.has_warm_up is has_warm_up


def test_a_missing_environment_is_one_clear_line(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    with pytest.raises(BackendUnavailableError, match="run make sglang-env") as caught:
        check_engines(("vllm", "sglang"))
    assert "\n" not in str(caught.value)
    with pytest.raises(BackendUnavailableError, match="there is no /nowhere/python"):
        check_engines(("sglang",), sglang_python="/nowhere/python")


def test_an_environment_is_found_beside_this_one_and_in_the_current_folder(monkeypatch, tmp_path):
    beside, here = tmp_path / "beside", tmp_path / "here"
    for folder in (beside, here):
        (folder / ".venv-sglang" / "bin").mkdir(parents=True)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "prefix", str(beside / ".venv"))
    assert find_sglang(None) is None
    (here / ".venv-sglang" / "bin" / "python").touch()
    assert find_sglang(None) == here / ".venv-sglang" / "bin" / "python"
    (beside / ".venv-sglang" / "bin" / "python").touch()
    assert find_sglang(None) == Path(beside / ".venv-sglang" / "bin" / "python")
    check_engines(("sglang",))


def test_a_missing_library_names_the_extra(monkeypatch):
    monkeypatch.setattr(engines, "find_spec", lambda _: None)
    for kind in NAMES:
        with pytest.raises(BackendUnavailableError, match=r"pip install 'rose-rl\[demo\]'"):
            check_engines((kind,))
