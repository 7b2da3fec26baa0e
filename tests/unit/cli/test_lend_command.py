"""``rose lend`` without a running lender: checks, audit, and the kill switch."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from rose.cli.main import main
from rose.coserving.ledger import Ledger
from rose.hosts.http.lender_config import LenderConfig, open_lender
from rose.types import JobId

DIGEST = hashlib.sha256(b"secret").hexdigest()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    Ledger.create(tmp_path / "gpu0.ledger").beat(1e12)
    path = tmp_path / "lender.toml"
    path.write_text(
        f'state = "{tmp_path}/state"\n'
        'listen = "127.0.0.1:1"\n'
        f'[devices.gpu0]\nledger = "{tmp_path}/gpu0.ledger"\n'
        f'[devices.gpu1]\nledger = "{tmp_path}/gpu1.ledger"\nmodels = ["m"]\n'
    )
    return path


def test_check_says_what_would_be_lent(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lend", str(config), "--check"]) == 0
    said = capsys.readouterr().out
    assert "2 devices, 0 tokens, at 127.0.0.1:1" in said
    assert "make their ledgers: gpu1" in said


@pytest.mark.parametrize(
    ("text", "arguments", "complaint"),
    [
        ('state = "s"\n', ("--check",), "devices: this key is required and missing"),
        ("colour = 1\n", ("--check",), "colour: unknown key"),
        ("[lending]\nttl_s = 0\n", ("--check",), "lending: 'ttl_s' must be > 0"),
        ("[lending.tenants]\nt = 0.0\n", ("--check",), "weights must be > 0"),
        ('listen = "here"\n', ("--check",), "'here' is no place to listen"),
        ('listen = "0.0.0.0:80"\n', ("--check",), "can be reached from other machines: configure bearer tokens"),
        ('[[tokens]]\nname = "a"\nsha256 = "plain"\n', ("--check",), "tokens[0]: sha256 must be"),
        (
            f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\n[lending.jobs.b]\nquota = 1\n',
            ("--check",),
            "lending.jobs names b, for which there is no token",
        ),
        ("", ("kill", "--device", "gpu9"), "--device gpu9: known are gpu0, gpu1"),
        ("", ("kill", "--device", "gpu0", "--model", "m"), "exclude each other"),
        ("", ("allow", "--grace", "3"), "--grace say nothing with allow"),
        ("", ("revoke", "--grace", "-1"), "--grace must be >= 0"),
        ("", ("status",), "is the process alive?"),
        ("", ("status", "--token-file", "/nothing"), "cannot read the token from /nothing"),
        ("", ("--audit",), "cannot use"),
        ("", ("mode", "--mode", "loud"), "mode needs --mode NAME, one of slo"),
        ("", ("status", "--mode", "slo"), "--mode needs mode"),
        ("", ("dance",), "invalid choice: 'dance'"),
        ('listen = "127.0.0.1:0"\n', ("status",), "give --url"),
    ],
)
def test_mistakes_are_told_in_one_line(
    config: Path, text: str, arguments: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = config.read_text().splitlines(keepends=True)
    named = {line.split(" = ")[0] for line in text.splitlines() if " = " in line and not line.startswith("[")}
    top = text.split("[", maxsplit=1)[0]
    rest = text[len(top) :]
    kept = [line for line in lines if line.split(" = ")[0] not in named or line.startswith("[")]
    config.write_text(text if "state" in named else top + "".join(kept) + rest)
    assert main(["lend", str(config), *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_the_kill_switch_works_without_a_lender_and_the_audit_shows_it(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rose import config as configuration  # noqa: PLC0415

    with open_lender(configuration.load(LenderConfig, config)) as opened:
        opened.lender.grant(JobId("job"), 2)
    assert Ledger.attach(tmp_path / "gpu0.ledger").budget().is_granted, "leases outlive the lender"
    assert main(["lend", str(config), "kill", "--reason", "fire"]) == 0
    assert "no lender runs; all: stopped in the state file and the ledgers, 1 leases ended" in capsys.readouterr().out
    assert not Ledger.attach(tmp_path / "gpu0.ledger").budget().is_granted
    with open_lender(configuration.load(LenderConfig, config)) as opened:
        assert opened.lender.grant(JobId("job"), 2) == ()
        assert main(["lend", str(config), "kill"]) == 2
        assert "another lender uses the lender state" in capsys.readouterr().err
    assert main(["lend", str(config), "--audit"]) == 0
    assert "no device ever had two holders" in capsys.readouterr().out
    assert main(["lend", str(config), "--audit", "--json"]) == 0
    audit = json.loads(capsys.readouterr().out)
    assert (audit["problems"], audit["totals"][0]["job"]) == ([], "job")
    assert {"granted", "switch_thrown", "revoked"} <= {entry["change"] for entry in audit["entries"]}
