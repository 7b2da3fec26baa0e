from __future__ import annotations

import asyncio
import sys

import pytest

from rose.errors import TrainerError
from rose.reference.worker_process import WorkerProcess

ECHO = """
import json, sys, time
from rose.reference.worker_process import take_over_stdout
answers = take_over_stdout()
print("noise on stdout")
for line in sys.stdin:
    request = json.loads(line)
    if request == "die":
        sys.exit("dying words")
    if request == "hang":
        time.sleep(60)
    reply = {"error": "refused"} if request == "refuse" else {"ok": request}
    answers.write(json.dumps(reply) + "\\n")
    answers.flush()
"""


@pytest.fixture
async def echo(tmp_path, monkeypatch):
    (tmp_path / "echo_worker.py").write_text(ECHO)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    worker = await WorkerProcess.start("echo_worker", name="echo", error_type=TrainerError)
    yield worker
    worker.kill()
    await worker.close()


async def test_answers_come_in_order_and_errors_are_typed(echo: WorkerProcess):
    big = list(range(50_000))
    results = await asyncio.gather(
        *(echo.ask(request) for request in (1, "refuse", {"a": None}, big)), return_exceptions=True
    )
    assert (results[0], results[2], results[3]) == (1, {"a": None}, big)
    assert isinstance(results[1], TrainerError)
    assert str(results[1]) == "echo: refused"


async def test_death_fails_every_open_question_with_the_last_words(echo: WorkerProcess):
    results = await asyncio.gather(*(echo.ask(request) for request in ("die", 1, 2)), return_exceptions=True)
    for result in results:
        assert isinstance(result, TrainerError)
        assert "echo ended with code 1" in str(result)
        assert str(result).endswith("noise on stdout\ndying words")
    with pytest.raises(TrainerError, match="dying words"):
        await echo.ask(3)


async def test_a_child_that_does_not_end_by_itself_is_ended(echo: WorkerProcess):
    question = echo.post("hang")
    await echo.close(timeout_s=0.2)
    assert echo.has_ended
    with pytest.raises(TrainerError, match="code -9"):
        await question
    await echo.close()


async def test_a_cancelled_question_keeps_its_place(echo: WorkerProcess):
    first, second = echo.post(1), echo.post(2)
    first.cancel()
    assert await second == 2
