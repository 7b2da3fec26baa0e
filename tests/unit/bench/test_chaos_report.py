"""What a chaos run calls a problem: everything that the killed part itself does not explain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from rose.bench.chaos.kills import Kill, Killer, Victim
from rose.bench.chaos.load import Asked, Job, ServingLoad
from rose.bench.chaos.processes import Kept
from rose.bench.chaos.run import Seen, failures, report

SERVING_KILL = Kill(Victim.SERVING, "gpu0", 10.0, "all", 20.0)


def asked(began_s: float, ended_s: float, failure: str = "") -> Asked:
    return Asked(began_s=began_s, ended_s=ended_s, failure=failure)


def load(*requests: Asked, device: str = "gpu0") -> ServingLoad:
    made = ServingLoad(SimpleNamespace(name=device))
    made.asked = list(requests)
    return made


def seen(serving: ServingLoad, *kills: Kill, **changes: Any) -> Seen:
    job = Job("job", SimpleNamespace(), finished_s=[1.0, 99.0])
    fields = {"kills": list(kills), "loads": {serving.device.name: serving}, "jobs": [job], "began_s": 0.0}
    fields |= {"recovered_s": 90.0, "still_ill": [], "num_starts": {}, "audit": {"problems": []}}
    return Seen(**fields | changes)


def test_a_killed_serving_engine_explains_what_was_under_way_until_it_answered_again() -> None:
    before, across, down = asked(1, 9.9, "x"), asked(9, 10.1, "x"), asked(12, 13, "x")
    last, first, after = asked(19, 19.5, "x"), asked(19.6, 20.0), asked(20.1, 21, "x")
    explained, others = failures(load(before, across, down, last, first, after), [SERVING_KILL])
    assert explained == [across, down, last]
    assert others == [before, after]


@pytest.mark.parametrize(
    "kill", [Kill(Victim.SERVING, "gpu1", 10.0, "all", 20.0), Kill(Victim.EXECUTOR, "gpu0", 10.0, "", 20.0)]
)
def test_no_other_kill_explains_a_failed_request(kill: Kill) -> None:
    result = report(seen(load(asked(9, 11, "it broke"), asked(12, 13)), kill))
    (problem,) = result["problems"]
    assert problem.startswith("gpu0: it broke (9.0 to 11.0 s; killed in the 10 s before: ")
    assert result["serving"]["gpu0"]["failed_otherwise"] == 1


def test_a_quiet_run_has_no_problems_and_its_figures_are_counted() -> None:
    kills = [SERVING_KILL, Kill(Victim.LENDER, "", 15.0, "", 16.0), Kill(Victim.LENDER, "", 30.0, "", 33.0)]
    result = report(seen(load(asked(9, 11, "x"), asked(12, 20), asked(30, 30.5)), *kills))
    assert result["problems"] == []
    lender = result["kills"]["lender"]
    assert (lender["number"], lender["recovered"], lender["recovery_max_s"]) == (2, 2, 3.0)
    assert (lender["recovery_alone_number"], lender["recovery_alone_p50_s"]) == (1, 3.0)
    assert result["jobs"]["job"]["turns_after_recovery"] == 1


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"still_ill": ["lender"]}, "not well again: lender"),
        ({"audit": {"problems": ["two holders"]}}, "audit: two holders"),
        ({"recovered_s": 100.0}, "job: no turn ended after all was well again"),
        ({"jobs": [Job("job", SimpleNamespace(), finished_s=[99.0], lost=["given up"])]}, "job: 1 turns lost"),
        ({"jobs": [Job("job", SimpleNamespace(), finished_s=[99.0], num_different=2)]}, "0 short, 2 different"),
    ],
)
def test_what_did_not_hold_is_told(changes: dict[str, Any], text: str) -> None:
    (problem,) = report(seen(load(asked(1, 2)), **changes))["problems"]
    assert text in problem


def test_answers_that_changed_are_told() -> None:
    serving = load(asked(1, 2))
    serving.num_different = 1
    assert report(seen(serving))["problems"] == ["gpu0: 1 answers of serving differ from the first ones"]


async def test_only_what_is_well_is_killed(tmp_path: Any) -> None:
    site = SimpleNamespace(devices={"gpu0": SimpleNamespace(name="gpu0")}, lender=SimpleNamespace(pid=None))
    killer = Killer(site, {}, seed=0)
    assert await killer.kill(Victim.LENDER, "gpu0") is None, "it does not run"
    for victim, earlier in ((Victim.ROLLOUT, Victim.EXECUTOR), (Victim.STOPPED_ROLLOUT, Victim.ROLLOUT)):
        killer.kills = [Kill(earlier, "gpu0", 1.0)]
        assert await killer.kill(victim, "gpu0") is None


async def test_a_kept_process_is_started_again_and_ended(tmp_path: Any) -> None:
    import asyncio  # noqa: PLC0415 - here alone

    log = tmp_path / "short.log"
    log.touch()
    async with Kept("short", ["/bin/sh", "-c", "echo up; sleep 0.1; exit 3"], tmp_path) as kept:
        while log.read_text().count("up") < 2:
            await asyncio.sleep(0.02)
    assert kept.exit_codes[0] == 3
    assert kept.num_starts >= 2
    assert kept.pid is None
