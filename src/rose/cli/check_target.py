"""What ``rose check`` examines: an executor, an SGLang or an OpenAI-compatible server at a URL, or a backend that a TOML file names."""

from __future__ import annotations

import asyncio
import inspect
import os
import typing
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs

from rose import checks, registry
from rose.cli.stores import open_store
from rose.config import load
from rose.errors import ConfigError, EngineLeaseError, EngineLostError, RoseError
from rose.interfaces.serving import ServingEngine, SupportsStart
from rose.testing.conformance import Opener, SuiteConfig, Updater, opened_afresh
from rose.testing.updates import fake_update
from rose.types import EngineRequest, RequestId, Sampling, WeightUpdate, WeightVersion

if TYPE_CHECKING:
    from rose.backends.remote.client import HttpClient
    from rose.interfaces.transport import Transport

NUMBERS = "numbers"
"""The store of engines that take updates by their number alone, as fakes do."""

_OPENAI = "rose.backends.openai:OpenAiEngine"
_SGLANG = "rose.backends.sglang:SglangEngine"
_LEAST_STREAM_TOKENS = 16


@attrs.frozen(kw_only=True)
class EngineEntry:
    """The engine of a configuration.

    Attributes:
        backend: A registered name, such as ``vllm``, or ``module:Class``.
        options: What its constructor takes; those of the options class where it takes one, as ``vllm`` does.
        token_file: Where the bearer token is, for backends that take a ``token``.
        fencing_tokens: Of the lease on an executor's engine, one a device.
    """

    backend: str = attrs.field(validator=checks.text(r".+"))
    options: Mapping[str, Any] = attrs.field(factory=dict)
    token_file: Path | None = None
    fencing_tokens: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class CheckConfig:
    """The TOML file of ``rose check``.

    Attributes:
        engine: What is examined.
        suite: What the checks need to know of the model.
        weights: The store that updates come from, as ``rose export --transport`` takes it, or ``numbers``; nothing: none are sent.
    """

    engine: EngineEntry
    suite: SuiteConfig = attrs.field(factory=SuiteConfig)
    weights: str | None = None


async def config_of_url(
    url: str, *, model: str | None, vocab_size: int | None, token_file: Path | None, fencing_tokens: tuple[int, ...]
) -> CheckConfig:
    """Find out what listens at a URL; returns its configuration, with what it says of its model.

    Raises:
        ConfigError: The token cannot be read.
        EngineLostError: Nothing answers.
    """
    from rose.backends.openai import OpenAiEngine  # noqa: PLC0415 - needs aiohttp
    from rose.backends.remote.client import HttpClient  # noqa: PLC0415 - needs aiohttp

    token = None if token_file is None else registry.read_token(token_file)
    client = HttpClient(url, token=token)
    try:
        found = await _answer(client, "/v1/engine")
        info = await _answer(client, "/server_info")
    finally:
        await client.close()
    if isinstance(found, Mapping) and "abilities" in found:
        entry = EngineEntry(
            backend="remote", options={"url": url}, token_file=token_file, fencing_tokens=fencing_tokens
        )
        return CheckConfig(engine=entry)
    if isinstance(info, Mapping) and "internal_states" in info:
        return await _config_of_sglang(url, token=token, vocab_size=vocab_size, token_file=token_file)
    options = {"url": url, "model": model, "vocab_size": vocab_size}
    server = OpenAiEngine(url, model=model, token=token)
    try:
        max_model_len = await server.max_model_len()
    finally:
        await server.close()
    entry = EngineEntry(backend=_OPENAI, options=options, token_file=token_file)
    return CheckConfig(engine=entry, suite=SuiteConfig(max_model_len=max_model_len))


async def _answer(client: HttpClient, path: str) -> Any:
    """Return what is at a path, nothing where the server has no such path."""
    try:
        return await client.call("GET", path)
    except EngineLostError:
        raise
    except RoseError:
        return None


async def _config_of_sglang(
    url: str, *, token: str | None, vocab_size: int | None, token_file: Path | None
) -> CheckConfig:
    from rose.backends.sglang import SglangEngine  # noqa: PLC0415 - needs aiohttp

    server = SglangEngine(url, token=token, vocab_size=vocab_size)
    try:
        size, length = await server.vocab_size(), (await server.snapshot()).max_context_tokens
    finally:
        await server.close()
    entry = EngineEntry(backend=_SGLANG, options={"url": url, "vocab_size": size}, token_file=token_file)
    return CheckConfig(engine=entry, suite=SuiteConfig(vocab_size=size, max_model_len=length))


def fitted(suite: SuiteConfig) -> SuiteConfig:
    """Return a suite whose long streams fit into the model.

    Raises:
        ConfigError: None does.
    """
    if suite.max_model_len is None:
        return suite
    room = suite.max_model_len - len(suite.prompt) - 1
    if room < _LEAST_STREAM_TOKENS:
        message = (
            f"a model of {suite.max_model_len} tokens has no room for a prompt of {len(suite.prompt)} and an answer"
        )
        raise ConfigError(message)
    return attrs.evolve(suite, long_tokens=min(suite.long_tokens, room))


