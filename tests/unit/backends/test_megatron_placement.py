"""Where a Megatron-Core rank's rows lie in checkpoint tensors, on values made by hand (cases W03, W05, W06, W15)."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Megatron-Core says at its import what it misses
    pytest.importorskip("megatron.core")
    pytest.importorskip("rose.backends.megatron")

from rose.backends.megatron.families import FAMILIES, ModelShape, checkpoint_shapes, find_family, find_source
from rose.backends.megatron.placement import Ranks, place
from rose.backends.memory import MemoryTransport
from rose.errors import LayoutMismatchError
from rose.interfaces.trainer import ShardBits, ShardSpec, TensorSpec, Trainer
from rose.transfer.layout import find_cover_problem, slices_in, whole_box
from rose.transfer.plan import check_sources
from rose.transfer.publisher import Publisher
from rose.transfer.relay import manifest_key, plan_update, read_manifest
from rose.transfer.sink import ArraySink
from rose.transfer.source_views import HeldBits, held_tensors
from rose.transfer.subscriber import Subscriber
from rose.types import WeightVersion

TOY = ModelShape(
    vocab_size=10,
    hidden_size=1,
    ffn_size=4,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=2,
    is_tied=True,
    num_experts=4,
    expert_ffn_size=2,
    moe_layers=frozenset({0}),
)
QKV, FC1 = "decoder.layers.0.self_attention.linear_qkv.weight", "decoder.layers.0.mlp.linear_fc1.weight"
EMBEDDING = "embedding.word_embeddings.weight"
ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."


class ToyRank(Trainer):
    """One rank that holds the given parameters of ``TOY``, and publishes their tensors alone."""

    def __init__(
        self,
        parameters: Mapping[str, np.ndarray],
        *,
        rank: int = 0,
        world_size: int = 1,
        model: ModelShape = TOY,
        family: str = "qwen3",
        first_expert: int = 0,
        ranks: Ranks | None = None,
    ) -> None:
        self.rank, self.world_size, self.parameters = rank, world_size, dict(parameters)
        self._shapes = checkpoint_shapes(FAMILIES[family], model)
        sources = {name: find_source(name, first_expert) for name in parameters}
        ranks = ranks or Ranks(tensor=rank, num_tensor=world_size)
        placed = {
            name: place(name, parameters[name].shape, source, shapes=self._shapes, ranks=ranks, model=model)
            for name, source in sources.items()
            if source is not None
        }
        views = [view for one in placed.values() for view in one.views]
        self.held = held_tensors(views, {name: one.box for name, one in placed.items()})
        self.names = [name for source in sources.values() if source is not None for name in source.names]

    def tensors(self) -> Mapping[str, TensorSpec]:
        return {name: TensorSpec(name=name, shape=self._shapes[name], dtype="bfloat16") for name in self.names}

    def layout(self) -> Mapping[str, ShardSpec]:
        return {name: held.box for name, held in self.held.items()}

    def shards(self) -> Mapping[str, ShardBits]:
        return {name: HeldBits(held, self.parameters) for name, held in self.held.items()}


def rows(*values: int) -> np.ndarray:
    return np.array(values, dtype="<u2").reshape(-1, 1)


def whole(ranks: Sequence[ToyRank]) -> dict[str, list[int]]:
    """Join the ranks' boxes; refuses anything but a partition."""
    specs = {name: spec for rank in ranks for name, spec in rank.tensors().items()}
    check_sources(specs, [rank.layout() for rank in ranks])
    joined = {name: np.full(spec.shape, 9999, "<u2") for name, spec in specs.items()}
    for rank in ranks:
        for name, bits in rank.shards().items():
            joined[name][slices_in(rank.layout()[name], whole_box(joined[name].shape))] = np.asarray(bits)
    return {name: values.ravel().tolist() for name, values in joined.items()}


def on_two_ranks(name: str, first: np.ndarray, second: np.ndarray) -> list[ToyRank]:
    return [ToyRank({name: part}, rank=rank, world_size=2) for rank, part in enumerate((first, second))]


