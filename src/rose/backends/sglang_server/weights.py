"""Weight updates of an SGLang engine, as commands that every rank carries out between the same two steps.

SGLang hands a control message to all ranks of an engine, each of which answers it in its own loop, between two steps and in the same
order; the first rank's answer goes out. So a command needs no pause: no step runs meanwhile. What takes long happens on
a thread, and ``poll`` asks for it.

Invariants:

* Every rank ends a command in the same way: what each of them found is gathered before any of them goes on.
* Nothing is written unless all ranks are ready for the same version; if then some fail, all count as fenced.
* While the weights are fenced their label is ``FENCED``, so that no token is taken for one of a published version.

Commands (JSON ``{"command": name, ...}``; the answer is ``{"ranks": [...]}``, one a rank: ``{"value": ...}`` or ``{"error": [type, text]}``):

* ``open version``: trace the loader; once an engine.
* ``stage update``, ``sums``, ``checksums``: begin on the thread; ``poll``: is it done, and with what; ``drop``: forget what is staged.
* ``activate target is_verified keeps_kv``: write, if that is what is staged. ``pause_s`` beside ``ranks`` is how long the loop was held up.
* ``state``, ``layout``, ``fence``.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rose.backends.sglang_server.rank import RankWeights
from rose.backends.sglang_server.wire import Answer, attempt
from rose.backends.wire import activation_to_wire, update_from_wire
from rose.errors import EngineBusyError, EngineFencedError, TransferError

_NEED_WEIGHTS = frozenset({"open", "stage", "sums", "checksums", "activate"})

FENCED = "rose-fenced"
"""The label of weights that are no version."""

Gather = Callable[[Answer], Sequence[Answer]]
"""Gives what every rank gave, in the order of ranks; all ranks call it alike."""

_logger = logging.getLogger(__name__)


class EngineLoop(Protocol):
    """What a command does to the rank's scheduler. Called on every rank alike, between two steps."""

    def label(self, version: str) -> None:
        """Let the tokens from now on be of this version."""

    def part_prefixes(self) -> None:
        """Let no request that comes from now on find a prefix that was computed before."""

    def recompute(self) -> None:
        """Drop the KV of the requests in flight; they are computed anew and go on."""

    def synchronize(self) -> None:
        """Wait for what the device still does."""


