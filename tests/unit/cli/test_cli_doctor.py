from __future__ import annotations

import json

import pytest

from rose.cli import doctor
from rose.cli.doctor import Need, examine, look_for
from rose.cli.main import main

PRESENT = Need(module="attrs", extra="demo", is_for_demo=True)
ABSENT = Need(module="no_such_module_of_rose", extra="ray", is_for_demo=True)


def test_a_module_that_is_there_has_its_version():
    found = look_for(PRESENT)
    assert found.is_importable
    assert found.reason == ""
    assert found.version


def test_a_missing_module_has_a_reason_and_the_extra():
    found = look_for(ABSENT)
    assert not found.is_importable
    assert found.version is None
    assert "No module named 'no_such_module_of_rose'" in found.reason
    assert "pip install 'rose-rl[ray]'" in found.reason


@pytest.fixture
def broken_module(tmp_path, monkeypatch):
    """A module that ends its process when imported, of a distribution that is installed."""
    (tmp_path / "crashing.py").write_text("import os\nos._exit(11)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return Need(module="crashing", extra="mooncake", is_for_demo=False, if_broken="install libibverbs1")


def test_a_library_that_ends_its_process_does_no_harm(broken_module):
    assert "exit code 11" in look_for(broken_module).reason


def test_an_installed_library_that_does_not_load_gets_other_advice(broken_module, monkeypatch):
    monkeypatch.setattr(doctor, "_version", lambda _: "0.3")
    found = look_for(broken_module)
    assert "install libibverbs1" in found.reason
    assert "pip install" not in found.reason


def test_an_import_that_hangs_is_given_up(tmp_path, monkeypatch):
    (tmp_path / "hanging.py").write_text("import time\ntime.sleep(60)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "_IMPORT_TIMEOUT_S", 0.5)
    assert "did not end within 0.5 s" in look_for(Need(module="hanging", extra="ray", is_for_demo=False)).reason


def test_the_demo_can_run_when_what_it_needs_is_there():
    absent_but_optional = Need(module=ABSENT.module, extra="ray", is_for_demo=False)
    assert examine([PRESENT, absent_but_optional])["can_run_demo"] is True
    assert examine([PRESENT, ABSENT])["can_run_demo"] is False


def test_json_is_one_object_with_the_machine(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "NEEDS", (PRESENT, ABSENT))
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cores"] >= 1
    assert report["memory_bytes"] > 1e8
    assert report["modules"]["attrs"]["is_importable"] is True
    assert report.keys() >= {"rose", "python", "platform", "shm_bytes", "can_run_demo"}


def test_the_table_says_what_is_missing_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "NEEDS", (PRESENT, ABSENT))
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "attrs" in out
    assert "missing" in out
    assert "cannot run here" in out
