"""The trainer's weights on a borrowed engine after several syncs: bits, vLLM's own checksums and greedy tokens."""

from __future__ import annotations

import contextlib
from pathlib import Path

import attrs
import pytest

from rose.backends.vllm import VllmEngine, VllmOptions
from rose.pool import RolloutPool
from rose.reference.demo_config import DemoConfig
from rose.reference.demo_models import make_serving_model, policy_models
from rose.reference.env_workers import EnvironmentPool
from rose.reference.fleet import Fleet
from rose.reference.lake import FrozenLake, held_out_seeds, make_map, training_seed
from rose.reference.learner_config import LearnerConfig, WarmStartConfig
from rose.reference.learner_group import LearnerGroup
from rose.reference.rollout import RolloutContext, rollout_step
from rose.reference.tokenizer import WordTokenizer
from rose.reference.trajectory import account, plan_groups
from rose.types import EngineKind, EngineRequest, RequestId, Sampling

pytestmark = [pytest.mark.engine, pytest.mark.distributed, pytest.mark.timeout(400)]

CONFIG = DemoConfig(num_dedicated=1, num_borrowed=1, num_groups=12, group_size=8)
NUM_SYNCS = 3


async def greedy(engine: VllmEngine, prompts: list[tuple[int, ...]], label: str) -> list[list[int]]:
    answers = []
    for i, prompt in enumerate(prompts):
        request = EngineRequest(
            request_id=RequestId(f"{label}-{i}"),
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=24, temperature=0.0, ignore_eos=True),
        )
        answers.append([token async for chunk in engine.generate(request) for token in chunk.token_ids])
    return answers


def start_prompts() -> list[tuple[int, ...]]:
    tokenizer = WordTokenizer.for_environment(FrozenLake)
    prompts = []
    for seed in held_out_seeds(8):
        grid = make_map(seed, size=4, ice_fraction=0.8)
        prompts.append(tokenizer.encode("obs " + " / ".join(" ".join(row) for row in grid) + " act"))
    return prompts


async def test_a_borrowed_engine_holds_the_trainers_weights_after_syncs(tmp_path: Path):
    async with contextlib.AsyncExitStack() as stack:
        fleet = Fleet.prepare(CONFIG)
        stack.push_async_callback(fleet.close)
        learner = await stack.enter_async_context(LearnerGroup(LearnerConfig(warm_start=WarmStartConfig(num_steps=60))))
        await learner.warm_start()
        await learner.save_checkpoint(tmp_path / "start")
        models = policy_models(tmp_path / "start", make_serving_model(tmp_path / "serving", seed=0), FrozenLake)
        await fleet.start(CONFIG, models)
        episodes = await stack.enter_async_context(EnvironmentPool(CONFIG.env, num_processes=1))
        for ledger in fleet.ledgers.values():
            ledger.beat(fleet.clock.now())  # the clock stands still: a serving engine that is alive and idle

        async with RolloutPool(fleet.dedicated, clock=fleet.clock) as pool, fleet.lend_to(pool):
            context = RolloutContext.of(FrozenLake, generate=pool.generate, episodes=episodes, clock=fleet.clock)
            codecs = set()
            for sync in range(NUM_SYNCS):
                seeds = [training_seed(100 * sync + i) for i in range(CONFIG.num_groups)]
                plans = plan_groups(f"step{sync}", seeds, group_size=CONFIG.group_size, run_seed=0)
                trajectories = await rollout_step(context, plans)
                assert account(plans, trajectories).is_whole
                await learner.train(trajectories, lr=1e-3 if sync < NUM_SYNCS - 1 else 1e-6)
                published = await learner.publish(run="test", address=fleet.relay.address())
                codecs |= {codec for codec, count in published["codec_elements"].items() if count and codec != "none"}
                report = await pool.sync_weights(fleet.relay)
                assert not report.errors
                assert all(activation.is_verified for activation in report.activations.values())
            kinds = {view.engine_id: view.kind for view in pool.snapshot().engines}
            borrowed = fleet.borrowed[0]
            assert kinds[borrowed.engine_id] is EngineKind.BORROWED
            assert codecs == {"dense", "sparse"}, "both codecs must have carried weights here"

            assert await borrowed.weight_checksums() == await learner.state_checksums()
            await learner.save_checkpoint(tmp_path / "end")
            fresh = await VllmEngine.create(
                attrs.evolve(borrowed.options, engine_id="fresh", model=str(tmp_path / "end"), rose={})
            )
            stack.push_async_callback(fresh.close)
            assert isinstance(fresh.options, VllmOptions)
            assert await borrowed.vllm_checksums() == await fresh.vllm_checksums()
            prompts = start_prompts()
            tokens = await greedy(borrowed, prompts, "borrowed")
            assert tokens == await greedy(fresh, prompts, "fresh")
            assert len({tuple(answer) for answer in tokens}) > 1, "the prompts must tell weights apart"
