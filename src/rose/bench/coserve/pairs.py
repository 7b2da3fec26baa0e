"""Disaggregated serving in virtual time: one device prefills, its neighbour decodes, a rollout engine on each.

Each device keeps its own half of the promise: the prefill device the TTFT, the decode device the time per token, the transfer of the
context counted in it. Everything else is as in ``rose.bench.coserve.world``.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence

import attrs

from rose.backends.paced.profiles import profile_named
from rose.bench.coserve.world import (
    CoservePolicy,
    DeviceSetup,
    Observed,
    WatchedFeed,
    build_site,
    observe,
    poke_all,
    reading,
)
from rose.policies.admission import Role
from rose.simulation.loop import VirtualLoop, new_loop
from rose.simulation.serving_site import hand_over
from rose.simulation.traces import Arrival

_LINK_BYTES_PER_S = 25e9


def run_pair(
    setup: DeviceSetup, policy: CoservePolicy, arrivals: Sequence[Arrival], *, duration_s: float, seed: int
) -> dict[Role, Observed]:
    """Run a prefill and a decode device under one list of arrivals; each has rollouts of its own.

    Args:
        setup: Of both devices; roles are set here.
        policy: How each is shared: ``alone`` or one of those under the co-serving rule.
        arrivals: Over the warm-up and ``duration_s`` after it.
        duration_s: What counts.
        seed: Of the trajectories and the noise.

    Returns:
        What each device showed. Requests are those of the decode device; answers of one token are the prefill device's.
    """
    loop = new_loop()
    return loop.run(_run(loop, setup, policy, arrivals, duration_s, seed))


async def _run(
    loop: VirtualLoop,
    setup: DeviceSetup,
    policy: CoservePolicy,
    arrivals: Sequence[Arrival],
    duration_s: float,
    seed: int,
) -> dict[Role, Observed]:
    begin_s, end_s = setup.warm_up_s, setup.warm_up_s + duration_s
    sites, feeds = {}, {}
    for number, role in enumerate((Role.PREFILL, Role.DECODE)):
        own = attrs.evolve(setup, admission=attrs.evolve(setup.admission, role=role))
        site = sites[role] = build_site(loop, own, policy, 2 * seed + number)
        taken = tuple(arrival for arrival in arrivals if arrival.at_s < end_s) if role is Role.PREFILL else ()
        feeds[role] = WatchedFeed(site, taken, math.inf)
    kv_bytes = profile_named(setup.serving).kv_bytes_per_token
    hand_over(feeds[Role.PREFILL], feeds[Role.DECODE], lambda tokens: tokens * kv_bytes / _LINK_BYTES_PER_S)
    for role, feed in feeds.items():
        feed.start()
        poke_all(sites[role])
    await asyncio.sleep(begin_s)
    before = {role: reading(site) for role, site in sites.items()}
    for feed in feeds.values():
        feed.lane.keeps_gaps = True
    await asyncio.sleep(duration_s)
    for site in sites.values():
        for device in site.devices:
            device.fold()
    return {role: observe(site, feeds[role], before[role], begin_s, end_s) for role, site in sites.items()}
