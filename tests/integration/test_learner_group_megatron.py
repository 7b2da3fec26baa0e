"""The learner on two tensor-parallel Megatron-Core ranks (gloo), small enough for seconds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import attrs
import pytest
import xxhash

from rose.backends.memory import MemoryTransport
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
safetensors_torch = pytest.importorskip("safetensors.torch")
policy = pytest.importorskip("rose.reference.policy")
pytest.importorskip("gymnasium")
if importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)
pytestmark = [pytest.mark.distributed, pytest.mark.filterwarnings("ignore")]

TOKENIZER = WordTokenizer.for_environment(FrozenLake)
SMALL = LearnerConfig(
    trainer="megatron",
    compute_dtype="float32",
    policy=PolicyConfig(num_layers=2, hidden_size=32, intermediate_size=48, num_heads=4, num_kv_heads=2, head_dim=16),
    warm_start=WarmStartConfig(num_steps=4, num_episodes=5, num_warm_up_steps=2),
    grpo=GrpoConfig(micro_rows=2, max_gradient_norm=1e9, lr=1e-3),
    timeout_s=120.0,
)


def episodes(num_groups: int = 2, size: int = 3) -> list[Trajectory]:
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
                reward=float(i % size == 0),
                started_s=0.0,
                ended_s=1.0,
            )
        )
    return made


def whole_batch_gradient_norm(trajectories: list[Trajectory]) -> float:
    """Return what one plain process, with the model of transformers, gets for the whole batch at once."""
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
    return float(torch.stack([parameter.grad.norm() for parameter in model.parameters()]).norm())


@pytest.mark.parametrize("num_kv_heads", [2, 1])
async def test_training_on_two_ranks_is_whole_batch_training(num_kv_heads: int, monkeypatch: pytest.MonkeyPatch):
    """With one KV head a rank ends within a KV group: its part of the fused tensor holds no key, or no query."""
    config = attrs.evolve(SMALL, policy=attrs.evolve(SMALL.policy, num_kv_heads=num_kv_heads))
    monkeypatch.setitem(globals(), "SMALL", config)
    batch = episodes()[:5]
    async with LearnerGroup(config) as group:
        before = await group.state_checksums()
        assert before == _digests(policy.build_policy(config.policy, num_ids=TOKENIZER.num_ids, seed=config.seed))
        report = await group.train(batch, num_minibatches=1)
        assert report.gradient_norm == pytest.approx(whole_batch_gradient_norm(batch), rel=1e-4)
        assert (report.num_samples, report.num_optimizer_steps) == (5, 1)
        after = await group.state_checksums()
        assert all(before[name] != after[name] for name in before if "norm" not in name)
        await group.reset()
        assert await group.state_checksums() == before
        await group.train(batch, num_minibatches=1)
        assert await group.state_checksums() == after, "a reset learner repeats itself exactly"


async def test_its_checkpoint_and_published_bits_are_the_state(tmp_path: Path):
    relay = MemoryTransport()
    relay.serve()
    try:
        async with LearnerGroup(attrs.evolve(SMALL, compute_dtype="bfloat16")) as group:
            losses = await group.warm_start()
            assert len(losses) == 4
            assert losses[-1] < losses[0]
            await group.save_checkpoint(tmp_path)
            stored = safetensors_torch.load_file(tmp_path / "model.safetensors")
            assert {name: _digest(tensor) for name, tensor in stored.items()} == await group.state_checksums()
            await group.publish(run="one", address=relay.address())
            await group.train(episodes(), lr=1e-6, num_minibatches=1)
            report = await group.publish(run="one", address=relay.address())
            assert report["version"] == "one:1"
            assert 0 < report["bytes_sent"] < report["bytes_dense"] / 5
            specs = {n: TensorSpec(name=n, shape=tuple(t.shape), dtype="bfloat16") for n, t in stored.items()}
            sink = ArraySink(specs)
            subscriber = Subscriber(sink)
            subscriber.stage(plan_update(relay, None), relay)
            assert subscriber.activate(verify=True).is_verified
            state = await group.state_checksums()
            assert {name: _array_digest(sink, name) for name in state} == state
    finally:
        relay.close()


def _digests(model) -> dict[str, str]:
    return {name: _digest(weight.detach().to(torch.bfloat16)) for name, weight in model.named_parameters()}


def _digest(tensor) -> str:
    return xxhash.xxh3_128_hexdigest(tensor.contiguous().view(torch.uint16).numpy().tobytes())


def _array_digest(sink: ArraySink, name: str) -> str:
    shape = sink.tensors()[name].shape
    bits = sink.read(name, ShardSpec(offset=(0,) * len(shape), shape=shape))
    return xxhash.xxh3_128_hexdigest(bits.tobytes())
