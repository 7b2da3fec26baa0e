from __future__ import annotations

import json

import attrs
import pytest

from rose.config import load
from rose.errors import ConfigError
from rose.reference.learner_config import GrpoConfig, LearnerConfig, PolicyConfig


def test_the_configuration_survives_the_way_to_a_rank():
    config = LearnerConfig(seed=3, policy=PolicyConfig(num_layers=1), grpo=GrpoConfig(lr=1e-6), compute_dtype="float32")
    assert load(LearnerConfig, json.loads(json.dumps(attrs.asdict(config)))) == config


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"num_ranks": 0}, "num_ranks"),
        ({"grpo": {"lr": -1.0}}, "lr"),
        ({"compute_dtype": "float16"}, "compute_dtype"),
        ({"trainer": "deepspeed"}, "trainer"),
        ({"grpo": {"learning_rate": 1.0}}, "learning_rate"),
    ],
)
def test_wrong_values_are_refused_by_name(document, said: str):
    with pytest.raises(ConfigError, match=said):
        load(LearnerConfig, document)
