from __future__ import annotations

import asyncio
import os
import signal
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
        assert sorted(str(result).splitlines()[-2:]) == ["dying words", "noise on stdout"]
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


async def test_a_child_that_answers_anything_but_json_is_ended_with_what_it_said(tmp_path, monkeypatch):
    """A library that prints while it is imported must not leave the parent waiting for ever."""
    (tmp_path / "chatty_worker.py").write_text("import time\nprint('Welcome to lib', flush=True)\ntime.sleep(60)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    worker = await WorkerProcess.start("chatty_worker", name="chatty", error_type=TrainerError)
    with pytest.raises(TrainerError, match="Welcome to lib"):
        async with asyncio.timeout(10):
            await worker.ask(1)
    await worker.close()


async def test_a_grandchild_that_holds_the_pipes_does_not_hold_up_the_parent(tmp_path, monkeypatch):
    """A serving host that is killed while its engines load leaves them with its standard error."""
    (tmp_path / "parent_worker.py").write_text(
        "import subprocess, sys\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(30)'])\n"
        "print('{\"ok\": %d}' % child.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    worker = await WorkerProcess.start("parent_worker", name="parent", error_type=TrainerError)
    grandchild = await worker.ask(1)
    try:
        question = worker.post(2)
        async with asyncio.timeout(5):
            worker.kill()
            with pytest.raises(TrainerError, match="parent ended with code -9"):
                await question
            await worker.close()
    finally:
        os.kill(grandchild, signal.SIGKILL)


async def test_an_interrupt_from_the_terminal_does_not_reach_the_child(echo: WorkerProcess):
    assert os.getpgid(echo.pid) == echo.pid != os.getpgrp()
