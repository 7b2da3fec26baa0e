"""One chaos run: load, kills, recovery, and what has to hold of all that was seen."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import attrs

from rose import checks
from rose.bench.chaos.kills import Kill, Killer, Victim
from rose.bench.chaos.load import Asked, Job, ServingLoad
from rose.bench.chaos.site import Site, SiteConfig, running
from rose.coserving.lease_sqlite import AuditReader
from rose.coserving.lender_audit import check_audit
from rose.observe.latency import percentile

Say = Callable[[str], None]
_SHOWN = 20
_BEFORE_S = 10.0


@attrs.frozen(kw_only=True)
class ChaosConfig:
    """One run. Wall seconds.

    Attributes:
        site: What is put under load.
        duration_s: From the first kill's earliest moment to the last's latest.
        least_pause_s, most_pause_s: Between two kills.
        recover_s: In how much time all must be well again after the last kill.
        settle_s: Load before the first kill and after the last recovery; jobs must end turns in that.
        num_jobs: Jobs that borrow.
        seed: Of kills, prompts and pauses.
    """

    site: SiteConfig
    num_jobs: int = attrs.field(default=2, validator=checks.integer(1))
    duration_s: float = attrs.field(default=600.0, validator=checks.number(above=0))
    least_pause_s: float = attrs.field(default=10.0, validator=checks.number(above=0))
    most_pause_s: float = attrs.field(default=20.0, validator=checks.number(above=0))
    recover_s: float = attrs.field(default=180.0, validator=checks.number(above=0))
    settle_s: float = attrs.field(default=10.0, validator=checks.number(above=0))
    seed: int = 0


@attrs.define(eq=False)
class Seen:
    """What a run saw."""

    kills: list[Kill]
    loads: Mapping[str, ServingLoad]
    jobs: Sequence[Job]
    began_s: float
    recovered_s: float
    still_ill: list[str]
    num_starts: dict[str, int]
    audit: dict[str, Any]
    left_over: list[int] = attrs.field(factory=list)


Kills = Callable[[Killer], Awaitable[None]]


async def run_chaos(config: ChaosConfig, *, kills: Kills | None = None, say: Say = print) -> dict[str, Any]:
    """Make a run and return its figures; ``problems`` is empty when all held.

    Args:
        config: The run.
        kills: Does the killing; random ones by the configuration when left out.
        say: Told what happens, one line each.

    Raises:
        EngineLostError: The site does not start.
    """
    async with running(config.site) as site:
        say(f"the site is up: {', '.join(site.devices)} and the lender; files in {site.config.folder}")
        seen = await _watched(site, config, kills or (lambda killer: _random_kills(killer, config, say)), say)
    seen.left_over += site.left_over
    return report(seen)


async def _watched(site: Site, config: ChaosConfig, kills: Kills, say: Say) -> Seen:
    loop = asyncio.get_running_loop()
    loads = {name: ServingLoad(device, seed=config.seed) for name, device in site.devices.items()}
    jobs = [Job(f"job-{number}", site, seed=config.seed) for number in range(config.num_jobs)]
    killer = Killer(site, loads, config.seed)
    async with contextlib.AsyncExitStack() as stack:
        for load in loads.values():
            await stack.enter_async_context(load.running())
        for job in jobs:
            await stack.enter_async_context(job.running())
        await asyncio.sleep(config.settle_s)
        began_s = loop.time()
        await kills(killer)
        say("no more kills; waiting until all is well")
        ill = [f"{kill.victim.value} {kill.device}" for kill in await killer.wait_until_well(config.recover_s)]
        ill += await site.wait_until_well(config.recover_s)
        recovered_s = loop.time()
        await _turns_of_all(jobs, recovered_s, config.recover_s)
        await asyncio.sleep(config.settle_s)
    processes = {"lender": site.lender} | {f"executor {name}": each.executor for name, each in site.devices.items()}
    return Seen(
        kills=killer.kills,
        loads=loads,
        jobs=jobs,
        began_s=began_s,
        recovered_s=recovered_s,
        still_ill=ill,
        num_starts={name: process.num_starts for name, process in processes.items()},
        audit=_audit(site),
    )


async def _random_kills(killer: Killer, config: ChaosConfig, say: Say) -> None:
    loop, rng = asyncio.get_running_loop(), random.Random(config.seed)
    end_s = loop.time() + config.duration_s
    began_s = loop.time()
    while (left_s := end_s - loop.time()) > 0:
        kill = await killer.kill_any()
        if kill is not None:
            what = f"{kill.victim.value} {kill.device} {kill.part}".rstrip()
            say(f"[{kill.at_s - began_s:6.1f} s] killed: {what}")
        await asyncio.sleep(min(left_s, rng.uniform(config.least_pause_s, config.most_pause_s)))


async def _turns_of_all(jobs: Sequence[Job], since_s: float, timeout_s: float) -> None:
    """Wait until every job has finished a turn since; at most that long."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            while not all(job.finished_s and job.finished_s[-1] > since_s for job in jobs):  # noqa: ASYNC110 - they are tasks of their own
                await asyncio.sleep(0.1)


def _audit(site: Site) -> dict[str, Any]:
    with AuditReader(site.state) as reader:
        entries = list(reader.entries())
    changes = Counter(entry.change for entry in entries)
    lent: dict[str, float] = {}
    for entry in entries:
        lent[entry.job] = lent.get(entry.job, 0.0) + (entry.held_s or 0.0)
    return {
        "entries": len(entries),
        "changes": dict(sorted(changes.items())),
        "lent_s": {job: round(held_s, 1) for job, held_s in sorted(lent.items()) if job},
        "problems": check_audit(entries),
    }


