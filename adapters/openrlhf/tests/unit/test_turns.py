"""Calls to turns: budget, errors that pass, answers that must not be empty."""

import asyncio

import attrs
import pytest

from doubles import Letters, Script, failing, openrlhf_params, result
from rose.errors import (
    ConfigError,
    NoEngineError,
    RequestRefusedError,
    TransportError,
    TurnFailedError,
    VersionUnavailableError,
)
from rose.types import AnyVersion, AtLeast, FinishReason, VersionSpan, WeightVersion
from rose_openrlhf.sampling import read_request
from rose_openrlhf.turns import Trajectory, TurnLimits, TurnRunner, is_passing

EOS = 2


def runner(script, version=None, retry_s=60.0, clock=None):
    clock = clock or [0.0]

    async def rest(seconds):
        clock[0] += seconds

    limits = TurnLimits(deadline_s=5.0, retry_s=retry_s)
    return TurnRunner(
        generate=script.generate,
        limits=limits,
        version=lambda: version,
        launch="r",
        rest=rest,
        clock=lambda: clock[0],
    )


def request(**given):
    return read_request(openrlhf_params(**given), num_prompt_tokens=2, max_model_len=64, codec=Letters())


async def run(script, trajectory=None, version=None, retry_s=60.0, **given):
    return await runner(script, version, retry_s).run(trajectory or Trajectory("t", "g"), [65, 66], request(**given))


async def test_a_turn_carries_names_version_and_deadline():
    script = Script(result("ab"))
    assert (await run(script, version=3)).token_ids == (97, 98)
    (turn,) = script.turns
    assert (turn.trajectory_id, turn.group_id, turn.prompt_ids) == ("t", "g", (65, 66))
    assert (turn.versions, turn.deadline_s) == (AtLeast(3), 5.0)
    other = Script(result("ab"))
    await run(other)
    assert other.turns[0].versions == AnyVersion()


async def test_after_an_error_that_passes_the_tokens_are_kept_within_the_budget():
    partial = result("ab", FinishReason.ABORTED, n=1)
    script = Script(failing(TransportError("away"), partial), result("cd", n=2))
    trajectory = Trajectory("t", "g")
    made = await run(script, trajectory, max_tokens=10)
    assert made.token_ids == tuple(map(ord, "abcd"))
    assert made.logprobs == (-0.5, -1.5, -0.5, -1.5)
    assert [(span.version.n, span.start, span.end) for span in made.versions] == [(1, 0, 2), (2, 2, 4)]
    assert script.turns[1].prompt_ids == (65, 66, 97, 98)
    assert script.turns[1].sampling.max_tokens == 8
    assert trajectory.notes() == {"rose_version_min": 1.0, "rose_version_max": 2.0, "rose_hops": 0.0}


async def test_a_seed_moves_on_with_the_tokens():
    script = Script(failing(TransportError("away"), result("ab", FinishReason.ABORTED)), result("cd"))
    await run(script, seed=5)
    assert [turn.sampling.seed for turn in script.turns] == [5, 7]


async def test_a_budget_that_an_error_left_nothing_of_ends_the_answer():
    script = Script(failing(NoEngineError("none"), result("ab", FinishReason.ABORTED)))
    made = await run(script, max_tokens=2)
    assert (made.token_ids, made.finish_reason) == ((97, 98), FinishReason.LENGTH)


@pytest.mark.parametrize("error", [RequestRefusedError("long"), TurnFailedError("no")])
async def test_what_does_not_pass_is_raised_at_once(error):
    script = Script(error)
    with pytest.raises(TurnFailedError, match="after 1 tries") as caught:
        await run(script)
    assert caught.value.__cause__ is error
    assert "GET /v1/pool" in str(caught.value)


async def test_trying_again_has_an_end():
    script = Script(*(TransportError("away") for _ in range(50)))
    with pytest.raises(TurnFailedError, match="away"):
        await run(script, retry_s=40.0)
    assert len(script.turns) == 6  # after rests of 1, 2, 4, 8 and 15 s; another 15 s do not fit


