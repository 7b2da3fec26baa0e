"""``python -m rose_openrlhf``: check, replace one function, and run OpenRLHF's own command, unchanged.

The life of a launch, all in the driver:

1. Read ``--rose.*``; look at the installed OpenRLHF, at its flags, and at the pool. A reason against the job is one line and exit code 2.
2. Make OpenRLHF importable here (``rose_openrlhf.workers``), and have ``ray.init`` do the same in every worker by Ray's setup hook.
3. Put ``EngineMaker.create`` where ``create_vllm_engines`` was, and run ``openrlhf.cli.train_ppo_ray`` with the remaining flags.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rose.errors import ConfigError, RoseError, TransportError
from rose.frameworks import PoolPlace
from rose_openrlhf import workers
from rose_openrlhf.engines import EngineMaker
from rose_openrlhf.flags import Options, check_job, parser, read_job, read_options
from rose_openrlhf.versions import check_signature, check_version

COMMAND = "openrlhf.cli.train_ppo_ray"
_logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run a job; returns the exit code, 2 for one that was not started."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)-8s %(name)s: %(message)s")
    try:
        rest = prepare(arguments)
    except RoseError as error:
        print(f"rose_openrlhf: {error}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    sys.argv = [COMMAND, *rest]
    runpy.run_module(COMMAND, run_name="__main__", alter_sys=True)
    return 0


def prepare(arguments: Sequence[str]) -> list[str]:
    """Do everything before OpenRLHF's command; returns its arguments.

    Raises:
        RoseError: The job cannot be started; says why and what to do.
    """
    options, rest = read_options(arguments)
    version = check_version()
    if {"-h", "--help"} & set(rest):
        parser().print_help()
        workers.set_up()
        return rest
    job, place = read_job(rest), PoolPlace.of(options.pool, options.pool_token_file, option="--rose.pool")
    os.environ[workers.VLLM_VARIABLE] = options.vllm
    setup = workers.set_up()
    check_job(job, options, has_flash_attn=not setup.flash_attn)
    check_pool(look_at(place))
    _tell(setup, version, place)
    _replace(EngineMaker(place=place, options=options, job=job, has_vllm=not setup.vllm), options)
    return rest


def look_at(place: PoolPlace) -> Mapping[str, Any]:
    """Return what a pool says of itself.

    Raises:
        RoseError: It cannot be reached, does not let this job in, or is no pool.
    """
    try:
        return place.check()
    except TransportError:
        raise
    except ConfigError as error:
        message = f"the pool at {place.url} does not let this job in: {error}; its token goes into the file that --rose.pool_token_file (or ROSE_POOL_TOKEN_FILE) names"
        raise ConfigError(message) from error
    except RoseError as error:
        message = (
            f"--rose.pool {place.url} does not answer as a pool does: {error}; give the address that `rose pool` prints"
        )
        raise ConfigError(message) from error


def check_pool(status: Mapping[str, Any]) -> None:
    """Check what a pool says of itself.

    Raises:
        ConfigError: It has no engine.
    """
    if not status.get("snapshot", {}).get("engines"):
        message = "the pool has no engines; look at its job file"
        raise ConfigError(message)


def _tell(setup: workers.Setup, version: str, place: PoolPlace) -> None:
    _logger.info("OpenRLHF %s over the pool at %s", version, place.url)
    if setup.vllm:
        _logger.info(
            "vLLM runs in the pool's engines only: OpenRLHF gets a stand-in for the names that it imports, weights cross through host memory"
        )
    if setup.flash_attn:
        _logger.info("flash_attn is not installed: OpenRLHF gets a stand-in that refuses to be called")


def _replace(maker: EngineMaker, options: Options) -> None:
    import ray  # noqa: PLC0415 - the framework's

    ray.init = with_setup(ray.init, options)
    package: Any = importlib.import_module("openrlhf.trainer.ray")
    check_signature(package.create_vllm_engines)
    package.create_vllm_engines = maker.create


def with_setup(init: Callable[..., Any], options: Options) -> Callable[..., Any]:
    """Return ``ray.init`` with the setup hook of the workers in its runtime environment."""

    @functools.wraps(init)
    def begin(*args: Any, runtime_env: Mapping[str, Any] | None = None, **named: Any) -> Any:
        environment = dict(runtime_env or {})
        variables = {**environment.get("env_vars", {}), workers.VLLM_VARIABLE: options.vllm}
        environment.update(env_vars=variables, worker_process_setup_hook=workers.SETUP_HOOK)
        return init(*args, runtime_env=environment, **named)

    return begin
