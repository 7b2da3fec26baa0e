"""Published versions as checkpoints on disk."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from transfer_rig import SPECS, ArrayTrainer, Rig, publish_together

from rose.backends.memory import MemoryTransport
from rose.errors import BlobNotFoundError, ConfigError, CorruptUpdateError
from rose.transfer import export
from rose.transfer.export import INDEX, export_version, find_update
from rose.transfer.publisher import Publisher
from rose.types import WeightVersion


def read_checkpoint(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Read a sharded checkpoint by its index, as the format's own description has it."""
    index = json.loads((folder / INDEX).read_text())
    found = {}
    for file in sorted(set(index["weight_map"].values())):
        raw = (folder / file).read_bytes()
        length = int.from_bytes(raw[:8], "little")
        header = json.loads(raw[8 : 8 + length])
        header.pop("__metadata__")
        assert (8 + length) % 8 == 0
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            assert index["weight_map"][name] == file
            found[name] = (entry["dtype"], tuple(entry["shape"]), raw[8 + length + start : 8 + length + end])
    assert found.keys() == index["weight_map"].keys()
    assert index["metadata"]["total_size"] == sum(len(bits) for _, _, bits in found.values())
    return found


def bits_of(full) -> dict[str, bytes]:
    return {name: bits.tobytes() for name, bits in full.items()}


def bits_in(folder: Path) -> dict[str, bytes]:
    return {name: bits for name, (_, _, bits) in read_checkpoint(folder).items()}


@pytest.fixture
def history():
    """Six versions of two ranks, full weights beside the third; what each version was."""
    rig = Rig(keep=10)
    states = []
    for n in range(6):
        publish_together(rig.publishers, anchor=n == 3)
        states.append(bits_of(rig.trainers[0].full()))
        for trainer in rig.trainers:
            trainer.step(0.2)
    return rig.store, states


def test_the_newest_version_is_what_the_trainer_published(history, tmp_path) -> None:
    store, states = history
    report = export_version(store, tmp_path / "ckpt")
    assert bits_in(tmp_path / "ckpt") == states[5]
    assert (report.version, report.num_tensors) == (WeightVersion("run", 5), len(SPECS))
    dtypes = {name: entry[:2] for name, entry in read_checkpoint(tmp_path / "ckpt").items()}
    assert dtypes == {
        "w": ("BF16", (10, 40)),
        "norm": ("F32", (7,)),
        "scale": ("BF16", ()),
        "none": ("BF16", (0, 4)),
    }


@pytest.mark.parametrize("n", range(6))
def test_older_versions_as_long_as_they_are_there(history, tmp_path, n) -> None:
    """From the first anchor, the one beside version 3, or an anchor and the changes since."""
    store, states = history
    export_version(store, tmp_path, version=WeightVersion("run", n))
    assert bits_in(tmp_path) == states[n]
    update = find_update(store, WeightVersion("run", n))
    assert len(update.manifest_keys) == (n + 1 if n < 3 else n - 2)


def test_files_are_cut_at_tensors_and_no_larger_than_asked(history, tmp_path) -> None:
    store, states = history
    report = export_version(store, tmp_path, max_file_bytes=800)
    assert report.files == ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    assert bits_in(tmp_path) == states[5]
    assert not list(tmp_path.glob(".*"))


def test_the_safetensors_library_reads_it(history, tmp_path) -> None:
    safetensors = pytest.importorskip("safetensors", reason="safetensors is not installed")
    store, states = history
    (file,) = export_version(store, tmp_path).files
    with safetensors.safe_open(tmp_path / file, framework="numpy") as opened:
        assert set(opened.keys()) == set(states[5])
        assert opened.metadata() == {"format": "pt", "rose_version": "run:5"}
        assert opened.get_tensor("norm").tobytes() == states[5]["norm"]


def test_a_version_that_is_gone_is_named_with_those_that_are_there(history, tmp_path) -> None:
    store, _ = history
    for version in (WeightVersion("run", 9), WeightVersion("other", 1)):
        with pytest.raises(BlobNotFoundError, match=r"version .* is not there; retained are run:0, run:1, .*run:5"):
            export_version(store, tmp_path, version=version)
    with pytest.raises(BlobNotFoundError, match="nothing is published"):
        export_version(MemoryTransport(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_version_without_its_anchor_cannot_be_made(tmp_path) -> None:
    rig = Rig(keep=4)
    for n in range(6):
        publish_together(rig.publishers, anchor=n == 3)
    with pytest.raises(BlobNotFoundError, match=r"version run:2 is not there; retained are run:3, run:4, run:5"):
        export_version(rig.store, tmp_path, version=WeightVersion("run", 2))


def test_tied_names_are_written_as_the_trainer_lists_them(tmp_path) -> None:
    shared = np.arange(6, dtype=np.uint16).reshape(2, 3)
    trainer = ArrayTrainer({"embed": shared, "head": shared}, aliases={"head": "embed"})
    store = MemoryTransport()
    Publisher(trainer, store, run="r").publish_sync()
    export_version(store, tmp_path)
    assert bits_in(tmp_path) == {"embed": shared.tobytes(), "head": shared.tobytes()}


def test_the_other_files_of_a_checkpoint_come_along(history, tmp_path) -> None:
    store, _ = history
    source = tmp_path / "source"
    source.mkdir()
    for name in ("config.json", "tokenizer.json", "model-00001.safetensors", INDEX, "pytorch_model.bin"):
        (source / name).write_text(name)
    (source / "original").mkdir()
    report = export_version(store, tmp_path / "out", config_from=source)
    assert report.copied == ("config.json", "tokenizer.json")
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "tokenizer.json"
    assert not (tmp_path / "out" / "pytorch_model.bin").exists()


def test_folders_that_cannot_be_used_are_refused_before_anything_is_read(tmp_path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "model-00001-of-00002.safetensors").write_text("")
    store = MemoryTransport()
    with pytest.raises(ConfigError, match="is no folder"):
        export_version(store, tmp_path / "file")
    with pytest.raises(ConfigError, match="holds model-00001"):
        export_version(store, tmp_path)
    with pytest.raises(ConfigError, match="has no config"):
        export_version(store, tmp_path / "new", config_from=tmp_path)
    assert not (tmp_path / "new").exists()


def test_a_damaged_blob_leaves_no_index(history, tmp_path) -> None:
    store, _ = history
    update = find_update(store, None)
    key = export.ManifestReader(store).read(update.manifest_keys[0]).blobs[0].key
    blob = bytearray(store.get(key))
    blob[-1] ^= 1
    store.delete([key])
    store.put(key, bytes(blob))
    with pytest.raises(CorruptUpdateError):
        export_version(store, tmp_path)
    assert not (tmp_path / INDEX).exists()


def test_a_file_that_is_not_what_was_written_is_noticed(history, tmp_path, monkeypatch) -> None:
    store, _ = history
    write = export._write_file

    def write_badly(path, specs, sink, metadata):
        write(path, specs, sink, metadata)
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)

    monkeypatch.setattr(export, "_write_file", write_badly)
    with pytest.raises(CorruptUpdateError, match="does not hold the published bits of scale"):
        export_version(store, tmp_path)
    assert not (tmp_path / INDEX).exists()
