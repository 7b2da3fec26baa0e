"""The engine contract as a kit: every check of ``EngineContract`` on a given engine, with a verdict and no pytest.

Invariants: one check, one verdict; what a check finds never ends the kit, unless the engine is gone, after which nothing more is tried;
a check that cannot be made says why. The checks are those of the contract suite and are written nowhere else.
"""

from __future__ import annotations

import asyncio
import enum
import unittest
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress

import attrs

from rose import checks
from rose.errors import ConfigError, EngineLostError, RoseError
from rose.interfaces.serving import ServingEngine
from rose.testing.assertions import told, waited_at
from rose.testing.contracts.engine import EngineContract
from rose.testing.contracts.verdicts import cannot
from rose.types import WeightUpdate

Opener = Callable[[], Awaitable[ServingEngine]]
Updater = Callable[[ServingEngine], Awaitable[WeightUpdate]]

_PREFIX = "test_"


class Verdict(enum.Enum):
    """What a check found."""

    PASS = "pass"  # noqa: S105 - no password
    FAIL = "fail"
    CANNOT = "cannot"


@attrs.frozen(kw_only=True)
class Finding:
    """The verdict of one check.

    Attributes:
        check: The check's name, such as ``abort_keeps_the_tokens``.
        verdict: What it found.
        why: What was seen of a failure, or why the check cannot be made; empty for a pass.
        advice: What the engine must do and where to look, as the contract puts it.
    """

    check: str
    verdict: Verdict
    why: str
    advice: str


@attrs.frozen(kw_only=True)
class SuiteConfig:
    """What the checks need to know of the model.

    Attributes:
        prompt: Token ids that the model takes.
        vocab_size: Ids from here on must be refused; nothing: not known, none are tried, for an unknown id ends some servers.
        max_model_len: Longest prompt and answer together, in tokens; nothing: not known, over-long prompts are not tried.
        long_tokens: Length of the streams that checks interrupt: long enough still to run a few milliseconds later.
        quiet_s: How long to watch that no token comes.
        timeout_s: Bound of one check.
        burst: Requests that are sent at once.
        is_batch_invariant: Whether greedy tokens are the same whatever else is in the batch.
        is_continuable: Whether greedy tokens are the same when those before them come as prompt, to the last bit of rounding.
    """

    prompt: tuple[int, ...] = attrs.field(default=(1, 2, 3, 4, 5), validator=checks.token_ids(5))
    vocab_size: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(2)))
    max_model_len: int | None = attrs.field(default=None, validator=checks.optional(checks.integer(32)))
    long_tokens: int = attrs.field(default=256, validator=checks.integer(16))
    quiet_s: float = attrs.field(default=0.1, validator=checks.number(above=0))
    timeout_s: float = attrs.field(default=60.0, validator=checks.number(above=0))
    burst: int = attrs.field(default=32, validator=checks.integer(2))
    is_batch_invariant: bool = attrs.field(default=True, validator=checks.boolean())
    is_continuable: bool = attrs.field(default=True, validator=checks.boolean())


class _Suite(EngineContract):
    """The contract on an engine that a function opens."""

    def __init__(self, config: SuiteConfig, opener: Opener, updater: Updater | None) -> None:
        self.valid_prompt, self.vocab_size, self.max_model_len = config.prompt, config.vocab_size, config.max_model_len
        self.long_tokens, self.quiet_s, self.timeout_s = config.long_tokens, config.quiet_s, config.timeout_s
        self.num_burst = config.burst
        self.is_batch_invariant, self.is_continuable = config.is_batch_invariant, config.is_continuable
        self._opener, self._updater = opener, updater

    async def make_engine(self) -> ServingEngine:
        return await self._opener()

    async def release_engine(self, engine: ServingEngine) -> None:
        """Leave the engine running for the next check; whoever opened it closes it."""
        with suppress(RoseError):
            await engine.resume()

    async def make_update(self, engine: ServingEngine) -> WeightUpdate:
        if self._updater is None:
            cannot("there are no new weights to send: name a store (--weights)")
        return await self._updater(engine)


def check_names() -> tuple[str, ...]:
    """Return the names of all checks, in the order in which they are made: those of the contract, then weight updates."""
    found: dict[str, None] = {}
    for kind in EngineContract.__mro__:
        found |= dict.fromkeys(name.removeprefix(_PREFIX) for name in vars(kind) if name.startswith(_PREFIX))
    return tuple(found)


async def examine(
    opener: Opener,
    config: SuiteConfig,
    *,
    updater: Updater | None = None,
    only: Sequence[str] | None = None,
) -> AsyncIterator[Finding]:
    """Make the checks one after the other; gives each one's finding as it comes.

    Args:
        opener: Gives the engine for one check: a new one, or the same each time.
        config: What the checks need to know.
        updater: Gives an update to a version after the engine's own; without it weight updates are not checked.
        only: Names of checks; all when left out.

    Raises:
        ConfigError: There is no check of such a name, or Python leaves out assertions.
    """
    if not __debug__:
        message = "the checks are assertions, which Python leaves out when it runs with -O; run it without"
        raise ConfigError(message)
    names = check_names()
    unknown = sorted(set(only or ()) - set(names))
    if unknown:
        message = f"there is no check called {', '.join(unknown)}; the checks are {', '.join(names)}"
        raise ConfigError(message)
    suite = _Suite(config, opener, updater)
    gone = ""
    for name in names if only is None else [name for name in names if name in only]:
        check = getattr(suite, _PREFIX + name)
        advice = " ".join((check.__doc__ or "").replace("``", "").split())
        if gone:
            yield Finding(check=name, verdict=Verdict.CANNOT, why=gone, advice=advice)
            continue
        verdict, why = await _judged(check())
        yield Finding(check=name, verdict=verdict, why=why, advice=advice)
        if verdict is Verdict.FAIL and await _is_gone(opener):
            gone = f"the engine is gone since {name}"


async def _judged(check: Awaitable[None]) -> tuple[Verdict, str]:
    try:
        await check
    except unittest.SkipTest as error:
        return Verdict.CANNOT, str(error)
    except AssertionError as error:
        return Verdict.FAIL, told(error)
    except TimeoutError as error:
        return Verdict.FAIL, str(error) or f"it was not done in time, and waited at {waited_at(error)}"
    except Exception as error:  # noqa: BLE001 - the engine under test may raise anything, and that is a finding
        return Verdict.FAIL, f"{type(error).__name__}: {error}"
    return Verdict.PASS, ""


async def _is_gone(opener: Opener) -> bool:
    try:
        await (await opener()).snapshot()
    except EngineLostError:
        return True
    except Exception:  # noqa: BLE001 - as above
        return False
    return False


@asynccontextmanager
async def opened_afresh(make: Callable[[], ServingEngine]) -> AsyncIterator[Opener]:
    """Give an opener that makes a new engine for each check and closes the one before."""
    engines: list[ServingEngine] = []

    async def opener() -> ServingEngine:
        await _close(engines)
        engines.append(make())
        return engines[0]

    try:
        yield opener
    finally:
        await _close(engines)


async def _close(engines: list[ServingEngine]) -> None:
    while engines:
        with suppress(RoseError, asyncio.TimeoutError):
            await engines.pop().close()
