"""A client process of a pool: reads turns as JSON lines, runs them side by side, writes where each ran."""

from __future__ import annotations

import asyncio
import json
import sys

from rose import RolloutPool
from rose.pool.wire import to_plain, turn_from_wire


async def main(url: str) -> None:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    async with RolloutPool.connect(url) as pool, asyncio.TaskGroup() as group:

        async def run(line: bytes) -> None:
            turn = turn_from_wire(json.loads(line))
            result = await pool.generate(turn)
            print(json.dumps([turn.trajectory_id, to_plain(result)]), flush=True)  # noqa: T201 - its output

        print("ready", flush=True)  # noqa: T201 - its output
        while line := await reader.readline():
            group.create_task(run(line))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