def failures(load: ServingLoad, kills: Sequence[Kill]) -> tuple[list[Asked], list[Asked]]:
    """Return the failed requests of a device that its killed serving engine explains, and the others.

    A kill explains a request that was under way between it and the end of the first one that was answered afterwards.
    """
    outages = []
    for kill in kills:
        if kill.victim is Victim.SERVING and kill.device == load.device.name:
            end_s = load.first_answer_s(kill.at_s)
            outages.append((kill.at_s, float("inf") if end_s is None else end_s))
    explained: list[Asked] = []
    others: list[Asked] = []
    for one in load.asked:
        if one.failure:
            is_explained = any(one.began_s <= end_s and one.ended_s >= at_s for at_s, end_s in outages)
            (explained if is_explained else others).append(one)
    return explained, others


def report(seen: Seen) -> dict[str, Any]:
    """Return the figures of a run, and as ``problems`` what did not hold."""
    serving = {name: _serving(load, seen) for name, load in seen.loads.items()}
    jobs = {job.name: _job(job, seen) for job in seen.jobs}
    problems = [f"not well again: {what}" for what in seen.still_ill]
    problems += [f"processes were left over: {seen.left_over}"] if seen.left_over else []
    broken = [text for load in seen.loads.values() for text in load.broken]
    broken += [text for job in seen.jobs for text in job.broken]
    problems += [f"a client broke: {text}" for text in broken]
    problems += [f"audit: {problem}" for problem in seen.audit["problems"]]
    for name, row in serving.items():
        problems += [f"{name}: {failure}" for failure in row["failures_unexplained"]]
        if row["answers_different"]:
            problems.append(f"{name}: {row['answers_different']} answers of serving differ from the first ones")
    for name, row in jobs.items():
        if row["turns_lost"] or row["turns_short"] or row["answers_different"]:
            problems.append(
                f"{name}: {row['turns_lost']} turns lost, {row['turns_short']} short, {row['answers_different']} different"
            )
        if not row["turns_after_recovery"]:
            problems.append(f"{name}: no turn ended after all was well again")
    return {
        "problems": problems,
        "kills": _kills(seen.kills),
        "serving": serving,
        "jobs": jobs,
        "audit": seen.audit,
        "starts": seen.num_starts,
        "log": [
            {
                "at_s": round(kill.at_s - seen.began_s, 2),
                "victim": kill.victim.value,
                "device": kill.device,
                "part": kill.part,
                "recovery_s": kill.recovery_s and round(kill.recovery_s, 2),
            }
            for kill in seen.kills
        ],
    }


def _kills(kills: Sequence[Kill]) -> dict[str, Any]:
    rows = {}
    for victim in Victim:
        found = [kill for kill in kills if kill.victim is victim]
        times = [kill.recovery_s for kill in found if kill.recovery_s is not None]
        calm = [
            kill.recovery_s
            for kill in found
            if kill.recovery_s is not None and not any(_overlaps(kill, other) for other in kills)
        ]
        rows[victim.value] = {
            "number": len(found),
            "recovered": len(times),
            "recovery_p50_s": percentile(times, 50),
            "recovery_max_s": max(times, default=None),
            "recovery_alone_number": len(calm),
            "recovery_alone_p50_s": percentile(calm, 50),
            "recovery_alone_max_s": max(calm, default=None),
        }
    return rows


def _overlaps(kill: Kill, other: Kill) -> bool:
    """Return whether another victim was down at the same time."""
    ends = [float("inf") if each.well_s is None else each.well_s for each in (kill, other)]
    return other is not kill and other.at_s < ends[0] and kill.at_s < ends[1]


def _serving(load: ServingLoad, seen: Seen) -> dict[str, Any]:
    explained, others = failures(load, seen.kills)
    kills = [kill for kill in seen.kills if kill.victim is Victim.SERVING and kill.device == load.device.name]
    answered = [
        one.ended_s - one.began_s
        for one in load.asked
        if not one.failure and not any(one.began_s <= kill.at_s <= one.ended_s for kill in kills)
    ]
    return {
        "requests": len(load.asked),
        "answered": sum(not one.failure for one in load.asked),
        "failed_with_the_killed_serving_engine": len(explained),
        "failed_otherwise": len(others),
        "failures_unexplained": [_told(one, seen) for one in others[:_SHOWN]],
        "latency_p50_s": percentile(answered, 50),
        "latency_p99_s": percentile(answered, 99),
        "latency_max_s": max(answered, default=None),
        "answers_different": load.num_different,
    }


def _told(one: Asked, seen: Seen) -> str:
    before = [
        f"{kill.victim.value} {kill.device}".rstrip()
        for kill in seen.kills
        if 0 <= one.ended_s - kill.at_s <= _BEFORE_S
    ]
    times = f"{one.began_s - seen.began_s:.1f} to {one.ended_s - seen.began_s:.1f} s"
    return f"{one.failure} ({times}; killed in the {_BEFORE_S:g} s before: {', '.join(before) or 'nothing'})"


def _job(job: Job, seen: Seen) -> dict[str, Any]:
    return {
        "turns_finished": len(job.finished_s),
        "turns_after_recovery": sum(at_s > seen.recovered_s for at_s in job.finished_s),
        "turns_lost": len(job.lost),
        "losses": job.lost[:_SHOWN],
        "turns_moved_with_tokens": job.num_moved,
        "turns_short": job.num_short,
        "hops": dict(sorted(job.ends.items())),
        "answers_different": job.num_different,
    }
