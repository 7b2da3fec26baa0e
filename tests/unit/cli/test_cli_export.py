from __future__ import annotations

import json

import pytest

from rose.backends.memory import MemoryTransport
from rose.cli.main import main
from rose.testing import FakeTrainer
from rose.transfer.export import INDEX
from rose.transfer.publisher import Publisher


@pytest.fixture
def place(monkeypatch):
    """A store with two versions, served, and its token in the environment."""
    store = MemoryTransport()
    options = dict(store.serve().options)
    monkeypatch.setenv("ROSE_UPSTREAM_TOKEN", str(options["token"]))
    trainer = FakeTrainer()
    publisher = Publisher(trainer, store, run="job")
    for _ in range(2):
        publisher.publish_sync()
        trainer.step()
    yield f"memory:{options['host']}:{options['port']}"
    store.close()


def test_a_checkpoint_of_the_newest_version(place, tmp_path, capsys):
    out = tmp_path / "ckpt"
    assert main(["export", "--transport", place, "--out", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["version"], found["files"]) == ("job:1", ["model-00001-of-00001.safetensors"])
    assert (out / INDEX).exists()


def test_an_older_version_in_small_files(place, tmp_path, capsys):
    options = ["--version", "job:0", "--file-bytes", "64"]
    assert main(["export", "--transport", place, "--out", str(tmp_path), *options]) == 0
    assert capsys.readouterr().out.startswith("version job:0: 5 tensors, 0.000 GB in 2 files; ")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--version", "seven"], "--version: a weight version is written run:n"),
        (["--version", "job:7"], "version job:7 is not there; retained are job:0, job:1"),
        (["--file-bytes", "0"], "--file-bytes '0' is no size"),
        (["--transport", "ftp:there"], "--transport 'ftp:there' is neither memory:HOST:PORT"),
        (["--config-from", "/nowhere"], "/nowhere has no config.json"),
        (["--out", "/proc/ckpt"], "cannot write /proc/ckpt"),
        (["--out", ""], "--out is empty"),
        (["--config-from", ""], "--config-from is empty"),
        (["--pointer", ""], "--pointer is empty"),
        (["--transport", "mooncake:127.0.0.1"], "is no mooncake:HOST:PORT; name the port"),
    ],
)
def test_what_can_be_put_right_is_one_line(place, tmp_path, capsys, options, complaint):
    assert main(["export", "--transport", place, "--out", str(tmp_path / "new"), *options]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
