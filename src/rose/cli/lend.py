"""``rose lend``: the lender of a serving cluster's devices, and what serving tells it."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import sys
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import attrs
from rich.console import Console
from rich.table import Table

from rose import config as configuration
from rose.cli.parsers import add_parser
from rose.cli.signals import told_by_signals
from rose.coserving.lease_sqlite import AuditReader
from rose.coserving.lease_store import Switch, SwitchKind
from rose.coserving.lender_audit import check_audit
from rose.errors import BackendUnavailableError, ConfigError, TransportError
from rose.policies.admission import Mode
from rose.policies.lending import Lease
from rose.types import DeviceId

if TYPE_CHECKING:
    from rose.hosts.http.lender_config import LenderConfig

_TOKEN_VARIABLE = "ROSE_LENDER_TOKEN"  # noqa: S105 - the name of a variable
_POLL_S = 0.05
_UNUSABLE = "closed: unusable ledger"
_ACTIONS = ("serve", "status", "kill", "allow", "revoke", "mode")

_DESCRIPTION = """\
Lend the devices of a serving cluster to rollout jobs, as CONFIG says, until SIGTERM or Ctrl-C; prints one JSON line with the address.
Leases outlive the process: the next one takes them over. Other actions talk to the running lender; kill, allow, revoke and mode also
work without one, in the state file and in the ledgers.
"""

_EXAMPLES = f"""\
examples:
  rose lend lender.toml --check            read the configuration and open nothing
  rose lend lender.toml                    lend
  rose lend lender.toml status             what is lent to whom
  rose lend lender.toml kill --reason "incident 17"        everything, at once
  rose lend lender.toml kill --device gpu3
  rose lend lender.toml allow              lift every kill switch
  rose lend lender.toml revoke --device gpu3 --grace 10
  rose lend lender.toml mode --mode quiet  how much of serving's slack is lent, on all devices
  rose lend lender.toml --audit            who had what, and what it cost serving
  printf %s "$TOKEN" | sha256sum           the digest of a token, for [[tokens]]

A smallest CONFIG:
  state = "lender.sqlite"
  [devices.gpu0]
  ledger = "/dev/shm/rose/gpu0.ledger"

Where CONFIG has tokens, one with access "control" is read from --token-file or from {_TOKEN_VARIABLE}.

