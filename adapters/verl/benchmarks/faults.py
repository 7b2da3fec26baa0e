"""The same fault, once with veRL alone and once with its rollouts on a pool: what is lost, and whether the job goes on.

Both sides run veRL's own code around the fault: ``LLMServerClient`` and ``GlobalRequestLoadBalancer`` for turns, ``CheckpointEngineManager`` for weights, and
veRL's rule that a group with a failed session is discarded. Each side has four engines that really compute: with veRL alone four actors with the
tiny model, with ROSE a pool site (three vLLM engines of its own and one borrowed). The driver does what veRL's trainer does in a step: all groups, then
the weights. A step that is not at its end after ``--patience`` seconds counts as one that never ends: veRL has no time limit there.

    python benchmarks/faults.py --out faults.json          (in the adapter's test environment; ROSE_ENGINE_PYTHON names the engines' python)
"""

import argparse
import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))
# The tests' platform, for this process and the ones that Ray starts: veRL looks for a device wherever it is imported.
os.environ |= {
    "PYTHONPATH": str(HERE.parent / "tests"),
    "VERL_USE_EXTERNAL_MODULES": "cpu_platform",
    "VERL_PLATFORM": "rosecpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "OMP_NUM_THREADS": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}

FAULTS = ("none", "fails_fast", "dies", "hangs", "update_fails")
STEPS, GROUPS, GROUP_SIZE, MAX_TOKENS, PROMPT_TOKENS = 3, 16, 4, 16, 12
LIMIT = 16
PACKAGES = ("torch", "ray", "transformers", "verl")


class Server:
    """One of veRL's servers, as far as clients and managers of veRL can tell: the tiny model, computed token by token."""

    def __init__(self, policy):
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._model = AutoModelForCausalLM.from_pretrained(
            policy, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._fault = "none"

    async def set_fault(self, fault):
        self._fault = fault

    async def generate(self, *, request_id, prompt_ids, sampling_params, **_):
        import torch
        from verl.workers.rollout.replica import TokenOutput

        if self._fault == "fails_fast":
            raise RuntimeError("injected: fails at once")
        ids, logprobs = list(prompt_ids), []
        with torch.no_grad():
            for _ in range(sampling_params["max_tokens"]):
                if self._fault == "hangs":
                    await asyncio.sleep(1e9)
                scores = torch.log_softmax(self._model(torch.tensor([ids])).logits[0, -1], -1)
                token = int(torch.multinomial(scores.exp(), 1))
                ids.append(token)
                logprobs.append(float(scores[token]))
                await asyncio.sleep(0.01)
        return TokenOutput(
            token_ids=ids[len(prompt_ids) :],
            log_probs=logprobs,
            stop_reason="completed",
            extra_fields={"global_steps": 0},
        )

    async def update_weights(self, global_steps=None):
        if self._fault == "update_fails":
            raise RuntimeError("injected: cannot take these weights")

    async def execute_checkpoint_engine(self, method, *args, **kwargs):
        return {}

    async def _nothing(self, *args, **kwargs):
        return None

    abort_all_requests = resume_generation = release_kv_cache = resume_kv_cache = _nothing


class Replica:
    """What a manager of veRL knows of a server."""

    def __init__(self, server):
        self.servers = self.workers = [server]

    def __getattr__(self, name):
        async def call(**kwargs):
            await asyncio.gather(*(getattr(server, name).remote(**kwargs) for server in self.servers))

        return call


class Trainers:
    """The trainers' side of a manager of veRL: one rank, in this process."""

    world_size = 1

    def __init__(self, push=None):
        self._push = push

    def execute_checkpoint_engine(self, method, **_):
        import ray

        return [ray.put({})]

    def update_weights(self, global_steps, mode):
        import ray

        if self._push is not None:
            self._push(global_steps)
        return [ray.put({})]


async def run_job(client, update, inject, patience_s):
    """Do what a trainer does; returns what became of it."""
    lost = discarded = ended = 0
    why = ""
    for step in range(STEPS):
        try:
            async with asyncio.timeout(patience_s):
                results = await rollout(client, step, inject if step == 1 else None)
                if step == 1:
                    await inject("now")
        except TimeoutError:
            why = "a step never ends"
            lost += GROUPS * GROUP_SIZE - len(_done)
            discarded += GROUPS - sum(
                len([one for one in _done if one[0] == group]) == GROUP_SIZE for group in range(GROUPS)
            )
            break
        failed = [sum(isinstance(one, BaseException) for one in group) for group in results]
        lost += sum(failed)
        discarded += sum(map(bool, failed))
        if all(failed):
            why = "no group is left to train on"
            break
        try:
            await update(step + 1)
        except Exception as error:
            why = f"the trainer ends: {type(error).__name__}"
            break
        ended += 1
    return {"samples_lost": lost, "groups_discarded": discarded, "steps_ended": ended, "is_alive": not why, "why": why}


_done = set()


async def rollout(client, step, inject):
    """All groups of a step; the fault comes when some are at work."""
    _done.clear()
    limit = asyncio.Semaphore(LIMIT)

    async def session(group, number):
        async with limit:
            params = {"temperature": 1.0, "top_p": 1.0, "logprobs": True, "max_tokens": MAX_TOKENS, "ignore_eos": True}
            prompt = [3 + (group * 7 + one) % 90 for one in range(PROMPT_TOKENS)]
            output = await client.generate(
                request_id=f"{step}-{group}-{number}", prompt_ids=prompt, sampling_params=params
            )
            if len(output.token_ids) != MAX_TOKENS or len(output.log_probs) != MAX_TOKENS:
                raise AssertionError("a sample is not whole")
            _done.add((group, number))

    tasks = [[asyncio.ensure_future(session(group, number)) for number in range(GROUP_SIZE)] for group in range(GROUPS)]
    try:
        if inject is not None:
            while len(_done) < GROUP_SIZE:
                await asyncio.sleep(0.01)
            await inject("at work")
        return [await asyncio.gather(*group, return_exceptions=True) for group in tasks]
    except asyncio.CancelledError:
        for group in tasks:
            for task in group:
                task.cancel()
        raise


def config():
    from omegaconf import OmegaConf

    return OmegaConf.create(
        {"actor_rollout_ref": {"rollout": {"name": "x", "full_determinism": False, "response_length": MAX_TOKENS}}}
    )


def manager(backend, trainers, replicas):
    from verl.checkpoint_engine import CheckpointEngineManager
    from verl.workers.config import CheckpointEngineConfig

    return CheckpointEngineManager(CheckpointEngineConfig(backend=backend), trainers, replicas)


async def verl_alone(fault, policy, patience_s):
    import ray
    from verl.checkpoint_engine import CheckpointEngine, CheckpointEngineRegistry
    from verl.workers.rollout.llm_server import LLMServerClient
    from verl.workers.rollout.router import get_router_handle

    from rose_verl.checkpoint import make_engine_class

    CheckpointEngineRegistry.register("bench")(
        make_engine_class(CheckpointEngine)
    )  # a topology without arguments; nothing else of it is used
    actor = ray.remote(Server)
    servers = [actor.options(num_cpus=0, max_concurrency=200).remote(str(policy)) for _ in range(4)]
    await asyncio.gather(*(server.set_fault.remote("none") for server in servers))
    router = get_router_handle({f"s{n}": server for n, server in enumerate(servers)})
    client = LLMServerClient(config(), load_balancer_handle=router)

    async def inject(when):
        if fault in ("fails_fast", "hangs") and when == "at work":
            await servers[0].set_fault.remote(fault)
        elif fault == "dies" and when == "at work":
            ray.kill(servers[0])
        elif fault == "update_fails" and when == "now":
            await servers[0].set_fault.remote(fault)

    weights = manager("bench", Trainers(), [Replica(server) for server in servers])
    try:
        return await run_job(client, weights.update_weights, inject, patience_s)
    finally:
        for server in servers:
            ray.kill(server)


async def with_rose(fault, policy, patience_s, site):
    import torch
    from safetensors.torch import load_file
    from verl.workers.config import RolloutConfig

    from rose_verl.board import find_board
    from rose_verl.client import RoseClient
    from rose_verl.replica import RoseReplica
    from rose_verl.weights import Pusher

    rollout_config = RolloutConfig(
        name="rose",
        dtype="float32",
        prompt_length=64,
        response_length=MAX_TOKENS,
        tensor_model_parallel_size=1,
        calculate_log_probs=True,
        engine_kwargs={"rose": {"pool": site.url, "sync_timeout_s": 20.0}},
    )
    replica = RoseReplica(replica_rank=0, config=rollout_config, model_config={}, gpus_per_node=1)
    await replica.init_standalone()
    board = find_board()
    pusher = Pusher(board, await board.settings.remote(), await board.run.remote())
    weights = load_file(str(policy / "model.safetensors"))

    async def push(step):
        for name, tensor in weights.items():
            weights[name] = tensor + 1e-4 * step * torch.ones_like(tensor)
        await pusher.push(iter(weights.items()), step, is_tied=True)

    async def update(step):  # the manager waits for trainers in place, so they push first; everything else is its own
        await push(step)
        await manager("rose", Trainers(), [replica]).update_weights(step)

    async def inject(when):
        do = {"fails_fast": site.fail_fast, "hangs": site.hang, "dies": site.kill}.get(fault)
        if do is not None and when == "at work":
            await asyncio.to_thread(do, "own0")
        elif fault == "update_fails" and when == "now":
            await asyncio.to_thread(site.fail_updates, "own0")

    await push(0)
    client = RoseClient(board=board, config=config())
    return await run_job(client, update, inject, patience_s)


def one_case(side, fault, policy, patience_s, site):
    """A case in a Ray cluster of its own."""
    import ray

    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        begun = time.monotonic()
        work = verl_alone(fault, policy, patience_s) if side == "verl" else with_rose(fault, policy, patience_s, site)
        found = asyncio.run(work)
        return {"side": side, "fault": fault, **found, "seconds": round(time.monotonic() - begun, 1)}
    finally:
        ray.shutdown()


def table(rows):
    """The rows as Markdown."""
    lines = [
        "| fault, on one engine of four | | samples lost | groups discarded | steps ended | job |",
        "|---|---|---|---|---|---|",
    ]
    total, groups = STEPS * GROUPS * GROUP_SIZE, STEPS * GROUPS
    for row in rows:
        job = "alive" if row["is_alive"] else row["why"]
        name = {"verl": "veRL alone", "rose": "with ROSE"}[row["side"]]
        lines.append(
            f"| {row['fault']} | {name} | {row['samples_lost']} of {total} | {row['groups_discarded']} of {groups} | {row['steps_ended']} of {STEPS} | {job} |"
        )
    return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("faults.json"))
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=FAULTS)
    parser.add_argument("--sides", nargs="+", choices=("verl", "rose"), default=("verl", "rose"))
    parser.add_argument("--patience", type=float, default=60.0, metavar="SECONDS")
    arguments = parser.parse_args()

    from rose.bench.machine import commit, machine, versions
    from rose.testing import PoolSite
    from tiny import make_policy

    rows = []
    measured = {"machine": machine(), "versions": versions(PACKAGES), "commit": commit(), "rows": rows}
    with tempfile.TemporaryDirectory() as folder:
        policy = make_policy(Path(folder) / "policy")
        for fault in arguments.faults:
            for side in arguments.sides:
                with contextlib.ExitStack() as stack:
                    site = None
                    if side == "rose":
                        site = stack.enter_context(
                            PoolSite.start(policy, dedicated=3, borrowed=1, max_len=128, stall_s=3.0)
                        )
                    rows.append(one_case(side, fault, policy, arguments.patience, site))
                    print(json.dumps(rows[-1]), flush=True)
                    arguments.out.write_text(json.dumps(measured, indent=1) + "\n")
    print(table(rows))


if __name__ == "__main__":
    main()
