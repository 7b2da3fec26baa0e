"""What a job may ask of a pool, read from its configuration."""

from types import SimpleNamespace

import pytest

from rose.errors import ConfigError
from rose_verl.settings import RoseOptions, Settings, find_problems, get


def rollout(**more):
    fields = {
        "mode": "async",
        "engine_kwargs": {"rose": {"pool": "http://127.0.0.1:7100"}},
        "prompt_length": 64,
        "response_length": 32,
        "max_model_len": None,
        "ignore_eos": False,
        "dtype": "bfloat16",
        "temperature": 1.0,
        "top_p": 1,
        "top_k": -1,
        "repetition_penalty": 1.0,
        "calculate_log_probs": True,
        "logprobs_mode": "processed_logprobs",
        "val_kwargs": SimpleNamespace(top_k=-1),
        "checkpoint_engine": SimpleNamespace(backend="naive"),
        "disaggregation": SimpleNamespace(enabled=False),
        "mtp": None,
    }
    return SimpleNamespace(**{**fields, **more})


def test_a_plain_job_is_read():
    settings = Settings.of(rollout(), environ={})
    assert settings.place.url == "http://127.0.0.1:7100"
    assert (settings.prompt_length, settings.response_length, settings.dtype) == (64, 32, "bfloat16")
    assert settings.options == RoseOptions(pool="http://127.0.0.1:7100")


def test_the_environment_names_the_pool_where_the_job_does_not():
    found = Settings.of(rollout(engine_kwargs={}), environ={"ROSE_POOL": "http://127.0.0.1:9"})
    assert found.place.url == "http://127.0.0.1:9"
    with pytest.raises(ConfigError, match=r"engine_kwargs\.rose\.pool"):
        Settings.of(rollout(engine_kwargs={"vllm": {}}), environ={})


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"mode": "sync"}, "rollout.mode"),
        ({"disaggregation": SimpleNamespace(enabled=True)}, "disaggregation"),
        ({"enable_rollout_routing_replay": True}, "R3"),
        ({"mtp": SimpleNamespace(enable_rollout=True)}, "mtp.enable_rollout"),
        ({"quantization": "fp8"}, "quantization"),
        ({"qat": {"enable": True}}, "qat.enable"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"top_k": 20}, "top_k"),
        ({"val_kwargs": SimpleNamespace(top_k=5)}, "val_kwargs.top_k"),
        ({"full_determinism": True}, "full_determinism"),
        ({"logprobs_mode": "raw_logits"}, "logprobs_mode"),
        ({"prometheus": SimpleNamespace(enable=True)}, "prometheus"),
        ({"checkpoint_engine": SimpleNamespace(backend="nccl")}, "checkpoint_engine.backend"),
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_p": 0.9}, "processed_logprobs"),
        ({"dtype": "half"}, "rollout.dtype = 'half'"),
        ({"engine_kwargs": {"rose": {"pool": "http://h:1", "polo": 1}}}, r"engine_kwargs\.rose: polo"),
        ({"engine_kwargs": {"rose": "http://h:1"}}, r"engine_kwargs\.rose\.pool"),
        ({"engine_kwargs": {"rose": {"pool": "http://h:1", "on_abort": "drop"}}}, "on_abort"),
    ],
)
def test_what_a_pool_cannot_do_is_refused_by_its_name(fields, named):
    with pytest.raises(ConfigError, match=named):
        Settings.of(rollout(**fields), environ={})


def test_all_problems_are_told_at_once():
    with pytest.raises(ConfigError) as caught:
        Settings.of(rollout(top_k=3, quantization="fp8"), environ={})
    assert len(str(caught.value).splitlines()) == 2


def test_other_temperatures_are_fine_with_engines_that_process_log_probs_or_without_log_probs():
    kwargs = {"rose": {"pool": "http://h:1", "engine_logprobs": "processed"}}
    assert Settings.of(rollout(temperature=0.7, engine_kwargs=kwargs), environ={})
    assert Settings.of(rollout(temperature=0.7, calculate_log_probs=False), environ={})


@pytest.mark.parametrize("model", [{"lora_rank": 8, "lora": {}}, {"lora": {"rank": 8}}])
def test_adapters_are_refused_unless_merged(model):
    (problem,) = find_problems(rollout(), model, RoseOptions())
    assert "lora.merge=True" in problem
    assert not find_problems(rollout(), {**model, "lora": {**model["lora"], "merge": True}}, RoseOptions())


def test_get_reads_mappings_and_objects():
    config = {"a": SimpleNamespace(b={"c": 3})}
    assert get(config, "a.b.c") == 3
    assert get(config, "a.x.c") is None
