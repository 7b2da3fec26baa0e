from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from rose.bench.link_rows import LinkRow, PaperCosts, computed_rows, links_json
from rose.bench.link_worker import ServingSide, TrainerSide, WorkerSetup
from rose.bench.links import Worker
from rose.errors import RoseError


def row(**changes):
    fields = {
        "gbps": 10.0,
        "how": "measured",
        "note": "",
        "sync_s": 1.3,
        "encode_s": 0.6,
        "decode_s": 0.4,
        "wire_s": 0.8,
        "pause_s": 0.01,
        "paper_sync_s": 9.0,
        "bytes_sent": 10**9,
    }
    return LinkRow(**{**fields, **changes})


def test_overheads_are_over_the_longest_part():
    assert row().codec_s == 1.0
    assert row().overhead_fraction == pytest.approx(0.3)
    assert row(wire_s=1.25).overhead_fraction == pytest.approx(0.04)
    assert row().pipelined_overhead_fraction == pytest.approx(1.3 / 0.8 - 1)


def test_faster_links_are_computed_from_the_fastest_measured():
    slow = row(gbps=1.0, sync_s=8.2, wire_s=8.0)
    paper = PaperCosts(bytes=4 * 10**9, encode_s=2.0, decode_s=1.0)
    (found,) = computed_rows([row(), slow], paper, [100.0])
    assert found.how == "computed"
    assert "10 Gbps" in found.note
    assert found.wire_s == pytest.approx(0.08)
    assert found.sync_s == pytest.approx(1.0 + 0.3)  # the codec, and what the sync took beyond it
    assert found.paper_sync_s == pytest.approx(2.0 + 0.32 + 1.0)
    assert computed_rows([], paper, [100.0]) == ()


def test_rows_become_json_by_rate():
    found = links_json([row(gbps=25.0), row(gbps=2.0)])
    assert list(found) == ["2", "25"]
    keys = {"sync_s", "codec_s", "wire_s", "overhead_fraction", "pause_s", "paper_sync_s", "how", "note"}
    assert keys <= set(found["2"])


def test_both_sides_sync_through_a_socket(tiny_model):
    """The two processes of a link, here as two objects over loopback: versions in turn, the baseline, the parts alone."""
    setup = WorkerSetup(
        model=str(tiny_model), tensors=(), lr=3e-5, seed=0, targets="tp2,tp4x2", num_sources=2, host="127.0.0.1"
    )
    trainer = TrainerSide(setup)
    serving = ServingSide(setup, trainer.setup()["address"])
    assert serving.setup() == {"num_ranks": 2 + 2 * 4}
    with ThreadPoolExecutor(1) as pool:
        for n in (1, 2):
            waiting = pool.submit(serving.sync, n)
            published = trainer.publish()
            taken = waiting.result(timeout=30)
            assert published["began_s"] < taken["seen_s"] <= taken["staged_s"] <= taken["ended_s"]
            crossed = [(key, size) for key, size, _, _ in taken["reads"] if "/blob-" in key]
            assert sum(size for _, size in crossed) == published["blob_bytes"]  # each once, for ten ranks
        waiting = pool.submit(serving.take_paper, 0)
        sent = trainer.paper()
        assert waiting.result(timeout=30)["bit_exact"]
    assert sent["bytes"] % 6 == 0
    trainer.publish()
    assert serving.local(3)["stage_s"] > 0
    assert serving.probe()["gbps"] > 0
    serving.close()
    trainer.close()


def test_a_process_that_ends_is_told_with_its_last_words():
    process = subprocess.Popen(
        [sys.executable, "-c", "import sys; sys.exit('no such weights')"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    worker = Worker(process, "trainer")
    with pytest.raises(RoseError, match=r"the trainer's process of the link benchmark ended: no such weights"):
        worker.call("setup")
    worker.close()
