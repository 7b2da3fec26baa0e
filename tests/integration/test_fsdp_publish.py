"""Two FSDP2 ranks train and publish; engines of one and of two ranks hold exactly the trainer's bits after every step."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from rose.backends.memory import MemoryTransport
from rose.interfaces.trainer import ShardSpec, TensorSpec, Trainer
from rose.testing import TrainerContract, TrainerRecord
from rose.transfer.layout import TargetLayout, slices_in, whole_box
from rose.transfer.manifest import dense_bytes
from rose.transfer.relay import manifest_key, plan_update, read_manifest, read_map
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.types import WeightUpdate, WeightVersion

WORKER = Path(__file__).with_name("fsdp_publish_worker.py")
WORLD_SIZE = 2
BLOB_HEADER_BYTES, CELL_ROW_BYTES = 512, 48
pytestmark = pytest.mark.distributed


@attrs.frozen
class Trained:
    """What two worker processes left behind: their results, and the store that they published into."""

    store: MemoryTransport
    ranks: list[dict[str, Any]]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return dict(self.ranks[0]["record"].tensors())


def _tensors() -> list[TensorSpec]:
    """The tiny model's tensors, as its config gives them."""
    hidden, inner, heads, kv, dim = 32, 48, 4, 2, 8
    shapes: dict[str, tuple[int, ...]] = {"gain": (1,), "model.embed_tokens.weight": (129, hidden)}
    for i in range(2):
        prefix = f"model.layers.{i}."
        shapes |= {
            prefix + "self_attn.q_proj.weight": (heads * dim, hidden),
            prefix + "self_attn.k_proj.weight": (kv * dim, hidden),
            prefix + "self_attn.v_proj.weight": (kv * dim, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, heads * dim),
            prefix + "self_attn.q_norm.weight": (dim,),
            prefix + "self_attn.k_norm.weight": (dim,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
        }
    shapes["model.norm.weight"] = (hidden,)
    return [TensorSpec(name=name, shape=shape, dtype="bfloat16") for name, shape in shapes.items()]


def _tp2() -> TargetLayout:
    columns = ("o_proj", "down_proj")
    rows = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens")
    dims = {t.name: 1 for t in _tensors() if any(c in t.name for c in columns)}
    dims |= {t.name: 0 for t in _tensors() if any(r in t.name for r in rows)}
    return TargetLayout.tensor_parallel("tp2", _tensors(), num_ranks=2, split_dims=dims)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory):
    out = tmp_path_factory.mktemp("fsdp")
    store = MemoryTransport()
    address = store.serve()
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    task = {
        "out": str(out),
        "world_size": WORLD_SIZE,
        "transport": address.name,
        "options": address.options,
        "targets": [_tp2().to_json()],
    }
    workers = [
        subprocess.Popen(
            [sys.executable, str(WORKER), json.dumps(task | {"rank": rank})],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        errors = [worker.communicate(timeout=240)[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0] * WORLD_SIZE, "\n".join(errors)
        ranks = [pickle.loads((out / f"rank-{rank}.pkl").read_bytes()) for rank in range(WORLD_SIZE)]  # noqa: S301
        yield Trained(store, ranks)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
        store.close()


def _follow(trained: Trained, boxes: dict[str, tuple[ShardSpec, ...]] | None) -> list[int]:
    """Go through every version and compare bits; returns the bytes fetched for each."""
    sink = ArraySink(trained.specs, boxes)
    subscriber = Subscriber(sink)
    fetched = []
    for n, truth in enumerate(trained.ranks[0]["truth"]):
        version = WeightVersion("fsdp", n)
        update = WeightUpdate(
            target=version, manifest_keys=(manifest_key(version, version.n),), address=trained.store.address()
        )
        subscriber.stage(update, trained.store)
        activation = subscriber.activate(verify=True)
        assert activation.is_verified
        fetched.append(activation.fetched_bytes)
        for name, held in sink.boxes().items():
            for box in held:
                whole = whole_box(truth[name].shape)
                np.testing.assert_array_equal(sink.read(name, box), truth[name][slices_in(box, whole)], err_msg=name)
    return fetched


def test_an_engine_holds_the_trainers_bits_after_each_step(trained: Trained) -> None:
    fetched = _follow(trained, None)
    manifest = read_manifest(trained.store, manifest_key(WeightVersion("fsdp", 0), 0))
    assert fetched[0] == manifest.bytes_sent
    assert (
        0
        <= fetched[0] - dense_bytes(trained.specs)
        <= (BLOB_HEADER_BYTES * len(manifest.blobs) + CELL_ROW_BYTES * manifest.columns.num_cells)
    )
    assert all(0 < size < fetched[0] / 2 for size in fetched[1:])
    assert plan_update(trained.store, WeightVersion("fsdp", 2)) is None


@pytest.mark.parametrize("rank", [0, 1])
def test_engine_ranks_fetch_their_share(trained: Trained, rank: int) -> None:
    held = dict(_tp2().ranks[rank])
    fetched = _follow(trained, held)
    share = sum(2 * box.num_elements for boxes in held.values() for box in boxes)
    num_blobs = 2 * 3  # each trainer rank has one for this rank, one for both, and none for the other alone
    assert 0 <= fetched[0] - share <= BLOB_HEADER_BYTES * num_blobs + CELL_ROW_BYTES * 2 * len(held)


def test_publishing_gathers_nothing(trained: Trained) -> None:
    """No collective runs during publish; the same counter sees those of a gather."""
    for rank in trained.ranks:
        assert rank["num_collectives"] == [0, 0, 0]
        assert rank["num_collectives_of_gather"] > 0


def test_tied_and_uneven(trained: Trained) -> None:
    """Cases W01 and W10: 129 rows over two ranks are 65 and 64, one row is 1 and 0; the tied head travels under one name."""
    records = [rank["record"] for rank in trained.ranks]
    assert [record.layout()["model.embed_tokens.weight"].shape for record in records] == [(65, 32), (64, 32)]
    assert [record.layout()["gain"].shape for record in records] == [(1,), (0,)]
    assert list(trained.specs.values()) == _tensors()
    manifest = read_manifest(trained.store, manifest_key(WeightVersion("fsdp", 1), 1))
    assert read_map(trained.store, manifest.map_key).aliases == {"lm_head.weight": "model.embed_tokens.weight"}


def test_small_learning_rates_are_sent_sparse(trained: Trained) -> None:
    report = trained.ranks[0]["reports"][1]
    assert report.is_whole_model
    assert report.codec_elements["sparse"] > 0.9 * report.num_elements
    assert 0 < report.changed_fraction < 0.5


class TestTwoRanks(TrainerContract):
    """The trainer contract on what two processes recorded."""

    @pytest.fixture(autouse=True)
    def collect(self, trained: Trained) -> None:
        self.before: list[TrainerRecord] = [rank["record_before"] for rank in trained.ranks]
        self.after: list[TrainerRecord] = [rank["record"] for rank in trained.ranks]

    def make_trainers(self) -> Sequence[Trainer]:
        return self.before

    def step(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        assert list(trainers) == list(self.before)
        return self.after
