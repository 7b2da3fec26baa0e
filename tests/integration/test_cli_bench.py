from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import attrs
import pytest

from rose.bench import transfer
from rose.bench.model_shapes import NAMED, Dense
from rose.cli.main import main
from rose.errors import BackendUnavailableError, RoseError

TINY = Dense(hidden=64, inter=128, layers=2, heads=8, kv_heads=8, head_dim=16, vocab=128)
RUN = ["bench", "transfer", "--model", "Tiny", "--lr", "3e-5"]
KEYS = {
    "bytes_per_changed",
    "entropy_bytes_per_changed",
    "redundancy",
    "tp8_share",
    "bit_exact",
    "peers",
    "sampled_fraction",
    "machine",
    "versions",
    "commit",
}


@pytest.fixture(autouse=True)
def tiny(monkeypatch, tmp_path):
    """Know a model that takes no time, and have nothing to broadcast with."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(NAMED, "Tiny", TINY)
    monkeypatch.setattr(transfer, "DENSITIES", (0.01, 0.1))

    def no_torch(new):
        message = "the broadcast needs torch"
        raise BackendUnavailableError(message)

    monkeypatch.setattr(transfer.broadcast, "measure_broadcast", no_torch)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--model", "nope"], "--model 'nope' is no file and no known model"),
        (["--changed", "0"], "'0' is not a share above 0 and at most 1"),
        (["--changed", "nan"], "'nan' is not a share"),
        (["--lr", "-1"], "'-1' is not a number above 0"),
        (["--changed", "0.1", "--lr", "1e-6"], "not allowed with argument"),
        (["--targets", "tp3,x"], "'x' is no target; write tpK or tpKxM"),
        (["--targets", "tp3"], "8 heads are no multiple of 3"),
        (["--targets", "tp3"], "Tiny can be held with a tp of 1, 2, 4, 8"),
        (["--targets", "tp65"], "with K from 1 to 64 and M from 1 to 64"),
        (["--targets", "tp1x1000000"], "'tp1x1000000' is no target"),
        (["--lr", "1e9"], "--lr 1e+09 is out of range; give one from 1e-09 to 0.01"),
        (["--lr", "1e-300"], "--lr 1e-300 is out of range"),
        (["--sources", "1e9"], "--sources 1e+09 is out of range; give one from 1 to 64"),
        (["--out", ""], "--out is empty"),
        (["--only", "codec,speed"], "there is no section 'speed'; sections: bytes"),
        (["--link-gbps", "1,fast"], "'fast' is not a number above 0"),
        (["--sources", "1.5"], "'1.5' is not a whole number >= 1"),
        (["--seed", "-1"], "'-1' is not a whole number >= 0"),
        (["--out", "/dev/null/x"], "cannot make folder /dev/null/x"),
        (["--wrong"], "unknown option --wrong"),
    ],
)
def test_bad_input_is_one_clear_line(capsys, arguments, complaint):
    assert main([*RUN[:2], *([] if "--model" in arguments else RUN[2:4]), *arguments]) == 2
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if not line.startswith("rose bench:")]
    assert len(lines) == 1
    assert complaint in lines[0]
    assert not out


def test_json_is_one_object_with_the_promised_keys(capsys, tiny):
    assert main([*RUN, "--only", "bytes,peers,redundancy", "--json", "--out", "results"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) >= KEYS
    assert printed["bit_exact"] is True
    assert printed["redundancy"] == {"1": 1.0, "4": 1.0, "16": 1.0}
    assert set(printed["peers"]["coo32"]) == {"bytes", "encode_s", "decode_s"}
    assert printed["skipped"] == {"broadcast_gloo": "the broadcast needs torch"}
    assert json.loads((tiny / "results" / "transfer.json").read_text()) == printed
    if importlib.util.find_spec("matplotlib") is not None:
        assert (tiny / "results" / "transfer-bytes.svg").read_text().startswith("<?xml")


def test_tables_show_every_section_that_ran(capsys):
    assert main([*RUN, "--only", "bytes,peers,redundancy"]) == 0
    printed = capsys.readouterr().out
    for text in (
        "Tiny: 0.000 G elements (100.0% of the model)",
        "COO32/rose",
        "gap_value_zstd1",
        "a TP8 rank",
        "bit-exact",
    ):
        assert text in printed
    assert "Gbps" not in printed


def test_nothing_is_called_exact_that_was_not_compared(capsys):
    assert main([*RUN, "--only", "bytes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["bit_exact"] is None


def test_a_section_that_fails_is_told_and_the_others_are_kept(capsys, monkeypatch):
    def wrong(*_, **__):
        message = "an engine's x at (0,) differs from the trainer's bits"
        raise RoseError(message)

    monkeypatch.setattr(transfer, "measure_redundancy", wrong)
    assert main([*RUN, "--only", "bytes,redundancy", "--json"]) == 2
    out, err = capsys.readouterr()
    assert "rose: error: redundancy: an engine's x at (0,) differs from the trainer's bits" in err
    printed = json.loads(out)
    assert printed["bit_exact"] is False
    assert printed["bytes_per_changed"] > 0


@pytest.mark.parametrize(
    ("shape", "complaint"),
    [
        ("[]", "'params' is empty"),
        ("[0]", "sizes are whole numbers over 0"),
        ("[1000000000, 1000000]", "of memory, this machine has"),
    ],
)
def test_a_table_that_cannot_be_measured_is_one_line(capsys, tmp_path, shape, complaint):
    rows = "[]" if shape == "[]" else f'[["model.embed_tokens.weight", {shape}, "bfloat16"]]'
    (tmp_path / "t.json").write_text(f'{{"model": "t", "config": {{"heads": 4}}, "params": {rows}}}')
    assert main(["bench", "transfer", "--model", "t.json", "--only", "bytes"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert complaint in line


@pytest.mark.parametrize("shape", ["[8]", "[7, 5]", "[64]"])
def test_tables_of_a_few_elements_are_measured_or_refused(capsys, tmp_path, shape):
    rows = f'[{{"name": "model.norm.weight", "shape": {shape}, "dtype": "bfloat16"}}]'
    (tmp_path / "t.json").write_text(f'{{"model": "t", "config": {{"heads": 4}}, "params": {rows}}}')
    for lr in ("1e-9", "1e-2"):
        code = main(["bench", "transfer", "--model", "t.json", "--only", "bytes,peers,redundancy", "--lr", lr])
        out, err = capsys.readouterr()
        assert (code, "t: 0.000 G elements" in out) in ((0, True), (2, False))
        assert code == 0 or "changes none of the" in err


@pytest.mark.parametrize(("heads", "tp"), [(8, 4), (14, 2), (7, 1)])
def test_the_default_targets_fit_the_model(capsys, monkeypatch, heads, tp):
    monkeypatch.setitem(NAMED, "Tiny", attrs.evolve(TINY, heads=heads, kv_heads=heads))
    assert main([*RUN, "--only", "peers", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["settings"]["targets"] == [f"tp{tp}"]


def test_an_unknown_tensor_is_not_blamed_on_the_targets(capsys, tmp_path):
    rows = '[["strange.weight", [64, 64], "bfloat16"]]'
    (tmp_path / "t.json").write_text(f'{{"model": "t", "config": {{"heads": 4}}, "params": {rows}}}')
    for more in ([], ["--targets", "tp3"]):
        assert main(["bench", "transfer", "--model", "t.json", "--only", "bytes", *more]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "--targets" not in line
        assert "no rule for strange.weight" in line or more


@pytest.mark.parametrize("source", ["docs", "help"])
def test_the_table_of_the_documentation_is_one(capsys, tmp_path, source):
    if source == "docs":
        page = (Path(__file__).parents[2] / "docs" / "transfer-bench.md").read_text()
        text = page.partition("```json\n")[2].partition("```")[0]
    else:
        with pytest.raises(SystemExit):
            main(["bench", "transfer", "--help"])
        text = capsys.readouterr().out.partition("(.json or .json.gz):\n")[2].partition("  config: ")[0]
    (tmp_path / "t.json").write_text(text)
    assert main(["bench", "transfer", "--model", "t.json", "--only", "peers", "--json", "--lr", "1e-5"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["bit_exact"], printed["settings"]["targets"]) == (True, ["tp4"])
