"""The demo's handle on its serving side: starts the host process, begins and ends arms, reads the latencies back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Self

import attrs

from rose.errors import EngineError
from rose.observe.latency import RequestRecord, Slo, percentile
from rose.reference.engines import EngineSpec
from rose.reference.load import ServingLoad
from rose.reference.worker_process import WorkerProcess
from rose.types import EngineId

_CLOSE_TIMEOUT_S = 30.0


@attrs.frozen(kw_only=True)
class ServingArm:
    """What the serving side measured in one arm.

    Attributes:
        records: Requests with at least one token; of those cut off early by the end of the arm only the first token counts.
        num_sent: All requests of the arm.
        num_unanswered: Requests that failed, or that waited longer than the TTFT budget when the arm ended.
        duration_s: Length of the arm, modelled seconds.
        rate_rps: Requests a second that the least loaded device was sent.
    """

    records: tuple[RequestRecord, ...]
    num_sent: int
    num_unanswered: int
    duration_s: float
    rate_rps: float


class ServingSite:
    """Serving engines and their clients, in a process of their own."""

    def __init__(self, process: WorkerProcess, load: ServingLoad, *, vocab_size: int) -> None:
        self._process = process
        self._load = load
        self._vocab_size = vocab_size

    @classmethod
    async def start(
        cls, engines: Sequence[EngineSpec], load: ServingLoad, *, clock_path: Path, vocab_size: int
    ) -> Self:
        """Start the host process and its engines.

        Raises:
            EngineError: An engine did not start.
        """
        process = await WorkerProcess.start("rose.reference.serving_host", name="serving host", error_type=EngineError)
        specs = [attrs.asdict(engine) for engine in engines]
        try:
            await process.ask({"clock": str(clock_path), "engines": specs})
        except BaseException:
            await process.close(
                timeout_s=_CLOSE_TIMEOUT_S
            )  # a host that is killed leaves engines that are still loading
            raise
        return cls(process, load, vocab_size=vocab_size)

    async def warm_up(self) -> None:
        """Let every engine make its first step, which takes longest, before anybody measures; the modelled clock must run."""
        await self._process.ask({"do": "warm_up"})

    async def begin(self, label: str) -> None:
        """Begin an arm: the load starts now. ``label`` chooses the prompts' token ids."""
        arrivals = [[attrs.astuple(arrival) for arrival in device] for device in self._load.by_device]
        await self._process.ask({"do": "replay", "label": label, "arrivals": arrivals, "vocab_size": self._vocab_size})

    async def progress(self) -> tuple[float | None, float | None]:
        """Return the P99 of TTFT and TPOT over the latest requests, in milliseconds."""
        latest = await self._process.ask({"do": "progress"})
        tpots = [tpot for _, tpot in latest if tpot is not None]
        return percentile([ttft * 1e3 for ttft, _ in latest], 99), percentile([tpot * 1e3 for tpot in tpots], 99)

    async def end(self, slo: Slo) -> ServingArm:
        """End the arm and return what was measured."""
        answer = await self._process.ask({"do": "stop"})
        records = tuple(
            RequestRecord.from_token_times(index=index, device=device, arrived_s=arrived_s, token_times_s=times_s)
            for index, device, arrived_s, times_s in answer["answers"]
        )
        num_overdue = sum(waited_s * 1e3 > slo.ttft_ms for waited_s in answer["waited_s"])
        return ServingArm(
            records=records,
            num_sent=sum(answer["num_sent"]),
            num_unanswered=answer["num_failed"] + num_overdue,
            duration_s=answer["duration_s"],
            rate_rps=min(answer["num_sent"]) / answer["duration_s"],
        )

    async def step_logs(self, since_s: float) -> dict[EngineId, list[list[float]]]:
        """Return each engine's device turns that started at ``since_s`` or later."""
        logs = await self._process.ask({"do": "step_logs", "since_s": since_s})
        return {EngineId(engine): rows for engine, rows in logs.items()}

    async def close(self) -> None:
        """End the engines and their process."""
        await self._process.close(timeout_s=_CLOSE_TIMEOUT_S)
