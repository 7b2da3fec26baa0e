"""``PoolSite``: a site as a test has it, in whatever environment the test runs. The standard library alone.

Invariants: the site ends with the ``with`` block, and with this process however that ends; a call is answered, or raises within its time.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from rose.errors import ConfigError, DeadlineExceededError, EngineError, EngineLostError

PYTHON_VARIABLE = "ROSE_ENGINE_PYTHON"
"""Names the python of the environment that has vLLM."""

_START_S = 300.0
_CALL_S = 90.0
_CLOSE_S = 90.0
_POLL_S = 0.1
_TAIL_CHARS = 4000
_OF_ANOTHER_ENVIRONMENT = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP")


class PoolSite:
    """A real pool in processes of its own. Make it by ``start``; use it as a context manager. Any thread may call it.

    Attributes:
        url: Of the pool's service, for ``rose.RolloutPool.connect``.
        engines: Each engine's ``pid`` and ``kind``, as of the start.
        store: Address of the store that the pool keeps, for ``rose.open_transport``; trainers ask the pool for it.
        start_s: How long the start took.
        log: What the site and its processes said.
    """

    def __init__(self, process: subprocess.Popen[str], log: Path, *, keeps_log: bool, timeout_s: float) -> None:
        """Wait for a site that is starting; ``start`` starts one."""
        self._keeps_log = keeps_log
        self.log = log
        self._process = process
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._is_out_of_step = False
        assert process.stdout is not None
        self._reader = threading.Thread(
            target=_read, args=(process.stdout, self._answers), name="pool-site-answers", daemon=True
        )
        self._reader.start()
        try:
            ready = self._take(timeout_s, "start")
        except BaseException:
            self.close()
            raise
        self.url: str = ready["url"]
        self.engines: dict[str, dict[str, Any]] = ready["engines"]
        self.store: dict[str, Any] = ready["store"]
        self.start_s: float = ready["start_s"]

    @classmethod
    def start(
        cls,
        model: str | Path,
        *,
        dedicated: int = 2,
        borrowed: int = 1,
        dtype: str = "float32",
        max_len: int = 512,
        max_seqs: int = 16,
        stall_s: float | None = None,
        seed: int | None = None,
        pool: Mapping[str, Any] | None = None,
        python: str | Path | None = None,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
        log: str | Path | None = None,
        timeout_s: float = _START_S,
    ) -> PoolSite:
        """Start a site; returns once every engine takes turns.

        Args:
            model: Folder of the policy's checkpoint.
            dedicated: Engines of the pool's own: ``own0``, ``own1`` and so on.
            borrowed: Engines on lent devices: ``gpu0``, ``gpu1`` and so on.
            dtype: Of the weights on the engines.
            max_len: Longest prompt plus answer.
            max_seqs: Requests that an engine runs at once.
            stall_s: The pool's bound for stalls; the pool's own default unless given.
            seed: Of the pool and of every engine's sampler; engines of one seed may draw the same answer for the same prompt. Unless given, each engine
                has one of its own.
            pool: Further fields of ``rose.PoolConfig``.
            python: Of the environment that has vLLM; ``$ROSE_ENGINE_PYTHON``, or the checkout's ``.venv``, unless given.
            prefix: A command before the site's own, ``("nice",)`` for instance.
            environment: Variables of the site beside this process's own.
            log: File to append what the site says to; a temporary one, removed at a good end, unless given.
            timeout_s: How long the start may take.

        Raises:
            ConfigError: There is no such python, or an option is wrong.
            EngineLostError: Something did not start; has the end of the log.
            DeadlineExceededError: It took too long.
        """
        settings = {} if stall_s is None else {"stall_s": stall_s}
        options = {
            "--model": model,
            "--dedicated": dedicated,
            "--borrowed": borrowed,
            "--dtype": dtype,
            "--max-len": max_len,
            "--max-seqs": max_seqs,
            "--pool": json.dumps({**(pool or {}), **settings}),
        }
        command = [*prefix, str(engine_python(python)), "-m", "rose.testing.pool_site"]
        if seed is not None:
            options["--seed"] = seed
        command += [str(word) for pair in options.items() for word in pair]
        path = Path(tempfile.mkstemp(prefix="rose-site-", suffix=".log")[1] if log is None else log)
        with path.open("a") as errors:
            process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=engine_environment(os.environ, environment or {}),
            )
        return cls(process, path, keeps_log=log is not None, timeout_s=timeout_s)

    def __enter__(self) -> Self:
        """Return the site."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End it."""
        self.close()
        if kind is None and not self._keeps_log:
            self.log.unlink(missing_ok=True)

    def close(self) -> None:
        """End the site and everything that it started. Idempotent."""
        process = self._process
        if process.stdin is not None and not process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        try:
            process.wait(timeout=_CLOSE_S)
        except subprocess.TimeoutExpired:
            process.kill()  # what is left is ended by the process that the site has for that
            process.wait()
        self._reader.join()
        if process.stdout is not None:
            process.stdout.close()

    # Commands.

    def status(self) -> dict[str, Any]:
        """Return ``version``, ``num_live_turns``, ``devices``, and of each of ``engines``: pid, kind, state, version, faults and so on.

        An engine that is not in the pool has the state ``away``.
        """
        return self.call("status")

    def kill(self, engine: str) -> int:
        """Kill an engine's process (SIGKILL); returns its pid. A borrowed one is started again by its executor."""
        return int(self.call("kill", engine=engine)["pid"])

    def stop(self, engine: str) -> int:
        """Stop an engine's process (SIGSTOP); returns its pid."""
        return int(self.call("stop", engine=engine)["pid"])

    def cont(self, engine: str) -> int:
        """Let a stopped process go on (SIGCONT); returns its pid."""
        return int(self.call("cont", engine=engine)["pid"])

    def fail_fast(self, engine: str, *, on: bool = True) -> None:
        """Let every request of an engine fail at once, or no longer."""
        self.call("fail_fast", engine=engine, on=on)

    def hang(self, engine: str, *, on: bool = True) -> None:
        """Let an engine take requests and give no token, or go on."""
        self.call("hang", engine=engine, on=on)

    def fail_updates(self, engine: str, *, on: bool = True) -> None:
        """Let an engine fail every activation of new weights, or no longer."""
        self.call("fail_updates", engine=engine, on=on)

    def lend(self, *, on: bool, grace_s: float = 5.0) -> None:
        """Have the lender take all devices back and lend none, or lend them again.

        Off: returns once borrowed engines have left the pool; their turns have ``grace_s`` to end, and go on elsewhere after that. On: returns
        at once; see ``wait``.
        """
        self.call("lend", on=on, grace_s=grace_s)

    def sums(self, engine: str) -> dict[str, str]:
        """Return tensor name -> xxh3_128 of its bytes, of an engine's live weights."""
        return dict(self.call("sums", engine=engine)["sums"])

    def expected(self, version: str | None = None) -> dict[str, str]:
        """Return the same of a published version (``run:n``), rebuilt from the store; the newest unless given."""
        return dict(self.call("expected", version=version)["sums"])

    def wait(self, engine: str, *states: str, timeout_s: float = 60.0) -> str:
        """Wait until an engine is in one of these states; returns it.

        Raises:
            DeadlineExceededError: It took too long.
        """
        give_up_s = time.monotonic() + timeout_s
        while (state := self.status()["engines"][engine]["state"]) not in states:
            if time.monotonic() > give_up_s:
                message = (
                    f"engine {engine} is {state}, not {' or '.join(states)}, after {timeout_s:g} s; see {self.log}"
                )
                raise DeadlineExceededError(message)
            time.sleep(_POLL_S)
        return str(state)

    def call(self, do: str, *, timeout_s: float = _CALL_S, **fields: Any) -> dict[str, Any]:
        """Send a command and return its answer.

        Raises:
            EngineError: The site could not do it.
            EngineLostError: The site is gone.
            DeadlineExceededError: It did not answer in time; the site is of no more use then.
        """
        with self._lock:
            if self._is_out_of_step:
                message = f"an earlier command was not answered in time; see {self.log}"
                raise EngineLostError(message)
            assert self._process.stdin is not None
            try:
                self._process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
                self._process.stdin.flush()
            except (BrokenPipeError, ValueError) as error:
                message = f"the site is gone; see {self.log}"
                raise EngineLostError(message) from error
            return self._take(timeout_s, do)

    def _take(self, timeout_s: float, what: str) -> dict[str, Any]:
        try:
            line = self._answers.get(timeout=timeout_s)
        except queue.Empty as error:
            self._is_out_of_step = True
            message = f"the site did not answer {what} within {timeout_s:g} s\n{self._tail()}"
            raise DeadlineExceededError(message) from error
        if line is None:
            self._answers.put(None)
            message = f"the site ended with {self._process.wait()} before it answered {what}\n{self._tail()}"
            raise EngineLostError(message)
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            message = f"{what}: {answer['error']}"
            raise EngineError(message)
        return answer

    def _tail(self) -> str:
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        return f"the end of {self.log}:\n{text[-_TAIL_CHARS:]}"


