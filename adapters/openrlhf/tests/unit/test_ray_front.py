"""The front as a Ray actor, in a cluster whose workers are set up by the hook; the engines behind the pool are scripted."""

import asyncio
import json
import sys
import textwrap

import pytest

from harness import environment
from rose.testing import FakeEngine
from rose.types import EngineId
from test_actor import model, pool_of  # noqa: F401 - a fixture

PROGRAM = """
    import json, sys
    import ray
    from rose.frameworks import PoolPlace
    from rose_openrlhf import workers
    from rose_openrlhf.actor import FrontSettings
    from rose_openrlhf.engines import EngineMaker
    from rose_openrlhf.flags import Options, read_job
    from rose_openrlhf.launcher import with_setup

    url, model = sys.argv[1:]
    workers.set_up()
    options = Options(retry_s=1.0, sync_timeout_s=20.0)
    with_setup(ray.init, options)(runtime_env={"env_vars": {"SEEN": "1"}}, log_to_driver=True)

    @ray.remote(num_cpus=0)
    class Rank:  # of --vllm.sync_with_ray
        def send(self):
            import torch
            from ray.util import collective

            collective.init_collective_group(2, 0, backend="gloo", group_name="openrlhf")
            collective.broadcast(torch.arange(4.0), 0, group_name="openrlhf")

        def receive(self):
            import torch
            from rose_openrlhf.broadcast import BroadcastMember

            member = BroadcastMember(device="cpu")
            member.join(address="", port=0, rank=1, world_size=2, group_name="openrlhf", backend="gloo", use_ray=True)
            return member.receive(torch.float32, (4,)).tolist()

    sender, receiver = Rank.remote(), Rank.remote()
    assert ray.get([sender.send.remote(), receiver.receive.remote()])[1] == [0.0, 1.0, 2.0, 3.0]
    maker = EngineMaker(place=PoolPlace(url=url), options=options, job=read_job([]), has_vllm=False)
    (engine,) = maker.create(1, 1, model, 0, False, False, False, 96)

    @ray.remote(num_cpus=0)
    class Generator:
        def ask(self, engine, model):
            import os
            from transformers import AutoTokenizer
            from vllm import IS_STAND_IN, SamplingParams

            assert IS_STAND_IN and os.environ["SEEN"] == "1"
            params = SamplingParams(temperature=1.0, max_tokens=8, min_tokens=1, logprobs=1, top_k=-1, skip_special_tokens=False)
            tokenizer = AutoTokenizer.from_pretrained(model)
            refs = [engine.generate_responses.remote(f"what is {n} ?", "", params, 96, tokenizer, 2, None) for n in range(3)]
            assert ray.get(engine.get_num_unfinished_requests.remote()) >= 0
            return [response for responses in ray.get(refs) for response in responses]

    print(json.dumps(ray.get(Generator.remote().ask.remote(engine, model))))
"""


async def run(folder, *arguments):
    program = folder / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(program),
        *arguments,
        env=environment(folder),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, errors = await asyncio.wait_for(process.communicate(), 120)
    return process.returncode, out.decode(), errors.decode()


async def test_openrlhfs_calls_reach_the_pool(model, tmp_path):  # noqa: F811
    async with pool_of(*(FakeEngine(engine_id=EngineId(f"e{i}")) for i in range(2))) as (url, pool, _):
        code, out, errors = await run(tmp_path, url, str(model))
        assert code == 0, errors
        responses = json.loads(out.splitlines()[-1])
        assert len(responses) == 6
        for response in responses:
            start, end = response["action_ranges"][0]
            assert end - start == 8
            assert len(response["rollout_log_probs"]) == len(response["observation_tokens"]) == end
            assert response["truncated"]
            assert response["extra_logs"]["rose_version_min"] == 0.0
        assert str(pool.snapshot().version).endswith(":0")


async def test_a_front_that_cannot_open_is_one_line_and_code_2(model, tmp_path):  # noqa: F811
    async with pool_of(FakeEngine(engine_id=EngineId("e0")), has_store=False) as (url, _, __):
        code, _, errors = await run(tmp_path, url, str(model))
    assert code == 2
    (line,) = [line for line in errors.splitlines() if line.startswith("rose_openrlhf: ")]
    assert "keeper" in line


@pytest.mark.parametrize("engines", [2])
def test_more_engines_than_one_are_refused_in_the_end(engines):
    from rose.errors import ConfigError
    from rose.frameworks import PoolPlace
    from rose_openrlhf.engines import EngineMaker
    from rose_openrlhf.flags import Options, read_job

    maker = EngineMaker(place=PoolPlace(url="http://127.0.0.1:9"), options=Options(), job=read_job([]), has_vllm=False)
    with pytest.raises(ConfigError, match="num_engines 1"):
        maker.create(engines, 1, "m", 0, False, False, False, 96)