def make_engine(entry: EngineEntry) -> ServingEngine:
    """Make the engine that an entry names; it is not started.

    Raises:
        ConfigError: There is none of that name, or it does not take these options.
        BackendUnavailableError: A library that it needs is missing.
    """
    find = registry.load_class if ":" in entry.backend else registry.load
    backend = find("serving", entry.backend)
    options = dict(entry.options)
    if entry.token_file is not None:
        options["token"] = registry.read_token(entry.token_file)
    hints = _hints(backend)
    whole = next(
        (name for name, kind in hints.items() if isinstance(kind, type) and _is_options(backend, name, kind)), None
    )
    if whole is not None and whole not in options:
        fields = {field.name: field.type for field in attrs.fields(attrs.resolve_types(hints[whole]))}
        known = {"engine_id": "check"} if "engine_id" in fields else {}
        options = {whole: load(hints[whole], {**known, **_with_versions(options, fields)})}
    else:
        options = _with_versions(options, hints)
    engine = cast("ServingEngine", registry.construct("serving", entry.backend, backend, (), options))
    if entry.fencing_tokens:
        _set_lease(engine, entry.fencing_tokens)
    return engine


def _hints(backend: type) -> dict[str, Any]:
    """Return the types of the constructor's arguments; nothing where they cannot be told."""
    try:
        return typing.get_type_hints(getattr(backend, "__init__"))  # noqa: B009 - of the class, which has just this one
    except (AttributeError, NameError, TypeError):
        return {}


def _is_options(backend: type, name: str, kind: type) -> bool:
    parameter = inspect.signature(backend).parameters.get(name)
    return attrs.has(kind) and parameter is not None and parameter.default is parameter.empty


def _with_versions(options: Mapping[str, Any], kinds: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in which texts are weight versions wherever those are asked for."""

    def read(name: str, value: Any) -> Any:
        kind = kinds.get(name)
        is_version = kind is WeightVersion or WeightVersion in typing.get_args(kind)
        if not (is_version and isinstance(value, str)):
            return value
        try:
            return WeightVersion.parse(value)
        except ValueError as error:
            message = f"engine.options.{name}: {error}"
            raise ConfigError(message) from error

    return {name: read(name, value) for name, value in options.items()}


def _set_lease(engine: ServingEngine, fencing_tokens: tuple[int, ...]) -> None:
    from rose.backends.remote import RemoteEngine  # noqa: PLC0415 - needs aiohttp

    if not isinstance(engine, RemoteEngine):
        message = f"engine {engine.engine_id} takes no lease; only executors (`rose serve`) ask for one"
        raise ConfigError(message)
    engine.set_lease(*fencing_tokens)


@asynccontextmanager
async def opened(entry: EngineEntry) -> AsyncIterator[Opener]:
    """Give an opener: one engine for all checks where it has to be started, a new one for each elsewhere.

    Raises:
        RoseError: The engine does not serve at all: it is gone, or it asks for a lease.
    """
    make: Callable[[], ServingEngine] = lambda: make_engine(entry)  # noqa: E731 - the type is what is written down
    engine = make()
    try:
        if isinstance(engine, SupportsStart):
            await engine.start()
            await _look(engine)

            async def opener() -> ServingEngine:
                return engine

            yield opener
            return
        await _look(engine)
    finally:
        await engine.close()
    async with opened_afresh(make) as afresh:
        yield afresh


async def _look(engine: ServingEngine) -> None:
    """Read the engine and ask it for a token, so that what makes every check fail is told once."""
    await engine.snapshot()
    request = EngineRequest(
        request_id=RequestId("rose-check"), prompt_ids=(1, 2, 3), sampling=Sampling(max_tokens=1, temperature=0.0)
    )
    try:
        async for _ in engine.generate(request):
            pass
    except EngineLeaseError as error:
        message = f"{error}; name the lease's fencing token (--lease)"
        raise ConfigError(message) from error
    except EngineLostError:
        raise
    except Exception:  # noqa: BLE001, S110 - the checks will tell, one by one
        pass


@asynccontextmanager
async def weights_of(where: str | None) -> AsyncIterator[Updater | None]:
    """Give what makes updates for the engine, from the store at ``where``.

    Raises:
        ConfigError: There is no such store.
    """
    if where is None:
        yield None
    elif where == NUMBERS:
        yield _next_number
    else:
        transport = open_store(where, os.environ, option="--weights")
        try:
            yield lambda engine: _from_store(transport, engine)
        finally:
            transport.close()


async def _next_number(engine: ServingEngine) -> WeightUpdate:
    known = (await engine.snapshot()).weight_version
    return fake_update(WeightVersion("check", 0) if known is None else WeightVersion(known.run, known.n + 1))


async def _from_store(transport: Transport, engine: ServingEngine) -> WeightUpdate:
    """Plan an update to the newest version; from full weights where the engine has it already."""
    from rose.transfer.relay import plan_update  # noqa: PLC0415 - loads numpy

    known = (await engine.snapshot()).weight_version
    update = await asyncio.to_thread(plan_update, transport, known) or await asyncio.to_thread(
        plan_update, transport, None
    )
    if update is None:
        message = "nothing is published in the store of --weights; publish a version first"
        raise ConfigError(message)
    return update
