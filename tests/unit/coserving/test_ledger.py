"""The shared page and the ledger."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
import time
from pathlib import Path

import attrs
import pytest

from rose.coserving.ledger import IDLE_SERVING, ArrivalState, Ledger, RolloutState, UsageState
from rose.coserving.shared_page import SECTION_BYTES, Section, map_file
from rose.errors import LedgerError
from rose.policies.admission import Budget, Mode

BUSY = attrs.evolve(
    IDLE_SERVING,
    num_arrived=7,
    num_admitted=5,
    num_running=3,
    num_waiting=1,
    kv_used_bytes=5e9,
    kv_pool_bytes=42e9,
    oldest_arrival_s=1.5,
    last_step_end_s=2.5,
    deadline_s=2.55,
    next_decode_s=0.008,
    heartbeat_s=2.6,
)


def test_every_section_reads_back_in_another_handle(tmp_path: Path) -> None:
    writer = Ledger.create(tmp_path / "l")
    reader = Ledger.attach(tmp_path / "l")
    writer.publish_serving(BUSY)
    writer.publish_arrivals(ArrivalState(num_arrived=7, last_arrival_s=2.0))
    writer.beat(2.6)
    assert reader.serving() == BUSY
    assert reader.serving().num_prompts_waiting == 3, "two on their way and one waiting"
    rollout = RolloutState(
        wants_until_s=3.0,
        step_s=0.01,
        num_running=2,
        num_waiting=4,
        kv_used_bytes=1e9,
        kv_budget_bytes=2e9,
        num_evicted=6,
    )
    writer.publish_rollout(rollout)
    assert reader.rollout() == rollout
    budget = Budget(
        mode=Mode.QUIET, kv_cap_bytes=3e9, fencing_token=2**40, expires_s=9.0, is_granted=True, holder=2**62
    )
    writer.publish_budget(budget)
    assert reader.budget() == budget


def test_a_new_ledger_allows_nothing_and_knows_no_serving(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l")
    assert not ledger.budget().is_granted
    assert ledger.serving().heartbeat_s == -math.inf


def test_a_ledger_is_whole_from_the_moment_that_it_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when its maker dies half-way: then there is none, and the next executor makes one."""

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    for make in (Ledger.create, Ledger.attach_or_create):
        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "publish_rollout", die)
            with pytest.raises(KeyboardInterrupt):
                make(tmp_path / "l")
        assert not (tmp_path / "l").exists()
    assert not Ledger.attach_or_create(tmp_path / "l").budget().is_granted
    assert list(tmp_path.iterdir()) == [tmp_path / "l"]


def test_of_two_that_make_a_ledger_at_a_time_both_have_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    others: list[Ledger] = []

    def publish_usage(self: Ledger, _: object) -> None:
        monkeypatch.undo()
        self.publish_usage(UsageState())
        others.append(Ledger.attach_or_create(tmp_path / "l"))  # overtakes

    monkeypatch.setattr(Ledger, "publish_usage", publish_usage)
    late = Ledger.attach_or_create(tmp_path / "l")
    others[0].publish_budget(Budget(fencing_token=5))
    assert late.budget().fencing_token == 5
    Ledger.attach_or_create(tmp_path / "l").publish_budget(Budget(fencing_token=6))
    assert late.budget().fencing_token == 6


def test_a_ledger_that_cannot_be_made_is_said(tmp_path: Path) -> None:
    for make in (Ledger.create, Ledger.attach_or_create):
        with pytest.raises(LedgerError, match="cannot create"):
            make(tmp_path / "no folder" / "l")
    with pytest.raises(LedgerError, match=r"cannot create ledger .*Is a directory; name a file"):
        Ledger.create(tmp_path)


def test_what_is_no_ledger_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(LedgerError, match=r"no ledger .*missing; the executor"):
        Ledger.attach(tmp_path / "missing")
    (tmp_path / "short").write_bytes(b"x")
    with pytest.raises(LedgerError, match="is no ROSE ledger;"):
        Ledger.attach(tmp_path / "short")
    (tmp_path / "other").write_bytes(b"y" * 10_000)
    with pytest.raises(LedgerError, match="no ROSE ledger"):
        Ledger.attach(tmp_path / "other")


def test_a_writer_that_died_half_way_is_an_error_until_the_next_write(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l")
    ledger.publish_budget(Budget(is_granted=True))
    section = 5 * SECTION_BYTES
    data = bytearray((tmp_path / "l").read_bytes())
    (sequence,) = struct.unpack_from("<Q", data, section)
    with (tmp_path / "l").open("r+b") as file:
        file.seek(section)
        file.write(struct.pack("<Q", sequence + 1))
    with pytest.raises(LedgerError, match=r"section budget.*torn"):
        ledger.budget()
    assert "torn" in ledger.describe()
    ledger.publish_budget(Budget(is_granted=True))
    assert ledger.budget().is_granted


def test_bytes_that_do_not_match_their_checksum_are_an_error(tmp_path: Path) -> None:
    """On a machine that shows stores out of order the sequence number alone proves nothing."""
    ledger = Ledger.create(tmp_path / "l")
    with (tmp_path / "l").open("r+b") as file:
        file.seek(5 * SECTION_BYTES + 16)
        file.write(b"\x01")
    with pytest.raises(LedgerError, match="torn"):
        ledger.budget()


WRITER = """
import sys, time
from rose.coserving.shared_page import SECTION_BYTES, Section, map_file
section = Section(map_file(sys.argv[1], SECTION_BYTES, is_new=True), 0, "<8d", "page")
for value in range(2**60):
    section.write(*[float(value)] * 8)
    if value == 0:
        print("ready", flush=True)
    if value % 4 == 0:
        time.sleep(20e-6)
"""


def test_readers_never_see_a_mixture(tmp_path: Path) -> None:
    """Another process writes in bursts, far more often than any step loop."""
    path = tmp_path / "page"
    with subprocess.Popen([sys.executable, "-c", WRITER, path], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"ready\n"
        section = Section(map_file(path, SECTION_BYTES, is_new=False), 0, "<8d", "page")
        seen: list[tuple[float, ...]] = []
        deadline_s = time.monotonic() + 30
        try:
            while time.monotonic() < deadline_s and len(set(seen)) < 100:
                seen += [section.read(100_000) for _ in range(5000)]
        finally:
            writer.kill()
    assert all(len(set(record)) == 1 for record in seen)
    assert [record[0] for record in seen] == sorted(record[0] for record in seen)
    assert len(set(seen)) >= 100, "hardly anything was written meanwhile"


def test_what_was_never_written_is_an_error(tmp_path: Path) -> None:
    section = Section(map_file(tmp_path / "page", SECTION_BYTES, is_new=True), 0, "<8d", "page")
    with pytest.raises(LedgerError, match="page was never written"):
        section.read()


def test_a_section_must_fit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="needs more than"):
        Section(map_file(tmp_path / "p", SECTION_BYTES, is_new=True), 0, "<64d", "big")


def test_the_dump_names_every_field(tmp_path: Path) -> None:
    ledger = Ledger.create(tmp_path / "l")
    ledger.publish_serving(BUSY)
    text = ledger.describe()
    assert "kv_used_bytes = 5e+09" in text
    assert "mode = slo" in text
    assert all(field.name in text for field in attrs.fields(RolloutState))
