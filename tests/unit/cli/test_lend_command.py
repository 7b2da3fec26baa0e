"""``rose lend`` without a running lender: checks, audit, and the kill switch."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from pathlib import Path

import pytest

from rose.cli.main import main
from rose.coserving.lease_store import Switch, SwitchKind
from rose.coserving.ledger import Ledger, UsageState
from rose.hosts.http.lender_config import LenderConfig, open_lender
from rose.policies.admission import Mode
from rose.types import DeviceId, JobId

DIGEST = hashlib.sha256(b"secret").hexdigest()


@pytest.fixture
def config(tmp_path: Path) -> Path:
    Ledger.create(tmp_path / "gpu0.ledger").beat(time.monotonic())
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
    assert "control" not in said
    for access, is_told in (("job", True), ("control", False)):
        text = config.read_text().split("[[tokens]]")[0]
        config.write_text(f'{text}[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\naccess = "{access}"\n')
        assert main(["lend", str(config), "--check"]) == 0
        assert ('no token has access "control"' in capsys.readouterr().out) is is_told


@pytest.mark.parametrize(
    ("text", "arguments", "complaint"),
    [
        ('state = "s"\n', ("--check",), "devices: this key is required and missing"),
        ("colour = 1\n", ("--check",), "colour: unknown key"),
        ("[lending]\nttl_s = 0\n", ("--check",), "lending: ttl_s must be a finite number > 0"),
        ("[lending]\nttl_s = inf\n", ("--check",), "lending: ttl_s must be a finite number > 0"),
        ('[lending.jobs.""]\nquota = 1\n', ("--check",), "lending: jobs: a name must not be empty"),
        ('[devices."a b"]\nledger = "x"\n', ("--check",), "names are without spaces and slashes"),
        ('[devices.g]\nledger = ""\n', ("--check",), "devices.g.ledger: no path is given"),
        ('[devices.g]\nledger = "/tmp"\n', ("--check",), "devices.g.ledger: /tmp is no ROSE ledger but a folder"),
        ('[devices.g]\nledger = "/bin/sh"\n', ("--check",), "devices.g.ledger: /bin/sh is no ROSE ledger"),
        ('state = "/tmp"\n', ("--check",), "state: /tmp is a folder"),
        ('state = "/none/at/all"\n', ("--check",), "state: there is no folder /none/at"),
        ("[lending.tenants]\nt = 0.0\n", ("--check",), "weights must be > 0"),
        ('listen = "here"\n', ("--check",), "lender.toml: listen: 'here' is no place to listen"),
        ('listen = "0.0.0.0:80"\n', ("--check",), "can be reached from other machines: configure bearer tokens"),
        ('[[tokens]]\nname = "a"\nsha256 = "plain"\n', ("--check",), "tokens[0]: sha256 must be"),
        (
            f'[[tokens]]\nname = "a"\nsha256 = "{DIGEST}"\n[lending.jobs.b]\nquota = 1\n',
            ("--check",),
            "lending.jobs names b, for which there is no token",
        ),
        ("[lending.jobs.x]\nweight = inf\n", ("--check",), "weight must be a finite number > 0, got inf"),
        ("", ("kill", "--audit"), "--audit does nothing but look, so kill would not be done"),
        ("", ("kill", "--check"), "--check does nothing but look, so kill would not be done"),
        ("", ("kill", "--device", "gpu9"), "--device gpu9: known are gpu0, gpu1"),
        ("", ("kill", "--device", "gpu0", "--model", "m"), "exclude each other"),
        ("", ("allow", "--grace", "3"), "--grace say nothing with allow"),
        ("", ("revoke", "--grace", "-1"), "--grace must be >= 0"),
        ("", ("status",), "no lender answers at http://127.0.0.1:1; start it with: rose lend "),
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
    top = text.split("[", maxsplit=1)[0]
    named = {line.split(" = ")[0] for line in top.splitlines() if " = " in line}
    rest = text[len(top) :]
    kept = [line for line in lines if line.split(" = ")[0] not in named or line.startswith("[")]
    config.write_text(text if text.startswith('state = "s"') else top + "".join(kept) + rest)
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
    said = capsys.readouterr().out
    assert "no lender runs; done in the state file and the ledgers\n1 leases ended\nkill switches: all" in said
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


def test_a_device_under_two_names_is_refused(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "other.ledger").symlink_to(tmp_path / "gpu0.ledger")
    config.write_text(config.read_text().replace("gpu1.ledger", "other.ledger"))
    assert main(["lend", str(config), "--check"]) == 2
    assert "devices: gpu0 and gpu1 have one ledger" in capsys.readouterr().err


def test_a_ledger_has_one_lender_whatever_its_state_and_name(
    config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from rose import config as configuration  # noqa: PLC0415

    gpu0, ledger = DeviceId("gpu0"), Ledger.attach(tmp_path / "gpu0.ledger")
    os.link(tmp_path / "gpu0.ledger", tmp_path / "same.ledger")
    other = tmp_path / "other.toml"
    other.write_text(config.read_text().replace("/state", "/state2").replace("gpu0.ledger", "same.ledger"))
    with open_lender(configuration.load(LenderConfig, other)) as second:
        with open_lender(configuration.load(LenderConfig, config)) as first:
            assert [first.ledgers[gpu0].is_there, second.ledgers[gpu0].is_there] == [False, True]
            assert "another lender lends by ledger" in first.ledgers[gpu0].problem
            assert [len(each.lender.grant(JobId("job"), 1)) for each in (first, second)] == [0, 1]
            assert ledger.budget() == Ledger.attach(tmp_path / "same.ledger").budget()
        assert main(["lend", str(config), "kill"]) == 0
        assert "warning: gpu0: its ledger could not be told: another lender" in capsys.readouterr().err
        assert ledger.budget().is_granted
    with open_lender(configuration.load(LenderConfig, config)) as first:
        assert first.ledgers[gpu0].is_there
        assert not ledger.budget().is_granted


def test_a_reason_in_another_encoding_is_kept_as_escapes(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lend", str(config), "kill", "--reason", "St\udcf6rung"]) == 0
    capsys.readouterr()
    assert main(["lend", str(config), "--audit", "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)["entries"]
    assert next(each["reason"] for each in entries if each["change"] == "switch_thrown") == r"all: St\udcf6rung"


def test_a_damaged_state_is_named(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["lend", str(config), "kill"]) == 0
    state = tmp_path / "state"
    whole = state.read_bytes()
    state.write_bytes(whole[:4096] + b"\xff" * (len(whole) - 4096))
    for action in ("kill", "--audit"):
        assert main(["lend", str(config), action]) == 2
        assert f"the lender's state {state} is damaged" in capsys.readouterr().err


def test_all_actions_work_without_a_lender(config: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from rose import config as configuration  # noqa: PLC0415

    def done(*arguments: str) -> dict[str, object]:
        assert main(["lend", str(config), *arguments, "--json"]) == 0
        answer: dict[str, object] = json.loads(capsys.readouterr().out)
        return answer

    loaded = configuration.load(LenderConfig, config)
    with open_lender(loaded) as opened:
        (lease,) = opened.lender.grant(JobId("job"), 1)
    assert done("mode", "--mode", "quiet") == {"mode": "quiet"}
    ledger = Ledger.attach(tmp_path / "gpu0.ledger")
    assert (ledger.budget().mode, ledger.budget().is_granted) == (Mode.QUIET, True)
    shown = {"lease_id": lease.lease_id, "job": "job", "device_id": "gpu0"}
    assert done("revoke", "--grace", "5") == {"leases": [shown]}
    assert ledger.budget().expires_s < lease.expires_s
    assert done("kill", "--device", "gpu0") == {"switches": [{"kind": "device", "name": "gpu0"}], "leases": [shown]}
    assert not ledger.budget().is_granted
    assert done("allow") == {"switches": [], "leases": []}
    with open_lender(loaded) as opened:
        assert (opened.lender.mode, len(opened.lender.grant(JobId("job"), 1))) == (Mode.QUIET, 1)


def test_killing_a_model_that_nobody_names_is_warned_of(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for model, is_warned in (("m", False), ("n", True)):
        assert main(["lend", str(config), "kill", "--model", model]) == 0
        assert ("warning: no device names the model 'n'" in capsys.readouterr().err) is is_warned


def test_why_a_device_is_closed(config: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from rose import config as configuration  # noqa: PLC0415

    gpu0, gpu1 = DeviceId("gpu0"), DeviceId("gpu1")
    with open_lender(configuration.load(LenderConfig, config)) as opened:
        lender, now_s = opened.lender, opened.clock.now()
        ledger = Ledger.attach(tmp_path / "gpu0.ledger")

        def reason(heartbeat_s: float) -> str:
            ledger.beat(heartbeat_s)
            return lender.closed_reason(gpu0)

        assert opened.ledgers[gpu1].problem == "no ledger"
        assert reason(-math.inf) == "no heartbeat"
        assert reason(now_s - 100).startswith("stale heartbeat (100 s old)")
        assert reason(now_s + 1e6) == "heartbeat of another boot"
        assert reason(now_s) == ""
        ledger.publish_usage(UsageState(kv_mean_fraction=0.95, updated_s=now_s))
        assert reason(now_s) == "KV use 0.95"
        lender.stop(Switch(SwitchKind.DEVICE, "gpu0"))
        assert reason(now_s) == "kill switch (device gpu0)"
        lender.allow()
        ledger.publish_usage(UsageState())
        assert lender.grant(JobId("job"), 1)
        lender.revoke(gpu0)
        assert reason(now_s).startswith("resting for ")
        (tmp_path / "gpu1.ledger").write_bytes(b"ROSELEDG" + bytes(8192))
        for _ in range(4):
            opened.follow()
        assert "is no ROSE ledger of version 3 but of version 0" in opened.ledgers[gpu1].problem
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["not lent"]
