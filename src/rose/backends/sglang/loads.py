"""How busy a server is, from what it says and what runs through one client. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rose.backends.sglang.facts import ServerLoad
from rose.interfaces.serving import PauseMode


def combined(load: ServerLoad, own: Sequence[tuple[int, bool]], *, paused: PauseMode | None) -> ServerLoad:
    """Return the load as of now.

    SGLang publishes its load with every prefill and every some decode steps, and not at all while paused; other clients' requests are in that
    number alone, this one's are known.

    Args:
        load: What the server published.
        own: For each request of this client the tokens that it has, and whether the scheduler has it.
        paused: How the server is paused.
    """
    if load.is_fresh:  # what waits in the server's front is in no number of the scheduler
        num_waiting = max(load.num_waiting, len(own) - load.num_running)
        return attrs.evolve(load, num_waiting=num_waiting)
    num_begun = sum(is_with_scheduler for _, is_with_scheduler in own)
    if paused is not None:
        # What was retracted has no KV; what is kept is as it was when the pause began.
        num_running = num_begun if paused is PauseMode.KEEP else 0
        kv_used_tokens = load.kv_used_tokens if paused is PauseMode.KEEP else 0
        return ServerLoad(num_running=num_running, num_waiting=len(own) - num_running, kv_used_tokens=kv_used_tokens)
    num_all = max(load.num_running + load.num_waiting, len(own))
    num_running = min(num_all, max(load.num_running, num_begun))
    num_tokens = sum(num_tokens for num_tokens, is_with_scheduler in own if is_with_scheduler)
    return ServerLoad(
        num_running=num_running,
        num_waiting=num_all - num_running,
        kv_used_tokens=load.kv_used_tokens or num_tokens,
    )
