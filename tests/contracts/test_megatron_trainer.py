"""The trainer contract on Megatron-Core with one rank in this process; two ranks: tests/integration/test_megatron_publish.py."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core says at its import what it misses
    torch = pytest.importorskip("torch")
    pytest.importorskip("megatron.core")
    from megatron.core import parallel_state

    from rose.backends.megatron import MegatronTrainer
    from rose.backends.megatron.cpu import make_gpt

from torch import distributed, nn

from rose import registry
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import Trainer
from rose.testing import TrainerContract

pytestmark = pytest.mark.filterwarnings("ignore")
DENSE = {
    "vocab_size": 129,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32,
    "rope_parameters": {"rope_theta": 10000.0},
    "tie_word_embeddings": True,
}
MOE = DENSE | {"num_experts": 4, "moe_intermediate_size": 8, "tie_word_embeddings": False}


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    meeting: Path = tmp_path_factory.mktemp("gloo") / "store"
    distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    distributed.destroy_process_group()


class TestMegatron(TrainerContract):
    checkpoint: dict[str, Any] = DENSE
    family = "qwen3"

    def make_trainers(self) -> Sequence[Trainer]:
        self.model = make_gpt(self.checkpoint)
        return [registry.trainer("megatron", self.model, family=self.family, vocab_size=129)]

    def step(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        sum(parameter.square().sum() for parameter in self.model.parameters()).backward()
        optimizer.step()
        return trainers


class TestMixtureOfExperts(TestMegatron):
    checkpoint = MOE
    family = "qwen3_moe"


def test_tensors_are_those_of_the_checkpoint_format() -> None:
    """Names and shapes as transformers has them; a tied head is an alias, an untied one a tensor."""
    from transformers import Qwen3Config, Qwen3ForCausalLM  # noqa: PLC0415 - heavy

    keys = {name: value for name, value in DENSE.items() if name != "rope_parameters"}
    model = Qwen3ForCausalLM(Qwen3Config(**keys))
    trainer = MegatronTrainer(make_gpt(DENSE), family="qwen3", vocab_size=129)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {name: spec.shape for name, spec in trainer.tensors().items()} == expected
    assert trainer.aliases() == {"lm_head.weight": "model.embed_tokens.weight"}
    experts = MegatronTrainer(make_gpt(MOE), family="qwen3_moe", vocab_size=129)
    assert experts.tensors()["lm_head.weight"].shape == (129, 16)
    assert experts.aliases() == {}


def test_what_is_loaded_is_what_is_published() -> None:
    trainer = MegatronTrainer(make_gpt(MOE), family="qwen3_moe", vocab_size=129)
    torch.manual_seed(3)
    weights = {name: torch.randn(spec.shape) for name, spec in trainer.tensors().items()}
    trainer.load_weights(weights)
    for name, bits in trainer.shards().items():
        expected = weights[name].to(torch.bfloat16).view(torch.int16).numpy().view("<u2")
        assert (bits[tuple(slice(0, size) for size in bits.shape)] == expected).all(), name
    del weights["lm_head.weight"]
    weights["model.norm.weight"] = torch.zeros(3)
    with pytest.raises(LayoutMismatchError, match=r"model\.norm\.weight, lm_head\.weight; nothing was loaded"):
        trainer.load_weights(weights)


def test_unknown_parameters_are_all_named() -> None:
    """Of a wrong family, and of a module that no family has."""
    model = make_gpt(DENSE)
    model.decoder.layers[1].adapter = nn.Linear(4, 4)
    with pytest.raises(LayoutMismatchError, match=r"layers\.1\.adapter\.weight, decoder\.layers\.1\.adapter\.bias"):
        MegatronTrainer(model, family="qwen3", vocab_size=129)
    with pytest.raises(LayoutMismatchError) as refused:
        MegatronTrainer(make_gpt(DENSE), family="llama", vocab_size=129)
    for layer in range(2):
        for kind in "qk":
            assert f"decoder.layers.{layer}.self_attention.{kind}_layernorm.weight" in str(refused.value)


def test_a_vocabulary_larger_than_the_model_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match=r"embedding\.word_embeddings\.weight has shape \(144, 16\)"):
        MegatronTrainer(make_gpt(DENSE), family="qwen3", vocab_size=145)
