"""The launcher's flags, and OpenRLHF's as far as they matter."""

import pytest

from rose.errors import ConfigError
from rose_openrlhf.flags import Options, check_job, read_job, read_options

GOOD = "--vllm.num_engines 1 --actor.model_name_or_path m --ds.attn_implementation sdpa"


def check(flags="", options=None, *, has_flash_attn=False):
    check_job(read_job(f"{GOOD} {flags}".split()), options or Options(), has_flash_attn=has_flash_attn)


def test_own_flags_are_taken_out_and_the_rest_is_left_alone():
    options, rest = read_options(
        "--vllm.num_engines 1 --rose.pool http://h:1 --rose.retry_s 5 --algo.dynamic_filtering_range 0 1 --rose.processed_logprobs".split()
    )
    assert options == Options(pool="http://h:1", retry_s=5.0, processed_logprobs=True)
    assert rest == "--vllm.num_engines 1 --algo.dynamic_filtering_range 0 1".split()
    assert read_options([])[0] == Options()


@pytest.mark.parametrize(("flags", "said"), [
    ("--rose.poll http://h:1", r"--rose\.poll is no flag"),
    ("--rose.retry_s soon", "retry_s: soon is no positive number"),
    ("--rose.retry_s -1", "no positive number"),
    ("--rose.weights_dtype fp8", "invalid choice"),
    ("--rose.pool", "expected one argument"),
])  # fmt: skip
def test_own_flags_that_are_wrong(flags, said):
    with pytest.raises(ConfigError, match=said):
        read_options(flags.split())


@pytest.mark.parametrize("flags", [
    "", "--train.async_enable --train.partial_rollout_enable", "--train.colocate_all --train.async_enable",
    "--train.colocate_actor_ref --train.colocate_critic_reward", "--vllm.sync_with_ray", "--ds.zero_stage 3 --ds.tensor_parallel_size 2",
    "--algo.advantage.is_correction_level token", "--rollout.temperature 0.7", "--vllm.enable_sleep --vllm.enable_prefix_caching",
    "--train.colocate_all --vllm.sync_backend gloo",
])  # fmt: skip
def test_jobs_that_a_pool_serves(flags):
    check(flags)


@pytest.mark.parametrize(("flags", "said"), [
    ("--vllm.num_engines 4", r"--vllm\.num_engines 4: .* set it to 1"),
    ("--vllm.tensor_parallel_size 2", r"--vllm\.tensor_parallel_size 2: .* set it to 1"),
    ("--train.colocate_all", r"--train\.colocate_all hands weights over by CUDA IPC"),
    ("--vllm.sync_with_ray --vllm.sync_backend gloo", r"leave --vllm\.sync_with_ray out"),
    ("--ds.lora.rank 8", r"--ds\.lora\.rank"),
    ("--ds.load_in_4bit", r"--ds\.load_in_4bit"),
    ("--data.max_images_per_prompt 1", r"--data\.max_images_per_prompt"),
    ("--algo.advantage.is_correction_level seq --rollout.temperature 0.7", "processed_logprobs"),
    ("--algo.advantage.is_correction_level token --rollout.top_p 0.9", "processed_logprobs"),
    ("--ds.attn_implementation flash_attention_2", "flash_attn is not installed"),
    ("--ds.packing_samples", r"--ds\.packing_samples packs"),
    ("--train.dynamic_batch_enable", r"--train\.dynamic_batch_enable packs"),
    ("--ds.ring_attn_size 2", r"--ds\.ring_attn_size packs"),
    ("--vllm.num_engines some", "invalid int"),
])  # fmt: skip
def test_jobs_that_a_pool_cannot_serve(flags, said):
    with pytest.raises(ConfigError, match=said) as caught:
        check(flags)
    assert "\n" not in str(caught.value)


def test_what_others_make_possible():
    check("--algo.advantage.is_correction_level seq --rollout.temperature 0.7", Options(processed_logprobs=True))
    check("--ds.packing_samples --ds.attn_implementation flash_attention_2", has_flash_attn=True)


def test_no_engines_at_all():
    with pytest.raises(ConfigError, match="num_engines None"):
        check_job(read_job([]), Options(), has_flash_attn=True)
