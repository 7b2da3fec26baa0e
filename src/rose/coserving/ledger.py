"""The ledger of one shared device: what serving, the rollout engine and the lender say, in one small shared file.

Invariants:

* Each section has one writer: *arrivals* serving's input thread, *pulse* and *usage* serving's heartbeat thread, *serving*
  serving's step loop, *rollout* the rollout engine's step loop, *budget* the lender. Everybody may read everything.
* Reading needs no lock and no call to another process; a torn, missing or foreign record raises ``LedgerError`` and
  whoever decides on it fails closed. A dead writer is seen by the age of its heartbeat.
* Times are seconds of the device's clock; sizes are modelled bytes.

Life cycle:

1. [EXECUTOR] ``Ledger.attach_or_create`` puts a file with a header and empty sections there, in one piece; no lease.
2. [ENGINES] ``Ledger.attach``; each publishes its own section after every step.
3. [LENDER] ``publish_budget`` grants, renews, revokes; the rollout engine reads it before every step.
"""

from __future__ import annotations

import contextlib
import math
import os
import secrets
import struct
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs

from rose.coserving.shared_page import SECTION_BYTES, Section, map_file
from rose.errors import LedgerError
from rose.policies.admission import Budget, Mode, ServingState

_MAGIC = b"ROSELEDG"
_VERSION = 3
_HEADER = struct.Struct("<8sII")
_NUM_SECTIONS = 7
_NUM_BYTES = _NUM_SECTIONS * SECTION_BYTES
_MODES = tuple(Mode)


@attrs.frozen(kw_only=True)
class ArrivalState:
    """Prompts that reached the serving process since it started, and when the last one did."""

    num_arrived: int = 0
    last_arrival_s: float = -math.inf


@attrs.define(kw_only=True)
class RolloutState:
    """What a rollout engine says of itself. Its writer changes one object in place, since it writes several times a step.

    Attributes:
        wants_until_s: Until when it expects to ask for the device next; in the past when it does not.
        step_s: How long its next step takes at most.
        num_running, num_waiting: Requests.
        kv_used_bytes, kv_budget_bytes: Its use and the budget in force.
        num_evicted: Requests evicted since start.
        updated_s: When this was written.
        turn_ends_s: When the device turn that it holds should be over; ``-inf`` when it holds none.
        busy_s: Device time it took since start.
        num_tokens: Tokens it computed since start, prompts included.
        fencing_token: Of the lease it works under.
        pid, pid_start: Its process, and when that started in the kernel's ticks (so that a reused pid is no mistake); 0: unknown.
    """

    wants_until_s: float = -math.inf
    step_s: float = 0.0
    num_running: int = 0
    num_waiting: int = 0
    kv_used_bytes: float = 0.0
    kv_budget_bytes: float = 0.0
    num_evicted: int = 0
    updated_s: float = -math.inf
    turn_ends_s: float = -math.inf
    busy_s: float = 0.0
    num_tokens: int = 0
    fencing_token: int = 0
    pid: int = 0
    pid_start: int = 0


@attrs.frozen(kw_only=True)
class UsageState:
    """What serving says of its recent past and of its users, every tenth of a second. Counters run since its start.

    Attributes:
        window_s: The fractions are means over about this long (exponential), ``kv_peak_fraction`` the largest within it.
        busy_fraction, rollout_fraction: Share of the device's time in serving's and in rollouts' steps.
        kv_mean_fraction, kv_peak_fraction: Share of the KV pool in serving's use.
        updated_s: When this was written; ``-inf``: never.
        num_requests: Requests that got their first token.
        num_broken: Requests beyond their class's TTFT, or beyond its mean TPOT when they ended.
        num_tokens, num_gaps_broken: Tokens, and those that came later after the one before than the class's TPOT.
        debt_s: Seconds beyond TTFT and TPOT budgets, summed over requests.
        delay_s: Serving's waits for rollout turns, summed.
        pid, pid_start: Serving's process.
    """

    window_s: float = 0.0
    busy_fraction: float = 0.0
    rollout_fraction: float = 0.0
    kv_mean_fraction: float = 0.0
    kv_peak_fraction: float = 0.0
    updated_s: float = -math.inf
    num_requests: int = 0
    num_broken: int = 0
    num_tokens: int = 0
    num_gaps_broken: int = 0
    debt_s: float = 0.0
    delay_s: float = 0.0
    pid: int = 0
    pid_start: int = 0


