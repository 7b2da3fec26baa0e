"""Three client processes at once on one pool: affinity and accounts are the pool's, not a process's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import attrs
import pytest

pytest.importorskip("aiohttp", reason="aiohttp is not installed: pip install 'rose-rl[http]'")

from pool_parts import direct_pool, turn, until
from rose.policies.routing import RoutingRule
from rose.pool import PoolConfig, RoutingConfig
from rose.pool.wire import result_from_wire, turn_to_wire
from rose.types import HopEnd, RouteReason, TurnResult

_CLIENT = Path(__file__).with_name("pool_client_process.py")
NUM_CLIENTS, NUM_TRAJECTORIES, NUM_TURNS = 3, 12, 5
TABLE = PoolConfig(routing=RoutingConfig(rule=RoutingRule.PAPER))  # whatever the load of idle engines


@attrs.define(eq=False)
class Client:
    """One client process; its answers are awaited by trajectory."""

    process: asyncio.subprocess.Process
    waiters: dict[str, asyncio.Future[TurnResult]] = attrs.field(factory=dict)

    async def generate(self, trajectory_id: str, num_prompt: int, max_tokens: int = 5) -> TurnResult:
        waiter: asyncio.Future[TurnResult] = asyncio.get_running_loop().create_future()
        self.waiters[trajectory_id] = waiter
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(turn_to_wire(turn(trajectory_id, num_prompt, max_tokens))).encode() + b"\n")
        return await waiter

    async def read(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            trajectory_id, result = json.loads(line)
            self.waiters.pop(trajectory_id).set_result(result_from_wire(result))


@contextlib.asynccontextmanager
async def clients(url: str) -> AsyncIterator[list[Client]]:
    pipe = asyncio.subprocess.PIPE
    started = [
        Client(await asyncio.create_subprocess_exec(sys.executable, _CLIENT, url, stdin=pipe, stdout=pipe))
        for _ in range(NUM_CLIENTS)
    ]
    for client in started:
        assert client.process.stdout is not None
        assert await client.process.stdout.readline() == b"ready\n"
    readers = [asyncio.create_task(client.read()) for client in started]
    try:
        yield started
    finally:
        for client in started:
            if client.process.returncode is None:
                client.process.kill()
            await client.process.wait()
        await asyncio.gather(*readers)


async def test_affinity_holds_across_processes() -> None:
    async with direct_pool(4, config=TABLE) as (pool, url, servers), clients(url) as started:

        async def play(number: int) -> list[TurnResult]:
            """Run a trajectory whose turns come from one process after another."""
            results = []
            for k in range(NUM_TURNS):
                client = started[(number + k) % NUM_CLIENTS]
                results.append(await client.generate(f"t{number}", 8 + 5 * k))
                # The next process hears of the result later than the pool does; here it could be sooner.
                await until(
                    lambda: f"t{number}" not in {record.turn.trajectory_id for record in pool._state.live.values()}
                )
            return results

        plays = await asyncio.gather(*(play(number) for number in range(NUM_TRAJECTORIES)))
        for results in plays:
            assert len({result.hops[0].engine_id for result in results}) == 1
            assert all(result.hops[0].reason is RouteReason.AFFINITY for result in results[1:])
        assert sum(server.num_asked for server in servers) == NUM_TRAJECTORIES * NUM_TURNS
        accounts = pool.accounts().values()
        assert sum(account.num_tokens for account in accounts) == NUM_TRAJECTORIES * NUM_TURNS * 5


async def test_a_killed_process_takes_its_turns_along_and_nobody_else_s() -> None:
    async with direct_pool(2, token_s=0.02, linger_s=0.3) as (pool, url, servers), clients(url) as started:
        doomed, other = started[0], started[1]
        tasks = [asyncio.create_task(doomed.generate(f"d{n}", 8, 2000)) for n in range(4)]
        kept = [asyncio.create_task(other.generate(f"k{n}", 8, 50)) for n in range(4)]
        await until(lambda: sum(server.num_asked for server in servers) == 8)
        doomed.process.kill()
        assert [len(result.token_ids) for result in await asyncio.gather(*kept)] == [50] * 4
        await until(lambda: pool.snapshot().num_live_turns == 0)
        await until(lambda: not any(server.engine.num_in_flight for server in servers))
        accounts = pool.accounts().values()
        assert sum(account.num_ended[HopEnd.STALLED] + account.num_ended[HopEnd.LOST] for account in accounts) == 0
        for task in tasks:
            task.cancel()
