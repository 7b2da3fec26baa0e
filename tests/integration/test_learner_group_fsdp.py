"""The learner on two real FSDP2 ranks (gloo), small enough for seconds."""

from __future__ import annotations

import os
import signal

import attrs
import numpy as np
import pytest
import xxhash

from rose.backends.memory import MemoryTransport
from rose.errors import TrainerError
from rose.interfaces import ShardSpec, TensorSpec
from rose.reference.grpo import clipped_surrogate, find_signal
from rose.reference.lake import FrozenLake
from rose.reference.learner_config import GrpoConfig, LearnerConfig, PolicyConfig, WarmStartConfig
from rose.reference.learner_group import LearnerGroup
from rose.reference.tokenizer import WordTokenizer
from rose.reference.trajectory import Trajectory
from rose.transfer.relay import plan_update
from rose.transfer.sink import ArraySink
from rose.transfer.subscriber import Subscriber

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
policy = pytest.importorskip("rose.reference.policy")
pytest.importorskip("gymnasium")
pytestmark = pytest.mark.distributed

TOKENIZER = WordTokenizer.for_environment(FrozenLake)
SMALL = LearnerConfig(
    compute_dtype="float32",
    policy=PolicyConfig(num_layers=2, hidden_size=32, intermediate_size=48, num_heads=2, num_kv_heads=1, head_dim=16),
    warm_start=WarmStartConfig(num_steps=6, num_episodes=5, num_warm_up_steps=2),
    grpo=GrpoConfig(micro_rows=2, max_gradient_norm=1e9, lr=1e-3),
    timeout_s=120.0,
)


def episodes(num_groups: int = 2, size: int = 3, *, is_flat: bool = False) -> list[Trajectory]:
    made = []
    for i in range(num_groups * size):
        ids, mask = [1], [0]
        for turn in FrozenLake().demonstrate(i):
            ids += TOKENIZER.encode(turn.observation) + TOKENIZER.encode(turn.answer)
            mask += [0] * len(turn.observation) + [1] * len(turn.answer)
        made.append(
            Trajectory(
                trajectory_id=f"t{i}",
                group_id=f"g{i // size}",
                environment_seed=i,
                token_ids=tuple(ids),
                mask=tuple(mask),
                logprobs=tuple(-3.4 * m for m in mask),
                reward=0.0 if is_flat else float(i % size == 0),
                started_s=0.0,
                ended_s=1.0,
            )
        )
    return made


def whole_batch_gradient_norm(trajectories) -> float:
    """Return what one plain process gets for the whole batch at once."""
    torch.set_num_threads(1)
    model = policy.build_policy(SMALL.policy, num_ids=TOKENIZER.num_ids, seed=SMALL.seed)
    samples = find_signal(trajectories).samples
    num_tokens = sum(sample.num_tokens for sample in samples)
    for sample in samples:
        surrogate = clipped_surrogate(
            policy.token_logprobs(lambda ids: model(input_ids=ids).logits, torch.tensor([sample.token_ids])),
            torch.tensor([sample.logprobs]),
            torch.tensor([sample.advantage]),
            torch.tensor([sample.mask], dtype=torch.float32),
            clip_low=0.2,
            clip_high=0.28,
        )
        (-surrogate.objective_sum / num_tokens).backward()
    gradients = [parameter.grad for parameter in model.parameters()]
    return float(torch.stack([gradient.norm() for gradient in gradients]).norm())


