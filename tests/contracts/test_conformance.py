"""The kit finds what the contract suite finds, without pytest, and says it in words."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from broken_engines import BITES, BreaksUnderLoad

from rose.errors import ConfigError, EngineLostError, EngineUnsupportedError
from rose.testing import EngineContract, FakeEngine, fake_update
from rose.testing.conformance import SuiteConfig, Verdict, check_names, examine, opened_afresh
from rose.types import WeightVersion

CONFIG = SuiteConfig(vocab_size=1000, max_model_len=4096, long_tokens=64, quiet_s=0.01, timeout_s=10.0)
QUICK = SuiteConfig(vocab_size=1000, max_model_len=4096, long_tokens=64, quiet_s=0.01, timeout_s=0.5)


async def next_version(engine):
    return fake_update(WeightVersion("run", engine.weight_version.n + 1))


def made(kind=FakeEngine, **options):
    return opened_afresh(lambda: kind(**{"token_s": 0.001, "weight_version": WeightVersion("run", 3), **options}))


async def findings(kind=FakeEngine, config=CONFIG, *, updater=next_version, only=None, **options):
    async with made(kind, **options) as opener:
        return {found.check: found async for found in examine(opener, config, updater=updater, only=only)}


def test_the_checks_are_those_of_the_contract():
    assert {f"test_{name}" for name in check_names()} == {
        name for name in dir(EngineContract) if name.startswith("test_")
    }


async def test_a_sound_engine_passes_every_check():
    found = await findings()
    assert tuple(found) == check_names()
    assert {name: each.why for name, each in found.items() if each.verdict is not Verdict.PASS} == {}


@pytest.mark.parametrize(("broken", "check"), BITES, ids=lambda value: getattr(value, "__name__", value))
async def test_every_check_fails_on_an_engine_that_is_broken_that_way(broken, check):
    (found,) = (await findings(broken, QUICK, only=[check])).values()
    assert found.verdict is Verdict.FAIL
    assert found.why
    assert found.advice


SAID = """
import asyncio
from broken_engines import Repeats, StageIsActivate
from rose.testing import fake_update
from rose.testing.conformance import SuiteConfig, examine, opened_afresh
from rose.types import WeightVersion

async def why(kind, check):
    async def updater(engine):
        return fake_update(WeightVersion("run", 4))
    async with opened_afresh(lambda: kind(weight_version=WeightVersion("run", 3))) as opener:
        async for found in examine(opener, SuiteConfig(), updater=updater, only=[check]):
            print(found.why)
            print(found.advice)

asyncio.run(why(Repeats, "max_tokens_bounds_the_stream"))
asyncio.run(why(StageIsActivate, "stage_changes_nothing"))
"""


def test_a_failure_says_what_was_compared_with_which_values():
    """In a process without pytest, whose own words these would otherwise be."""
    done = subprocess.run(
        [sys.executable, "-c", SAID], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
    )
    values, advice, message, _ = done.stdout.splitlines()
    assert values == "len(stream.token_ids) == num_tokens; 3 == 2"
    assert advice.startswith("Exactly max_tokens tokens, then LENGTH. Look for lost")
    assert message.startswith("stage() moved the version; (await engine.snapshot()).weight_version == before")


async def test_an_error_of_the_engines_own_is_named():
    check = "a_burst_is_served_or_told_busy"
    assert "RuntimeError" in (await findings(BreaksUnderLoad, only=[check]))[check].why


async def test_a_hang_says_where_it_waited():
    class Hangs(FakeEngine):
        async def resume(self):
            self.stall()

    check = "requests_wait_while_paused"
    found = (await findings(Hangs, QUICK, only=[check]))[check]
    assert found.verdict is Verdict.FAIL
    assert found.why == "it was not done in time, and waited at await asyncio.shield(self.task)"


async def test_what_the_engine_or_the_settings_lack_cannot_be_checked():
    class CannotPause(FakeEngine):
        async def pause(self, mode):
            message = "this server has no pause"
            raise EngineUnsupportedError(message)

    found = await findings(CannotPause, SuiteConfig(long_tokens=64, quiet_s=0.01), updater=None)
    why = {name: each.why for name, each in found.items() if each.verdict is Verdict.CANNOT}
    assert why["pause_keep_goes_on_where_it_was"] == "this server has no pause"
    assert "vocab_size" in why["unknown_token_ids_are_refused"]
    assert "max_model_len" in why["an_over_long_prompt_is_refused"]
    assert "--weights" in why["streams_survive_an_activation"]
    assert not [name for name, each in found.items() if each.verdict is Verdict.FAIL]


async def test_nothing_is_tried_once_the_engine_is_gone():
    engine = FakeEngine(token_s=0.001)

    async def opener():
        return engine

    found = []
    async for each in examine(opener, QUICK):
        found.append(each)
        if len(found) == 3:
            engine.die("somebody pulled the plug")
    assert [each.verdict for each in found[:4]] == [Verdict.PASS] * 3 + [Verdict.FAIL]
    assert found[3].why.startswith(EngineLostError.__name__)
    assert {each.why for each in found[4:]} == {f"the engine is gone since {found[3].check}"}


async def test_an_unknown_check_is_named():
    with pytest.raises(ConfigError, match="no check called nothing; the checks are max_tokens"):
        await findings(only=["nothing"])


@pytest.mark.parametrize(
    "options", [{"prompt": (1, 2)}, {"vocab_size": 1}, {"long_tokens": 2}, {"quiet_s": 0}, {"burst": 1}]
)
def test_settings_that_make_no_sense(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        SuiteConfig(**options)


def test_it_needs_no_pytest_and_assertions():
    code = "import sys, rose.testing.conformance; assert 'pytest' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    stripped = (
        "import asyncio\nfrom rose.testing.conformance import *\n"
        "async def go(): return [f async for f in examine(None, SuiteConfig())]\n"
        "asyncio.run(go())"
    )
    done = subprocess.run([sys.executable, "-O", "-c", stripped], capture_output=True, text=True, check=False)
    assert "runs with -O" in done.stderr