_ROLLOUT_FIELDS = tuple(field.name for field in attrs.fields(RolloutState))
_USAGE_FIELDS = tuple(field.name for field in attrs.fields(UsageState))
_ROLLOUT_VALUES = attrgetter(*_ROLLOUT_FIELDS)
_USAGE_VALUES = attrgetter(*_USAGE_FIELDS)

IDLE_SERVING = ServingState(
    num_arrived=0,
    num_admitted=0,
    num_running=0,
    num_waiting=0,
    kv_used_bytes=0.0,
    kv_pool_bytes=math.inf,
    oldest_arrival_s=math.nan,
    last_step_end_s=-math.inf,
    deadline_s=math.inf,
    next_decode_s=0.0,
    heartbeat_s=-math.inf,
)


def _check_kind(path: Path) -> None:
    """Refuse what is a file of somebody else.

    Raises:
        LedgerError: There is none, it is a folder, or it begins as no ledger does.
    """
    try:
        with path.open("rb") as file:
            found = file.read(len(_MAGIC))
    except FileNotFoundError as error:
        message = f"there is no ledger {path}; the executor of the device (rose serve) makes it"
        raise LedgerError(message) from error
    except IsADirectoryError as error:
        message = f"{path} is no ROSE ledger but a folder; name the file"
        raise LedgerError(message) from error
    except OSError:
        return  # what it is, mapping it tells
    if found != _MAGIC:
        message = f"{path} is no ROSE ledger; name a file that an executor made"
        raise LedgerError(message)