"""


def add_command(commands: Any, *, epilog: str) -> None:
    """Add ``lend`` to the command line."""
    parser = add_parser(
        commands,
        "lend",
        summary="lend a serving cluster's devices to rollout jobs",
        description=_DESCRIPTION,
        epilog=_EXAMPLES + epilog,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG", help="TOML file")
    parser.add_argument(
        "action", nargs="?", choices=_ACTIONS, default="serve", metavar="ACTION", help=f"one of {', '.join(_ACTIONS)}"
    )
    parser.add_argument("--check", action="store_true", help="read CONFIG and say what is wrong with it")
    parser.add_argument(
        "--audit", action="store_true", help="print what was lent, and prove that nothing was lent twice"
    )
    parser.add_argument("--json", action="store_true", help="with --audit or an action: one JSON object")
    parser.add_argument("--device", metavar="NAME", help="with kill, allow, revoke: this device alone")
    parser.add_argument("--model", metavar="NAME", help="with kill, allow: this model alone, serving's or a job's")
    parser.add_argument(
        "--grace", type=float, default=0.0, metavar="S", help="with revoke: let jobs finish for so long"
    )
    parser.add_argument("--mode", metavar="NAME", help=f"with mode: {', '.join(mode.value for mode in Mode)}")
    parser.add_argument("--reason", default="", metavar="TEXT", help="for the audit ledger")
    parser.add_argument("--url", metavar="URL", help="of the running lender; where CONFIG listens unless given")
    parser.add_argument("--token-file", type=Path, metavar="FILE", help=f"the token; else it is in {_TOKEN_VARIABLE}")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    try:
        from rose.hosts.http.lender_config import LenderConfig  # noqa: PLC0415 - loads aiohttp
    except ImportError as error:
        message = f"rose lend needs {error.name}: pip install 'rose-rl[http]'"
        raise BackendUnavailableError(message) from error
    config = configuration.load(LenderConfig, arguments.config)
    _check_options(arguments)
    _check_listen(config, arguments.config)
    if arguments.check:
        _check(config, arguments.config)
    elif arguments.audit:
        _audit(config, is_json=arguments.json)
    elif arguments.action == "serve":
        with told_by_signals() as stopped:
            asyncio.run(_serve(config, stopped))
    else:
        _act(config, arguments)
    return 0


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.action != "serve" and (arguments.check or arguments.audit):
        option = "--check" if arguments.check else "--audit"
        message = f"{option} does nothing but look, so {arguments.action} would not be done; give one of them"
        raise ConfigError(message)
    if arguments.device is not None and arguments.model is not None:
        message = "--device and --model exclude each other; give one"
        raise ConfigError(message)
    if not arguments.grace >= 0:
        message = f"--grace must be >= 0, got {arguments.grace:g}"
        raise ConfigError(message)
    if (arguments.action == "mode") is not (arguments.mode in {mode.value for mode in Mode}):
        message = f"mode needs --mode NAME, one of {', '.join(mode.value for mode in Mode)}, and --mode needs mode"
        raise ConfigError(message)
    given = {"--device": arguments.device, "--model": arguments.model, "--grace": arguments.grace or None}
    allowed = {"kill": ("--device", "--model"), "allow": ("--device", "--model"), "revoke": ("--device", "--grace")}
    wrong = [
        name for name, value in given.items() if value is not None and name not in allowed.get(arguments.action, ())
    ]
    if wrong:
        message = f"{' and '.join(wrong)} say nothing with {arguments.action}; see rose lend --help"
        raise ConfigError(message)


def _check_listen(config: LenderConfig, path: Path) -> None:
    from rose.hosts.http.server import bind, parse_place  # noqa: PLC0415 - loads aiohttp

    try:
        place = parse_place(config.listen)
        if not place.is_loopback:
            bind(attrs.evolve(place, ports=(0,)), config.tokens).close()
    except (ConfigError, TransportError) as error:
        message = f"{path}: listen: {error}"
        raise ConfigError(message) from error


def _check(config: LenderConfig, path: Path) -> None:
    from rose.hosts.http.lender_config import place_problems  # noqa: PLC0415 - loads aiohttp

    if problems := place_problems(config):
        raise ConfigError("\n".join(f"{path}: {problem}" for problem in problems))
    unknown = sorted(set(config.lending.jobs) - {token.name for token in config.tokens}) if config.tokens else []
    if unknown:
        message = f"{path}: lending.jobs names {', '.join(unknown)}, for which there is no token; add [[tokens]]"
        raise ConfigError(message)
    print(f"{path}: {len(config.devices)} devices, {len(config.tokens)} tokens, at {config.listen}")  # noqa: T201
    _tell_lacking(config, sys.stdout)


def _tell_lacking(config: LenderConfig, out: TextIO) -> None:
    """Tell of what is no mistake, and will be missed."""
    if config.tokens and not any(token.access.value == "control" for token in config.tokens):
        print(
            'no token has access "control": without one nobody can throw a kill switch while the lender runs', file=out
        )
    missing = sorted(name for name, device in config.devices.items() if not device.ledger.exists())
    if missing:
        print(f"not lent before their executors make their ledgers: {', '.join(missing)}", file=out)


async def _serve(config: LenderConfig, stopped: threading.Event) -> None:
    from rose.hosts.http.lender import serve_lender  # noqa: PLC0415 - loads aiohttp

    async with serve_lender(config) as url:
        sys.stdout.write(json.dumps({"url": url, "pid": os.getpid(), "num_devices": len(config.devices)}) + "\n")
        sys.stdout.flush()
        _tell_lacking(config, sys.stderr)
        while not stopped.is_set():  # noqa: ASYNC110 - a signal sets it
            await asyncio.sleep(_POLL_S)


def _audit(config: LenderConfig, *, is_json: bool) -> None:
    with AuditReader(config.state) as reader:
        totals = reader.totals()
        if is_json:
            entries = list(reader.entries())
            shown = {"entries": [attrs.asdict(entry) for entry in entries], "totals": totals}
            print(json.dumps(shown | {"problems": check_audit(entries)}))  # noqa: T201 - this is the command line
            return
        num_entries = itertools.count()
        problems = check_audit(entry for entry, _ in zip(reader.entries(), num_entries, strict=False))
    heads = ("tenant", "job", "leases", "lent s", "rollout s", "requests", "broken", "debt s", "delay s")
    table = Table(*heads, box=None, pad_edge=False, header_style="dim")
    for row in totals:
        table.add_row(*_cells(row.values()))
    console = Console(highlight=False, soft_wrap=True, markup=False)
    console.print(table)
    for problem in problems:
        console.print(problem)
    verdict = f"{len(problems)} contradictions" if problems else "no device ever had two holders"
    console.print(f"{next(num_entries)} entries: {verdict}")


def _cells(values: Iterator[Any] | Any) -> Sequence[str]:
    return [f"{value:,.3f}" if isinstance(value, float) else str(value) for value in values]


def _act(config: LenderConfig, arguments: argparse.Namespace) -> None:
    """Do what serving wants: by the running lender or, where none runs, without it."""
    switch = Switch()
    if arguments.device is not None:
        switch = Switch(SwitchKind.DEVICE, arguments.device)
        if arguments.device not in config.devices:
            message = f"--device {arguments.device}: known are {', '.join(config.devices)}"
            raise ConfigError(message)
    elif arguments.model is not None:
        switch = Switch(SwitchKind.MODEL, arguments.model)
        _warn_of_unknown(config, arguments.model)
    arguments.reason = arguments.reason.encode(errors="backslashreplace").decode()  # of a shell in another encoding
    body: dict[str, Any] = {"reason": arguments.reason}
    path = "/v1/switch"
    if arguments.action == "revoke":
        path, body = "/v1/revoke", body | {"device_id": arguments.device, "grace_s": arguments.grace}
    elif arguments.action == "mode":
        path, body = "/v1/mode", {"mode": arguments.mode}
    elif arguments.action != "status":
        is_thrown = arguments.action == "kill"
        is_every = not is_thrown and switch == Switch()
        body |= {"is_thrown": is_thrown, "kind": switch.kind.value, "name": switch.name, "every": is_every}
    try:
        answer = _asked(config, arguments, path, body)
    except TransportError as error:
        if arguments.action == "status":
            message = f"no lender answers at {_url(config, arguments.url)}; start it with: rose lend {arguments.config}"
            raise TransportError(message) from error
        answer = _done_without(config, arguments, switch, error)
    _show(answer, arguments.action, is_json=arguments.json)


def _warn_of_unknown(config: LenderConfig, model: str) -> None:
    devices = config.devices.values()
    known = {name for device in devices for name in (*(device.models or ()), device.serving_model) if name is not None}
    if model not in known:
        names = ", ".join(sorted(known)) or "none"
        sys.stderr.write(
            f"warning: no device names the model {model!r} in its models or serving_model; named: {names}\n"
        )


def _asked(config: LenderConfig, arguments: argparse.Namespace, path: str, body: Mapping[str, Any]) -> Any:
    from rose.backends.remote.client import HttpClient  # noqa: PLC0415 - loads aiohttp

    client = HttpClient(_url(config, arguments.url), token=_token(arguments.token_file), unreachable=TransportError)
    call = ("GET", "/v1/devices") if arguments.action == "status" else ("POST", path, body)
    try:
        return asyncio.run(_closing(client.close, lambda: client.call(*call)))
    except ConfigError as error:
        if "token" not in str(error):
            raise
        message = f"{error}; the token is taken from --token-file, or from {_TOKEN_VARIABLE}"
        raise ConfigError(message) from error


async def _closing(close: Callable[[], Awaitable[None]], call: Callable[[], Awaitable[Any]]) -> Any:
    try:
        return await call()
    finally:
        await close()


def _done_without(
    config: LenderConfig, arguments: argparse.Namespace, switch: Switch, error: TransportError
) -> dict[str, Any]:
    """Do it while no lender runs; one that runs and does not answer keeps the lock, and is told of. Answers as the service does."""
    from rose.hosts.http.lender_config import NO_LEDGER, open_lender  # noqa: PLC0415 - loads aiohttp

    who, reason = "serving, without a running lender", arguments.reason
    changed: Sequence[Lease] = ()
    try:
        with open_lender(config) as opened:
            lender = opened.lender
            if arguments.action == "kill":
                changed = lender.stop(switch, who=who, reason=reason)
            elif arguments.action == "allow":
                lender.allow(None if switch == Switch() else switch, who=who, reason=reason)
            elif arguments.action == "mode":
                lender.set_mode(Mode(arguments.mode), who=who)
            else:
                device_id = None if arguments.device is None else DeviceId(arguments.device)
                changed = lender.revoke(device_id, grace_s=arguments.grace, who=who, reason=reason)
            mode, switches = lender.mode, sorted(lender.switches, key=str)
            problems = {name: ledger.problem for name, ledger in opened.ledgers.items()}
    except ConfigError as locked:
        message = f"{error}\n{locked}"
        raise ConfigError(message) from error
    for name, problem in problems.items():
        if problem not in ("", NO_LEDGER):
            sys.stderr.write(f"warning: {name}: its ledger could not be told: {problem}\n")
    if not arguments.json:
        print("no lender runs; done in the state file and the ledgers")  # noqa: T201 - this is the command line
    if arguments.action == "mode":
        return {"mode": mode.value}
    leases = [{"lease_id": lease.lease_id, "job": lease.job, "device_id": lease.device_id} for lease in changed]
    if arguments.action == "revoke":
        return {"leases": leases}
    return {"switches": [{"kind": each.kind.value, "name": each.name} for each in switches], "leases": leases}


def _show(answer: Mapping[str, Any], action: str, *, is_json: bool) -> None:
    if is_json:
        print(json.dumps(answer))  # noqa: T201 - this is the command line
        return
    if action == "status":
        table = Table(
            "device", "KV use", "state", "job", "left s", "token", box=None, pad_edge=False, header_style="dim"
        )
        for row in answer["devices"]:
            lease, use = row["lease"], row["kv_use_fraction"]
            state = _state(row)
            if lease is not None:
                state = "asked back" if lease["is_revoking"] else "lent"
            left = "" if lease is None else f"{lease['expires_in_s']:.1f}"
            kv = "?" if use is None else f"{use:.2f}"
            table.add_row(
                row["device_id"], kv, state, "" if lease is None else lease["job"], left, str(row["fencing_token"])
            )
        Console(highlight=False, markup=False, soft_wrap=True).print(table)
        for row in answer["devices"]:
            if _state(row) == _UNUSABLE:
                print(f"{row['device_id']}: {row['closed_because']}")  # noqa: T201 - this is the command line
    if "mode" in answer:
        print(f"mode: {answer['mode']}")  # noqa: T201 - this is the command line
    if "leases" in answer and action != "allow":
        print(f"{len(answer['leases'])} leases {'asked back or ended' if action == 'revoke' else 'ended'}")  # noqa: T201
    if "switches" in answer:
        thrown = ", ".join(f"{row['kind']} {row['name']}".rstrip() for row in answer["switches"])
        print(f"kill switches: {thrown or 'none thrown'}")  # noqa: T201


def _state(row: Mapping[str, Any]) -> str:
    from rose.hosts.http.lender_config import NO_LEDGER  # noqa: PLC0415 - loads aiohttp

    reason: str = row["closed_because"]
    if not row["has_ledger"] and reason != NO_LEDGER:
        return _UNUSABLE
    return f"closed: {reason}" if reason else "free"


def _url(config: LenderConfig, given: str | None) -> str:
    from rose.hosts.http.server import parse_place  # noqa: PLC0415 - loads aiohttp

    if given is not None:
        return given
    place = parse_place(config.listen)
    if len(place.ports) != 1 or place.ports[0] == 0:
        message = f"listen = {config.listen!r} does not say which port the lender took; give --url"
        raise ConfigError(message)
    return f"http://[{place.host}]:{place.ports[0]}" if ":" in place.host else f"http://{place.host}:{place.ports[0]}"


def _token(path: Path | None) -> str | None:
    if path is None:
        return os.environ.get(_TOKEN_VARIABLE) or None
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError as error:
        message = f"cannot read the token from {path}: {error.strerror}; give its file"
        raise ConfigError(message) from error