@pytest.mark.parametrize("partial", [None, result("ab", FinishReason.ABORTED)])
async def test_a_long_turn_that_gets_on_is_tried_again_as_long_as_a_short_one(partial):
    clock = [0.0]

    def slow(_):
        clock[0] += 1000.0  # more than retry_s
        raise failing(TransportError("away"), partial)

    script = Script(*(slow for _ in range(2 if partial else 1)), result("cd"))
    made = await runner(script, clock=clock).run(Trajectory("t", "g"), [65, 66], request(max_tokens=10))
    assert made.token_ids == tuple(map(ord, "ababcd" if partial else "cd"))


async def test_what_all_turns_meet_at_once_is_said_once(caplog):
    clock, failed = [0.0], set()

    def once(turn):
        if turn.trajectory_id not in failed:
            failed.add(turn.trajectory_id)
            raise TransportError("away")
        return result("ab")

    one = runner(Script(*(once for _ in range(42))), clock=clock)
    one.rest = lambda _: asyncio.sleep(0)
    await asyncio.gather(*(one.run(Trajectory(f"t{n}", "g"), [65, 66], request()) for n in range(20)))
    assert [record.message for record in caplog.records] == ["turn of t0: away; trying again in 1 s"]
    clock[0] += 10.0
    await one.run(Trajectory("later", "g"), [65, 66], request())
    assert len(caplog.records) == 2


async def test_slow_tries_without_a_token_have_an_end():
    clock = [0.0]

    def slow(_):
        clock[0] += 1000.0
        raise TransportError("away")

    script = Script(slow, slow, slow)
    with pytest.raises(TurnFailedError, match="after 2 tries"):
        await runner(script, clock=clock).run(Trajectory("t", "g"), [65, 66], request())


@pytest.mark.parametrize("has_error", [False, True])
async def test_tokens_of_another_jobs_weights_are_refused(has_error):
    span = VersionSpan(version=WeightVersion("another", 3), start=0, end=2)
    foreign = attrs.evolve(result("ab"), versions=(span,))
    answer = failing(TransportError("away"), foreign) if has_error else foreign
    with pytest.raises(ConfigError, match="another:3, not of r as"):
        await run(Script(answer), version=3)
    made = await run(Script(answer, result("cd")))  # before the first sync a turn asks for none
    assert made.token_ids[:2] == (97, 98)


async def test_an_answer_must_not_begin_with_its_end():
    script = Script(result([EOS]), result([]), result([97, EOS]))
    assert (await run(script)).token_ids == (97, EOS)
    seeded = Script(result([EOS]), result([97, EOS]))
    await run(seeded, seed=5)
    assert [turn.sampling.seed for turn in seeded.turns] == [5, 6]


async def test_an_empty_answer_is_kept_where_it_may_be_or_another_draw_is_the_same():
    assert (await run(Script(result([EOS])), min_tokens=0)).token_ids == (EOS,)
    assert (await run(Script(result([EOS])), temperature=0.0)).token_ids == (EOS,)
    assert (await run(Script(result([EOS], FinishReason.LENGTH)), max_tokens=1)).token_ids == (EOS,)


async def test_redraws_have_an_end():
    script = Script(*(result([EOS]) for _ in range(100)))
    assert (await run(script)).token_ids == (EOS,)
    assert len(script.turns) == 65


async def test_a_stop_text_does_not_end_the_first_token():
    script = Script(result("x"), result("ab", FinishReason.LENGTH))
    made = await run(script, stop=["x"], max_tokens=3)
    assert made.token_ids == tuple(map(ord, "xab"))
    assert script.turns[1].sampling.max_tokens == 2


def test_which_errors_pass():
    retryable = VersionUnavailableError("soon")
    retryable.is_retryable = True
    assert is_passing(retryable)
    assert not is_passing(VersionUnavailableError("never"))


async def test_versions_of_a_trajectory_add_up():
    trajectory = Trajectory("t", "g")
    for n in (4, 2, 3):
        trajectory.note(result("a", n=n), launch="r")
    assert trajectory.notes()["rose_version_min"] == 2.0
    assert trajectory.notes()["rose_version_max"] == 4.0
    assert Trajectory("t", "g").notes()["rose_version_min"] == -1.0
    trajectory.note(result("a", n=57), launch="other")  # what an earlier job left in the engines has no number here
    assert trajectory.notes()["rose_version_max"] == 4.0
