"""``rose ledger show``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rose.cli.main import EXIT_OK, EXIT_USER_ERROR, main
from rose.coserving.ledger import Ledger, UsageState
from rose.policies.admission import Budget, Mode


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    ledger = Ledger.create(tmp_path / "gpu0.ledger")
    ledger.publish_budget(Budget(mode=Mode.QUIET, fencing_token=7, expires_s=12.5, is_granted=True))
    ledger.publish_usage(UsageState(window_s=10, busy_fraction=0.25, num_requests=3))
    return ledger


def test_people_read_every_section(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", ledger.path]) == EXIT_OK
    text = capsys.readouterr().out
    for line in ("mode = quiet", "fencing_token = 7", "busy_fraction = 0.25", "num_requests = 3", "turn_ends_s = -inf"):
        assert f"  {line}\n" in text


def test_programs_read_json_without_infinities(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ledger", "show", ledger.path, "--json"]) == EXIT_OK
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert document["budget"] == {
        "mode": "quiet",
        "kv_cap_bytes": None,
        "fencing_token": 7,
        "expires_s": 12.5,
        "is_granted": True,
        "holder": 0,
    }
    assert set(document) == {"path", "version", "arrivals", "serving", "usage", "rollout", "budget"}


def test_a_section_that_a_dead_writer_left_torn_is_named(ledger: Ledger, capsys: pytest.CaptureFixture[str]) -> None:
    usage = ledger._usage
    usage._memory[usage._body_at : usage._body_at + 8] = b"\xff" * 8
    assert main(["ledger", "show", ledger.path]) == EXIT_OK
    assert "error = section usage" in capsys.readouterr().out


def test_other_files_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"x" * 4096)
    short = tmp_path / "short"
    short.write_text("short")
    for path, words in (
        (other, "is no ROSE ledger;"),
        (short, "is no ROSE ledger;"),
        (tmp_path, "is no ROSE ledger but a folder"),
        (tmp_path / "none", "there is no ledger"),
    ):
        assert main(["ledger", "show", str(path)]) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert words in said
        assert "recreate" not in said