class EngineWeights:
    """See the module's text; one a rank.

    Args:
        rank: The rank's weights.
        gather: Over the engine's ranks.
        loop: The rank's scheduler.
        is_lost: Something else than ROSE has written the weights already.
    """

    def __init__(self, rank: RankWeights, gather: Gather, loop: EngineLoop, *, is_lost: bool = False) -> None:
        self._rank, self._gather, self._loop = rank, gather, loop
        self._is_lost = is_lost
        self._is_labelled_fenced = False
        self._commands: dict[str, Callable[[dict[str, Any]], Any]] = {
            "stage": lambda given: rank.begin_stage(update_from_wire(given["update"])),
            "sums": lambda _: rank.begin_sums(),
            "checksums": lambda _: rank.begin_checksums(),
            "poll": lambda _: rank.poll(),
            "drop": lambda _: rank.drop(),
            "state": lambda _: rank.state(),
            "layout": lambda _: rank.target_layout(),
            "fence": lambda _: rank.fence(),
        }

    def answer(self, text: str, *, is_released: bool = False) -> str:
        """Carry a command out on this rank; never raises, so that no rank waits for another in vain.

        Args:
            text: The command.
            is_released: The memory of the weights is released, on all ranks alike; whoever needs it is refused.
        """
        started = time.perf_counter()
        given, problem = _parse(text)
        if problem is not None:
            answers: Sequence[Answer] = [problem]
        elif is_released and given["command"] in _NEED_WEIGHTS:
            message = "the engine is asleep, its weights are released; wake it first"
            answers = [{"error": [EngineBusyError.__name__, message]}]
        elif given["command"] == "open":
            answers = self._open(given)
        elif given["command"] == "activate":
            answers = self._activate(given)
        else:
            answers = wait_for_all(self._agree(attempt(lambda: self._run(given))))
        return json.dumps({"ranks": list(answers), "pause_s": time.perf_counter() - started})

    def lose(self) -> None:
        """Note that something else than ROSE wrote weights; on every rank alike."""
        self._is_lost = True
        if self._rank.is_open:
            self._fence_lost()

    def told(self) -> dict[str, Any]:
        """Return which version the weights are, and whether they are fenced."""
        version = self._rank.version
        return {"version": None if version is None else str(version), "is_fenced": self._rank.is_fenced}

    def _fence_lost(self) -> None:
        self._is_lost = False
        self._rank.fence()
        self._label_fenced()

    def _run(self, given: dict[str, Any]) -> Any:
        work = self._commands.get(given["command"])
        if work is None:
            known = ", ".join(sorted(("activate", "open", *self._commands)))
            message = f"unknown command {given['command']!r}; there are {known}"
            raise TransferError(message)
        return work(given)

    def _open(self, given: dict[str, Any]) -> Sequence[Answer]:
        was_open = self._rank.is_open
        answers = self._agree(attempt(lambda: self._rank.open(given.get("version"))))
        if any("error" in answer for answer in answers):
            self._rank.close()
        elif self._is_lost:
            self._fence_lost()
        elif not was_open and given.get("version") is not None:
            self._loop.label(given["version"])
        return answers

    def _activate(self, given: dict[str, Any]) -> Sequence[Answer]:
        ready = self._agree(attempt(lambda: self._rank.check_ready(given.get("target"))))
        unready = [answer for answer in ready if "error" in answer]
        if unready:
            return unready[:1] * len(ready)
        if len({answer["value"] for answer in ready}) > 1:
            message = f"the ranks have staged {', '.join(answer['value'] for answer in ready)}; stage again"
            return [attempt(lambda: _refuse(message))] * len(ready)
        before = self._rank.version
        self._loop.synchronize()
        written = attempt(lambda: activation_to_wire(self._rank.activate(is_verified=bool(given.get("is_verified")))))
        self._loop.synchronize()
        answers = self._agree(written, is_write=True)
        if self._rank.is_fenced or self._rank.version != before:
            self._after_write(keeps_kv=bool(given.get("keeps_kv", True)))
        return answers

    def _after_write(self, *, keeps_kv: bool) -> None:
        if self._rank.version is not None:
            self._is_labelled_fenced = False
            self._loop.label(str(self._rank.version))
        self._loop.part_prefixes()
        if not keeps_kv:
            self._loop.recompute()

    def _agree(self, own: Answer, *, is_write: bool = False) -> Sequence[Answer]:
        """Gather the answers; if the ranks are not in one state now, fence this one.

        Args:
            own: This rank's answer.
            is_write: It tells of a write, so that one error among several answers leaves the ranks at different versions.
        """
        found = self._gather({"answer": own, "is_fenced": self._rank.is_fenced})
        answers = [one["answer"] for one in found]
        failures = [answer for answer in answers if "error" in answer]
        is_torn = is_write and 0 < len(failures) < len(answers)
        if is_torn or (any(one["is_fenced"] for one in found) and not self._rank.is_fenced):
            self._rank.fence()
        if self._rank.is_fenced:
            self._label_fenced()
        if is_torn:
            message = f"{len(failures)} of {len(answers)} ranks did not activate: {failures[0]['error'][1]}"
            return [{"error": [EngineFencedError.__name__, message]}] * len(answers)
        return answers

    def _label_fenced(self) -> None:
        if not self._is_labelled_fenced:
            self._is_labelled_fenced = True
            self._loop.label(FENCED)


def wait_for_all(answers: Sequence[Answer]) -> Sequence[Answer]:
    """Return the answers; if some rank is not done yet, that alone, so that nobody goes on while its thread still works."""
    waiting = [one for one in answers if isinstance(one.get("value"), dict) and one["value"].get("is_done") is False]
    return waiting[:1] * len(answers) if waiting else answers


def _parse(text: str) -> tuple[dict[str, Any], Answer | None]:
    parsed = attempt(lambda: json.loads(text))
    given = parsed.get("value")
    if isinstance(given, dict) and isinstance(given.get("command"), str):
        return given, None
    return {}, {"error": ["TransferError", f"a weight command is JSON with a 'command', got {text[:100]!r}"]}


def _refuse(message: str) -> None:
    raise TransferError(message)