def test_w03_fused_qkv_of_two_ranks_by_kv_group() -> None:
    """The checkpoint's q, k and v, and what two tensor-parallel ranks of vLLM hold of them."""
    ranks = on_two_ranks(QKV, rows(0, 1, 2, 3, 100, 101, 200, 201), rows(4, 5, 6, 7, 102, 103, 202, 203))
    joined = whole(ranks)
    q, k, v = (joined[f"{ATTENTION}{kind}_proj.weight"] for kind in "qkv")
    assert (q, k, v) == ([*range(8)], [100, 101, 102, 103], [200, 201, 202, 203])
    assert [q[4:] + k[2:] + v[2:]] == [[4, 5, 6, 7, 102, 103, 202, 203]]


def test_w03_fused_qkv_of_one_rank_is_taken_apart_slice_by_slice() -> None:
    """Both groups on one rank: a box in two pieces, of which any part can be asked for."""
    fused = rows(0, 1, 2, 3, 100, 101, 200, 201, 4, 5, 6, 7, 102, 103, 202, 203)
    rank = ToyRank({QKV: fused})
    query = rank.shards()[f"{ATTENTION}q_proj.weight"]
    assert [query[slice(a, b), slice(0, 1)].ravel().tolist() for a, b in ((0, 8), (3, 5), (5, 8), (2, 2))] == [
        [*range(8)], [3, 4], [5, 6, 7], [],
    ]  # fmt: skip
    assert whole([rank])[f"{ATTENTION}v_proj.weight"] == [200, 201, 202, 203]
    fused[3] = 33
    assert query[slice(3, 5), slice(0, 1)].ravel().tolist() == [33, 4], "shows the live weights"


def test_w03_bias_and_fewer_kv_heads_than_ranks() -> None:
    """One KV group over two ranks: the first holds queries only, the second one query head, the key and the value."""
    model = attrs.evolve(TOY, num_heads=4, num_kv_heads=1)
    parts = (np.array([0, 1, 2, 3, 4, 5], "<u2"), np.array([6, 7, 100, 101, 200, 201], "<u2"))
    name = QKV.replace("weight", "bias")
    ranks = [ToyRank({name: part}, rank=i, world_size=2, model=model, family="qwen2") for i, part in enumerate(parts)]
    assert [set(rank.layout()) for rank in ranks] == [
        {f"{ATTENTION}q_proj.bias"},
        {f"{ATTENTION}{kind}_proj.bias" for kind in "qkv"},
    ]
    joined = whole(ranks)
    assert [joined[f"{ATTENTION}{kind}_proj.bias"] for kind in "qkv"] == [[*range(8)], [100, 101], [200, 201]]


def test_w05_gate_and_up_of_two_ranks() -> None:
    joined = whole(on_two_ranks(FC1, rows(0, 1, 10, 11), rows(2, 3, 12, 13)))
    gate, up = joined[f"{MLP}gate_proj.weight"], joined[f"{MLP}up_proj.weight"]
    assert (gate, up) == ([0, 1, 2, 3], [10, 11, 12, 13])
    assert [gate[2], up[2]] == [2, 12], "rank 2 of four"


def test_w06_padding_of_the_vocabulary_is_never_published() -> None:
    """Ten rows over two ranks of eight: garbage that changes in the six others moves no byte; row 9 does."""
    ranks = on_two_ranks(EMBEDDING, rows(*range(8)), rows(8, 9, *[7] * 6))
    name = "model.embed_tokens.weight"
    assert [rank.layout()[name] for rank in ranks] == [
        ShardSpec(offset=(0, 0), shape=(8, 1)),
        ShardSpec(offset=(8, 0), shape=(2, 1)),
    ]
    with contextlib.closing(MemoryTransport()) as store:
        sink = ArraySink(ranks[0].tensors())
        subscriber = Subscriber(sink)
        joined = publish(ranks, store, 3, soil=ranks[1].parameters[EMBEDDING], subscriber=subscriber)
        assert joined == [0, 1, 2, 3, 4, 5, 6, 7, 8, 90]
        assert sink.array(name).ravel().tolist() == joined
        changed = [read_manifest(store, manifest_key(WeightVersion("toy", n), n)).num_changed for n in (1, 2)]
    assert changed == [1, 0]


