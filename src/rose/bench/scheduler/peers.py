"""Other programs in processes of their own: the fake engines, and the routers of other projects before them."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import attrs

from rose.bench.scheduler.http_engine import Answer
from rose.errors import BackendUnavailableError, EngineLostError
from rose.testing.ports import free_ports

_START_S = 60.0
_END_S = 5.0
_LOOK_S = 0.1
_OK = 200


@attrs.frozen(kw_only=True)
class Router:
    """A router of another project.

    Attributes:
        program: Its command.
        arguments: After the command: ``(port, port of its metrics, policy, engines)``.
        policies: Rules that are compared, the one that keeps prefixes where they are cached first.
    """

    program: str
    arguments: Callable[[int, int, str, Sequence[str]], Sequence[str]]
    policies: tuple[str, ...] = ("cache_aware", "round_robin")


def _vllm_router(port: int, metrics_port: int, policy: str, urls: Sequence[str]) -> list[str]:
    options = {"--port": str(port), "--prometheus-port": str(metrics_port), "--policy": policy, "--log-level": "error"}
    return [*_flat(options), "--worker-urls", *urls]


def _smg(port: int, metrics_port: int, policy: str, urls: Sequence[str]) -> list[str]:
    options = {"--port": str(port), "--prometheus-port": str(metrics_port), "--policy": policy, "--log-level": "error"}
    return ["launch", *_flat(options), "--backend", "vllm", "--worker-urls", *urls]


def _flat(options: Mapping[str, str]) -> list[str]:
    return ["--host", "127.0.0.1", *(part for option in options.items() for part in option)]


@attrs.frozen
class Started:
    """A program that serves: where, and its process."""

    url: str
    pid: int


ROUTERS: Mapping[str, Router] = {
    "vllm-router": Router(program="vllm-router", arguments=_vllm_router),
    "smg": Router(program="smg", arguments=_smg),
}


def find_router(name: str, folder: str | None) -> str:
    """Return the path of a router's program, from ``folder`` or the search path.

    Raises:
        BackendUnavailableError: It is not installed.
    """
    program = ROUTERS[name].program
    found = shutil.which(program, path=folder)
    if found is None:
        where = f"in {folder}" if folder else "on the search path"
        message = f"there is no {program} {where}; pip install {program} into an environment and give its bin folder (--peers)"
        raise BackendUnavailableError(message)
    return found


def router_versions(folder: str | None) -> dict[str, str]:
    """Return the versions of the routers that are installed, from the environments that they are in; ``unknown`` where these do not say."""
    versions = {}
    for name in ROUTERS:
        with contextlib.suppress(BackendUnavailableError):
            versions[name] = _version(Path(find_router(name, folder)).parent / "python", ROUTERS[name].program)
    return versions


def _version(python: Path, package: str) -> str:
    code = f"from importlib.metadata import version; print(version({package!r}))"
    try:
        asked = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


@contextlib.contextmanager
def running(command: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """Run a program whose input ends with the block; it is ended if it does not end by itself."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
        process.kill()
        process.communicate()


@contextlib.contextmanager
def http_engines(processes: Sequence[Sequence[Answer]]) -> Iterator[list[str]]:
    """Start processes of fake engines; gives the URLs of all engines.

    Raises:
        EngineLostError: A process ended.
    """
    urls: list[str] = []
    with contextlib.ExitStack() as stack:
        for answers in processes:
            told = json.dumps([attrs.asdict(answer) for answer in answers])
            command = [sys.executable, "-m", "rose.bench.scheduler.http_engine", told]
            urls += _first_line(stack.enter_context(running(command))).split()
        yield urls


@contextlib.contextmanager
def pool_host(urls: Sequence[str]) -> Iterator[Started]:
    """Run a pool over engines, and its service.

    Raises:
        EngineLostError: It ended.
    """
    with running([sys.executable, "-m", "rose.bench.scheduler.pool_host", *urls]) as process:
        yield Started(_first_line(process).strip(), process.pid)


def _first_line(process: subprocess.Popen[str]) -> str:
    """Return what a process printed first."""
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line.strip():
        message = f"{' '.join(map(str, process.args[:3]))} ended before it served"  # type: ignore[index]
        raise EngineLostError(message)
    return line


@contextlib.contextmanager
def router(path: str, name: str, policy: str, urls: Sequence[str]) -> Iterator[Started]:
    """Run a router before engines; gives it once it is ready.

    Raises:
        EngineLostError: It does not come up.
    """
    port, metrics_port = free_ports(2)
    url = f"http://127.0.0.1:{port}"
    with running([path, *ROUTERS[name].arguments(port, metrics_port, policy, urls)]) as process:
        _wait_until_up(url, process, name)
        yield Started(url, process.pid)


def _wait_until_up(url: str, process: subprocess.Popen[str], name: str) -> None:
    limit_s = time.monotonic() + _START_S
    while time.monotonic() < limit_s and process.poll() is None:
        if _is_ready(url):
            return
        time.sleep(_LOOK_S)
    message = f"{name} did not serve at {url} within {_START_S:g} s"
    raise EngineLostError(message)


def _is_ready(url: str) -> bool:
    """Ask a router; this one's URL was made here."""
    try:
        with urllib.request.urlopen(f"{url}/readiness", timeout=1.0) as answer:  # noqa: S310
            return bool(answer.status == _OK)
    except OSError:
        return False