def _read(lines: IO[str], answers: queue.SimpleQueue[str | None]) -> None:
    with contextlib.suppress(ValueError):  # it was closed
        for line in lines:
            answers.put(line)
    answers.put(None)


def engine_python(given: str | Path | None = None, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the python of the environment that has vLLM.

    Raises:
        ConfigError: There is none where it is looked for.
    """
    source = Path(__file__).resolve().parents[3]
    candidates = [given, environ.get(PYTHON_VARIABLE), source.parent / ".venv" / "bin" / "python"]
    chosen = Path(next(each for each in candidates if each))
    if not (chosen.is_file() and os.access(chosen, os.X_OK)):
        message = f"there is no python at {chosen}; set {PYTHON_VARIABLE} to that of the environment that has vLLM"
        raise ConfigError(message)
    return chosen.absolute()


def engine_environment(
    environ: Mapping[str, str], further: Mapping[str, str], source: Path | None = None
) -> dict[str, str]:
    """Return the variables of a site: none that point into this environment, and this checkout's code if there is one.

    Args:
        environ: This process's.
        further: What the test adds.
        source: The folder that has ``rose``.
    """
    kept = {name: value for name, value in environ.items() if name not in _OF_ANOTHER_ENVIRONMENT}
    folder = source or Path(__file__).resolve().parents[3]
    is_checkout = not {"site-packages", "dist-packages"} & set(folder.parts)
    return {
        **kept,
        **({"PYTHONPATH": str(folder)} if is_checkout else {}),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "2",
        **further,
    }