def test_w06_a_rank_with_nothing_but_padding_holds_no_box() -> None:
    """Sixteen rows a rank: the second holds padding only; real sizes of Qwen3's vocabulary for 2 to 16 ranks."""
    ranks = on_two_ranks(EMBEDDING, np.zeros((16, 1), "<u2"), np.ones((16, 1), "<u2"))
    assert [list(rank.layout()) for rank in ranks] == [["model.embed_tokens.weight"], []]
    for num_ranks, padded in ((1, 151936), (2, 152064), (4, 152064), (8, 152576), (16, 153600)):
        part = np.zeros((padded // num_ranks, 1), "<u2")
        model = attrs.evolve(TOY, vocab_size=151936)
        boxes = [
            ToyRank({EMBEDDING: part}, rank=i, world_size=num_ranks, model=model).layout().values()
            for i in range(num_ranks)
        ]
        assert find_cover_problem((151936, 1), [box for held in boxes for box in held]) is None


def test_w15_experts_are_numbered_over_all_ranks() -> None:
    """Two ranks of two experts each, worth 100 times their number; a rank numbers its own from 0."""
    ranks = []
    for rank in range(2):
        parameters = {}
        for local in range(2):
            prefix = f"decoder.layers.0.mlp.experts.local_experts.{local}."
            value = 100 * (2 * rank + local)
            parameters[prefix + "linear_fc1.weight"] = rows(value, value, value + 1, value + 1)
            parameters[prefix + "linear_fc2.weight"] = np.full((1, 2), value, "<u2")
        ranks.append(
            ToyRank(parameters, rank=rank, world_size=2, family="qwen3_moe", first_expert=2 * rank, ranks=Ranks())
        )
    joined = whole(ranks)
    for expert in range(4):
        prefix = f"{MLP}experts.{expert}."
        assert joined[prefix + "gate_proj.weight"] == [100 * expert] * 2
        assert joined[prefix + "up_proj.weight"] == [100 * expert + 1] * 2
        assert joined[prefix + "down_proj.weight"] == [100 * expert] * 2
    with pytest.raises(LayoutMismatchError, match=r"experts\.0\.gate_proj"):
        whole([ranks[0], ToyRank(ranks[1].parameters, family="qwen3_moe", first_expert=0)])


def test_grouped_experts_have_the_same_names() -> None:
    """Transformer Engine's grouped layers number their weights."""
    source = find_source("decoder.layers.3.mlp.experts.linear_fc1.weight5", first_expert=8)
    assert source is not None
    assert source.names == tuple(f"model.layers.3.mlp.experts.13.{part}_proj.weight" for part in ("gate", "up"))
    assert find_source("decoder.layers.3.mlp.experts.weight1", first_expert=0) is None, "the legacy form is not known"


def test_a_parameter_of_another_shape_is_refused() -> None:
    for parameters, said in (
        ({FC1: rows(*range(6))}, r"linear_fc1.weight has shape \(6, 1\).*but \(8, 1\) follows"),
        ({EMBEDDING: rows(*range(9))}, r"shape \(9, 1\).*\(10, 1\) follows.*vocab_size \(10\)"),
    ):
        with pytest.raises(LayoutMismatchError, match=said):
            ToyRank(parameters)
    with pytest.raises(LayoutMismatchError, match="cannot be cut over 3"):
        ToyRank({FC1: rows(0, 1)}, world_size=3)


def test_an_unknown_family_is_refused() -> None:
    with pytest.raises(LayoutMismatchError, match="no family 'bert'; there are llama, qwen2"):
        find_family("bert")


def publish(
    ranks: list[ToyRank], store: MemoryTransport, num_versions: int, *, soil: np.ndarray, subscriber: Subscriber
) -> list[int]:
    """Publish versions; after the first, row 9 becomes 90 once, and the padding changes before every one."""
    from concurrent.futures import ThreadPoolExecutor  # noqa: PLC0415 - here alone

    publishers = [Publisher(rank, store, run="toy", timeout_s=30.0) for rank in ranks]
    with ThreadPoolExecutor(len(ranks)) as threads:
        for n in range(num_versions):
            soil[2:] = 1000 + n
            if n == 1:
                soil[1] = 90
            list(threads.map(Publisher.publish_sync, publishers))
            update = plan_update(store, subscriber.version)
            assert update is not None
            subscriber.stage(update, store)
            subscriber.activate(verify=True)
    return whole(ranks)["model.embed_tokens.weight"]
