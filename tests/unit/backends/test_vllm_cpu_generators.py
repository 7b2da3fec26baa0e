"""Seeded generators that can be turned back on a CPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from rose.backends.vllm import cpu_generators
from rose.backends.vllm.cpu_generators import RewindableGenerator


def draw(generator: Any) -> list[float]:
    return list(torch.rand(3, generator=generator).tolist())


def seeded(seed: int) -> Any:
    generator = torch.Generator(device="cpu")
    generator.manual_seed(seed)
    return generator


def test_a_generator_goes_back_to_what_it_remembered():
    generator = RewindableGenerator(device="cpu")
    generator.manual_seed(7)
    draw(generator)
    generator.remember()
    first = draw(generator)
    generator.set_offset(generator.get_offset() - 4)
    assert draw(generator) == first, "turned back"
    assert draw(generator) != first, "and on again"


class Runner:
    """What of vLLM's model runner is touched: requests enter the batch in ``_update_states``, once before each step."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.input_batch = SimpleNamespace(generators={}, req_ids=[])

    def _update_states(self, scheduler_output: dict[str, int]) -> str:
        for request_id, seed in scheduler_output.items():
            index = len(self.input_batch.req_ids)
            self.input_batch.req_ids.append(request_id)
            self.requests[request_id] = SimpleNamespace(generator=seeded(seed))
            self.input_batch.generators[index] = self.requests[request_id].generator
        return "what vLLM returns"


@pytest.fixture
def runner(monkeypatch) -> Runner:
    class Patched(Runner):
        _update_states = Runner._update_states

    module = ModuleType("vllm.v1.worker.gpu_model_runner")
    module.GPUModelRunner = Patched  # type: ignore[attr-defined]
    for name in ("vllm", "vllm.v1", "vllm.v1.worker"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm.v1.worker.gpu_model_runner", module)
    cpu_generators.install()
    return Patched()


def test_seeded_requests_draw_what_their_seed_says_whatever_was_discarded(runner):
    """A chunked prompt draws a token that is discarded; afterwards the request draws as if it never had."""
    assert runner._update_states({"a": 1, "b": 2}) == "what vLLM returns"
    for index, request_id in enumerate("ab"):
        generator = runner.input_batch.generators[index]
        assert isinstance(generator, RewindableGenerator)
        assert runner.requests[request_id].generator is generator, "a preempted request keeps its place"
        draw(generator)
        generator.set_offset(generator.get_offset())
    runner._update_states({})
    assert draw(runner.input_batch.generators[0]) == draw(seeded(1))
    assert draw(runner.input_batch.generators[1]) == draw(seeded(2))


def test_a_step_that_counts_is_not_turned_back(runner):
    runner._update_states({"a": 1})
    generator = runner.input_batch.generators[0]
    draw(generator)
    runner._update_states({})
    second = draw(generator)
    generator.set_offset(0)
    assert draw(generator) == second
    reference = seeded(1)
    draw(reference)
    assert second == draw(reference)
    assert runner.input_batch.generators[0] is generator, "made once"
