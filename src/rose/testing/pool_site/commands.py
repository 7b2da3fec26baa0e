"""What a site does on command: one JSON object in, one out. What goes wrong is an answer too."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from rose.errors import ConfigError, DeadlineExceededError, EngineError, EngineLostError, LedgerError, RoseError
from rose.policies.routing import EngineState
from rose.testing.pool_site.faults import FAULTS
from rose.testing.pool_site.live import LiveSite, address_of
from rose.testing.pool_site.sums import published_sums
from rose.types import EngineId, WeightVersion

_ANSWER_S = 60.0
_GRACE_S = 5.0
_LEAVE_S = 10.0
_POLL_S = 0.02
Answer = dict[str, Any]


class Commands:
    """Carries commands out, one after the other."""

    def __init__(self, site: LiveSite) -> None:
        self._site = site
        self._known: Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Answer]]] = {
            "status": self._status,
            "store": self._store,
            "kill": self._signal,
            "stop": self._signal,
            "cont": self._signal,
            **dict.fromkeys(FAULTS, self._fault),
            "lend": self._lend,
            "sums": self._sums,
            "expected": self._expected,
        }

    async def answer(self, command: Any) -> Answer:
        """Do what a command asks for; returns its answer, which has ``ok``, or ``error`` with what was wrong."""
        try:
            name = command.get("do") if isinstance(command, dict) else None
            if not isinstance(name, str) or name not in self._known:
                message = f"a command is a JSON object whose do is one of {', '.join(self._known)}, not {name!r:.60}"
                raise ConfigError(message)
            async with asyncio.timeout(_ANSWER_S):
                return {"ok": True, **await self._known[name](command)}
        except TimeoutError as error:
            return {"error": str(error) or f"no answer within {_ANSWER_S:g} s"}
        except (RoseError, OSError) as error:
            return {"error": str(error)}

    def ready(self) -> Answer:
        """Return what is said once all is up."""
        site = self._site
        engines = {name: {"pid": site.pid(name), "kind": self._kind(name)} for name in site.switches}
        return {
            "url": site.url,
            "pid": os.getpid(),
            "start_s": round(site.start_s, 2),
            "engines": engines,
            "store": address_of(site.store),
        }

    # Looking.

    async def _status(self, _: Mapping[str, Any]) -> Answer:
        site = self._site
        snapshot = site.pool.snapshot()
        views = {view.engine_id: view for view in snapshot.engines}
        accounts = site.pool.accounts()
        engines = {}
        for name, switches in site.switches.items():
            view, account = views.get(EngineId(name)), accounts.get(EngineId(name))
            engines[name] = {
                "pid": self._pid_if_any(name),
                "kind": self._kind(name),
                "state": "away" if view is None else view.state.value,
                "version": None if view is None or view.version is None else str(view.version),
                "num_in_flight": 0 if view is None else view.num_in_flight,
                "num_tokens": 0 if account is None else account.num_tokens,
                "faults": switches.names,
            }
        version = None if snapshot.version is None else str(snapshot.version)
        return {
            "url": site.url,
            "version": version,
            "num_live_turns": snapshot.num_live_turns,
            "engines": engines,
            "devices": await self._devices(),
        }

    async def _devices(self) -> Answer:
        """Return whether each device is lent now, and why it cannot be."""
        if self._site.lender is None:
            return {}
        answer = await self._site.lender.call("GET", "/v1/devices")
        return {
            row["device_id"]: {"is_lent": row["lease"] is not None, "closed_because": row["closed_because"]}
            for row in answer["devices"]
        }

    async def _store(self, _: Mapping[str, Any]) -> Answer:
        return {"store": address_of(self._site.store), "layouts": [self._site.layout.to_json()]}

    async def _sums(self, command: Mapping[str, Any]) -> Answer:
        engine = self._site.engine(self._name(command))
        reading = await engine.snapshot()
        return {"sums": dict(await engine.weight_checksums()), "version": _text(reading.weight_version)}

    async def _expected(self, command: Mapping[str, Any]) -> Answer:
        given = command.get("version")
        try:
            wanted = None if given is None else WeightVersion.parse(given)
        except (ValueError, TypeError, AttributeError) as error:
            message = f"version is run:n, not {given!r:.60}: {error}"
            raise ConfigError(message) from error
        with tempfile.TemporaryDirectory(dir=self._site.reaper.folder) as folder:
            version, sums = await asyncio.to_thread(
                published_sums, self._site.store, Path(folder) / "out", self._site.layout, wanted
            )
        return {"sums": sums, "version": str(version)}

    # Faults.

    async def _signal(self, command: Mapping[str, Any]) -> Answer:
        name, what = self._name(command), command["do"]
        pid = self._pid_if_any(name)
        if pid is None:
            message = f"engine {name} has no process now"
            raise EngineLostError(message)
        self._site.reaper.name(pid)  # one that was started anew, and one that is stopped, would not end by itself
        numbers = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP, "cont": signal.SIGCONT}
        os.kill(pid, numbers[what])
        if what == "stop":
            self._site.stopped.add(pid)
        else:
            self._site.stopped.discard(pid)
        return {"pid": pid}

    async def _fault(self, command: Mapping[str, Any]) -> Answer:
        name = self._name(command)
        switches = self._site.switches[name]
        setattr(switches, command["do"], _is_on(command))
        return {"faults": switches.names}

    async def _lend(self, command: Mapping[str, Any]) -> Answer:
        """Take all devices back, with a grace, and lend none; or lend them again."""
        is_on, grace_s = _is_on(command), command.get("grace_s", _GRACE_S)
        if isinstance(grace_s, bool) or not isinstance(grace_s, int | float) or not 0 <= grace_s <= _ANSWER_S / 2:
            message = f"grace_s is a number of seconds up to {_ANSWER_S / 2:g}, not {grace_s!r:.60}"
            raise ConfigError(message)
        lender = self._site.lender
        if lender is None:
            message = "nothing is borrowed here; start the site with --borrowed 1 or more"
            raise ConfigError(message)
        reason = {"reason": "a test asks for it"}
        if not is_on and grace_s:
            await lender.call("POST", "/v1/revoke", {"grace_s": grace_s, **reason})
            await _until(self._is_all_back, grace_s)
        await lender.call("POST", "/v1/switch", {"is_thrown": not is_on, **reason})
        if not is_on and not await _until(self._are_all_away, _LEAVE_S):
            message = f"borrowed engines did not leave the pool within {_LEAVE_S:g} s"
            raise DeadlineExceededError(message)
        return {}

    async def _is_all_back(self) -> bool:
        return not any(device["is_lent"] for device in (await self._devices()).values())

    async def _are_all_away(self) -> bool:
        states = {self._site.pool.state_of(EngineId(name)) for name in self._site.lent}
        return states <= {None, EngineState.LOST}

    # What commands name.

    def _name(self, command: Mapping[str, Any]) -> str:
        name = command.get("engine")
        if not isinstance(name, str) or name not in self._site.switches:
            message = f"engine is one of {', '.join(self._site.switches)}, not {name!r:.60}"
            raise ConfigError(message)
        return name

    def _kind(self, name: str) -> str:
        return "dedicated" if name in self._site.own else "borrowed"

    def _pid_if_any(self, name: str) -> int | None:
        try:
            return self._site.pid(name)
        except (EngineError, LedgerError):
            return None


async def _until(condition: Callable[[], Awaitable[bool]], timeout_s: float) -> bool:
    """Ask until the answer is yes; returns whether it was in time."""
    give_up_s = time.monotonic() + timeout_s
    while not (is_met := await condition()) and time.monotonic() < give_up_s:  # noqa: ASYNC110 - of other processes
        await asyncio.sleep(_POLL_S)
    return is_met


def _is_on(command: Mapping[str, Any]) -> bool:
    is_on = command.get("on", True)
    if not isinstance(is_on, bool):
        message = f"on is true or false, not {is_on!r:.60}"
        raise ConfigError(message)
    return is_on


def _text(version: WeightVersion | None) -> str | None:
    return None if version is None else str(version)