@pytest.mark.filterwarnings("ignore")
async def test_training_on_two_ranks_is_whole_batch_training():
    """Five samples of unequal length on two ranks in micro-batches of two give the gradient of one process."""
    batch = episodes()[:5]
    async with LearnerGroup(SMALL) as group:
        before = await group.state_checksums()
        report = await group.train(batch, num_minibatches=1)
        assert report.gradient_norm == pytest.approx(whole_batch_gradient_norm(batch), rel=1e-4)
        assert (report.num_samples, report.num_optimizer_steps) == (5, 1)
        after = await group.state_checksums()
        assert before.keys() == after.keys()
        matrices = [name for name in before if "norm" not in name]
        assert all(before[name] != after[name] for name in matrices), "a small step may round away in a norm's bfloat16"

        lonely = [attrs.evolve(t, group_id="g0") for t in batch[:2]]
        report = await group.train(lonely, num_minibatches=2)  # each minibatch leaves one rank without a sample
        assert (report.num_samples, report.num_optimizer_steps) == (2, 2)

        state = await group.state_checksums()
        report = await group.train(episodes(is_flat=True))
        assert (report.num_samples, report.num_flat_groups, report.num_optimizer_steps) == (0, 2, 0)
        assert await group.state_checksums() == state

        await group.reset()
        assert await group.state_checksums() == before
        await group.train(batch, num_minibatches=1)
        assert await group.state_checksums() == after, "a reset learner repeats itself exactly"


@pytest.mark.filterwarnings("ignore")
async def test_the_warm_start_repeats_and_its_checkpoint_and_published_bits_are_the_state(tmp_path):
    checksums = []
    relay = MemoryTransport()
    relay.serve()
    try:
        for _ in range(2):
            async with LearnerGroup(SMALL) as group:
                losses = await group.warm_start()
                assert len(losses) == 6
                assert losses[-1] < losses[0]
                checksums.append(await group.state_checksums())
                await group.train(episodes())
                await group.reset()
                assert await group.state_checksums() == checksums[-1], "reset returns to the warm start"
                if len(checksums) == 2:
                    break
                await group.save_checkpoint(tmp_path)
                stored = safetensors_torch.load_file(tmp_path / "model.safetensors")
                assert {name: _digest(tensor) for name, tensor in stored.items()} == checksums[-1]
                model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
                assert model.dtype == torch.bfloat16

                report = await group.publish(run="one", address=relay.address())
                assert (report["version"], report["num_changed"]) == ("one:0", report["num_elements"])
                await group.train(episodes(), lr=1e-6, num_minibatches=1)
                report = await group.publish(run="one", address=relay.address())
                assert report["version"] == "one:1"
                assert 0 < report["bytes_sent"] < report["bytes_dense"] / 5
                sink = ArraySink(_specs(stored))
                subscriber = Subscriber(sink)
                subscriber.stage(plan_update(relay, None), relay)
                assert subscriber.activate(verify=True).is_verified
                state = await group.state_checksums()
                assert {name: _array_digest(sink, name) for name in state} == state
                report = await group.publish(run="two", address=relay.address())
                assert (report["version"], report["is_anchor"]) == ("two:0", True)
    finally:
        relay.close()
    assert checksums[0] == checksums[1], "the same seed gives the same warm start"


def _digest(tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.view(torch.uint16).numpy().tobytes())


def _specs(stored):
    return {n: TensorSpec(name=n, shape=tuple(t.shape), dtype="bfloat16") for n, t in stored.items()}


def _array_digest(sink, name: str) -> str:
    shape = sink.tensors()[name].shape
    bits = sink.read(name, ShardSpec(offset=(0,) * len(shape), shape=shape))
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(bits).tobytes())


async def test_a_killed_rank_is_a_clear_error_and_not_a_hang():
    async with LearnerGroup(SMALL) as group:
        os.kill(group._ranks[1].pid, signal.SIGKILL)
        with pytest.raises(TrainerError, match="learner rank 1 ended with code -9"):
            await group.train(episodes())
        with pytest.raises(TrainerError, match="the learner cannot reset"):
            await group.reset()


async def test_an_environment_without_demonstrations_cannot_warm_start(tmp_path, monkeypatch):
    (tmp_path / "silent_game.py").write_text(
        "class Silent:\n    words = ('a',)\n    action_words = ('a',)\n    max_turns = 1\n    max_tokens_per_turn = 1\n"
        "    def reset(self, seed): return 'a'\n    def step(self, text): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    config = attrs.evolve(SMALL, num_ranks=1, environment="silent_game:Silent")
    async with LearnerGroup(config) as group:
        with pytest.raises(TrainerError, match="silent_game:Silent has no demonstrate"):
            await group.warm_start()