class Ledger:
    """A handle on the ledger file of one device."""

    def __init__(self, path: Path | str) -> None:
        """Attach to the ledger in ``path``; prefer ``Ledger.attach`` and ``Ledger.create``.

        Raises:
            LedgerError: There is no ledger, or one of another version.
        """
        self.path = str(path)
        _check_kind(Path(path))
        self._memory = map_file(path, _NUM_BYTES, is_new=False)
        magic, version, num_bytes = _HEADER.unpack_from(self._memory, 0)
        if (magic, version, num_bytes) != (_MAGIC, _VERSION, _NUM_BYTES):
            message = (
                f"{path} is no ROSE ledger of version {_VERSION} but of version {version}; "
                "end what uses it and delete it, then the executor of this version makes it anew"
            )
            raise LedgerError(message)
        self._arrivals = self._section(1, "<qd", "arrivals")
        self._pulse = self._section(2, "<d", "pulse")
        self._serving = self._section(3, "<qqq7d", "serving")
        self._rollout = self._section(4, "<ddqqddqdddqqqq", "rollout")
        self._budget = self._section(5, "<qdqd?q", "budget")
        self._usage = self._section(6, "<6d4q2dqq", "usage")

    def _section(self, index: int, layout: str, name: str) -> Section:
        return Section(self._memory, index, layout, f"section {name} of ledger {self.path}")

    @classmethod
    def attach(cls, path: Path | str) -> Ledger:
        """Open an existing ledger.

        Raises:
            LedgerError: There is no ledger, or one of another version.
        """
        return cls(path)

    @classmethod
    def create(cls, path: Path | str) -> Ledger:
        """Make a new ledger, replacing an older file, with no lease and a serving engine that never spoke.

        It is whole from the moment on at which it is at ``path``.

        Raises:
            LedgerError: The file cannot be made.
        """
        cls._make(path, os.replace)
        return cls(path)

    @classmethod
    def attach_or_create(cls, path: Path | str) -> Ledger:
        """Open the ledger, or make one where there is no file; of several that make one at a time all have the same.

        Raises:
            LedgerError: What is there is no ledger or one of another version, or the file cannot be made.
        """
        if not Path(path).exists():
            with contextlib.suppress(FileExistsError):
                cls._make(path, os.link)
        return cls(path)

    @classmethod
    def _make(cls, path: Path | str, place: Callable[[Path, Path | str], None]) -> None:
        """Write a ledger beside ``path`` and put it there."""
        made = Path(f"{path}.{secrets.token_hex(4)}.new")
        try:
            with map_file(made, _NUM_BYTES, is_new=True) as memory:
                _HEADER.pack_into(memory, 0, _MAGIC, _VERSION, _NUM_BYTES)
            ledger = cls(made)
            ledger.publish_arrivals(ArrivalState())
            ledger.beat(-math.inf)
            ledger.publish_serving(IDLE_SERVING)
            ledger.publish_rollout(RolloutState())
            ledger.publish_budget(Budget())
            ledger.publish_usage(UsageState())
            place(made, path)
        except FileExistsError:
            raise
        except OSError as error:
            message = f"cannot create ledger {path}: {error.strerror}; name a file that you may read and write"
            raise LedgerError(message) from error
        finally:
            made.unlink(missing_ok=True)

    def publish_arrivals(self, state: ArrivalState) -> None:
        """[SERVING, input thread] Note that a prompt came, before the step loop knows of it."""
        self._arrivals.write(state.num_arrived, state.last_arrival_s)

    def beat(self, now_s: float) -> None:
        """[SERVING, heartbeat thread] Say that the process is alive."""
        self._pulse.write(now_s)

    def publish_serving(self, state: ServingState) -> None:
        """[SERVING, step loop] Publish all but ``num_arrived`` and ``heartbeat_s``, which have their own sections."""
        self._serving.write(
            state.num_admitted,
            state.num_running,
            state.num_waiting,
            state.kv_used_bytes,
            state.kv_pool_bytes,
            state.oldest_arrival_s,
            state.last_step_end_s,
            state.deadline_s,
            state.next_decode_s,
            state.first_token_deadline_s,
        )

    def publish_rollout(self, state: RolloutState) -> None:
        """[ROLLOUT, step loop] Publish the rollout engine's state."""
        self._rollout.write(*_ROLLOUT_VALUES(state))

    def publish_usage(self, state: UsageState) -> None:
        """[SERVING, heartbeat thread] Publish the recent past."""
        self._usage.write(*_USAGE_VALUES(state))

    def publish_budget(self, budget: Budget) -> None:
        """[LENDER] Publish what is allowed on the device."""
        self._budget.write(
            _MODES.index(budget.mode),
            budget.kv_cap_bytes,
            budget.fencing_token,
            budget.expires_s,
            budget.is_granted,
            budget.holder,
        )

    def arrivals(self) -> ArrivalState:
        """Read serving's arrivals."""
        num_arrived, last_arrival_s = self._arrivals.read()
        return ArrivalState(num_arrived=int(num_arrived), last_arrival_s=last_arrival_s)

    def serving(self) -> ServingState:
        """Read serving's state. Arrivals are read last, so that no prompt is missed in between."""
        admitted, running, waiting, used, pool, oldest, end, deadline, decode, first_token = self._serving.read()
        return ServingState(
            num_admitted=int(admitted),
            num_running=int(running),
            num_waiting=int(waiting),
            kv_used_bytes=used,
            kv_pool_bytes=pool,
            oldest_arrival_s=oldest,
            last_step_end_s=end,
            deadline_s=deadline,
            next_decode_s=decode,
            first_token_deadline_s=first_token,
            heartbeat_s=self._pulse.read()[0],
            num_arrived=int(self._arrivals.read()[0]),
        )

    def rollout(self) -> RolloutState:
        """Read the rollout engine's state."""
        return RolloutState(**_named(_ROLLOUT_FIELDS, self._rollout.read()))

    def usage(self) -> UsageState:
        """Read serving's recent past."""
        return UsageState(**_named(_USAGE_FIELDS, self._usage.read()))

    def budget(self) -> Budget:
        """Read what the lender allows."""
        mode, cap, token, expires_s, is_granted, holder = self._budget.read()
        return Budget(
            mode=_MODES[int(mode)],
            kv_cap_bytes=cap,
            fencing_token=int(token),
            expires_s=expires_s,
            is_granted=bool(is_granted),
            holder=int(holder),
        )

    def as_dict(self) -> dict[str, Any]:
        """Return all sections as plain values; one that cannot be read is ``{"error": why}``."""
        sections: dict[str, Any] = {"path": self.path, "version": _VERSION}
        for name in ("arrivals", "serving", "usage", "rollout", "budget"):
            try:
                state = attrs.asdict(getattr(self, name)())
            except LedgerError as error:
                state = {"error": str(error)}
            sections[name] = {key: value.value if isinstance(value, Mode) else value for key, value in state.items()}
        return sections

    def describe(self) -> str:
        """Return the whole ledger as text, one section a paragraph; unreadable sections say so."""
        sections = self.as_dict()
        parts = [f"ledger {sections.pop('path')}, version {sections.pop('version')}"]
        for name, state in sections.items():
            lines = [f"  {field} = {_render(value)}" for field, value in state.items()]
            parts.append("\n".join([f"{name}:", *lines]))
        return "\n".join(parts)


def _named(names: tuple[str, ...], values: tuple[float, ...]) -> dict[str, Any]:
    return dict(zip(names, values, strict=True))


def _render(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
