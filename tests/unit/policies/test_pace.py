from __future__ import annotations

import pytest

from rose.policies.pace import PaceConfig, PaceModel
from rose.types import EngineId, EngineKind

A, B, NEW = EngineId("a"), EngineId("b"), EngineId("new")
OWN, LENT = EngineKind.DEDICATED, EngineKind.BORROWED


def taught(kind: EngineKind = OWN, *, base_s: float = 0.01, slope_s: float = 1e-6, factor: float = 1.0) -> PaceModel:
    """Return a model that saw many turns of one engine whose pace is a straight line."""
    model = PaceModel(PaceConfig())
    teach(model, A, kind, base_s=base_s * factor, slope_s=slope_s * factor)
    return model


def teach(model: PaceModel, engine_id: EngineId, kind: EngineKind, *, base_s: float, slope_s: float = 0.0) -> None:
    for i in range(40):
        load = 1000.0 * (i % 8)
        model.observe(engine_id, kind, load_tokens=load, num_tokens=100, duration_s=100 * (base_s + slope_s * load))


def test_nothing_is_known_before_a_turn_ended() -> None:
    model = PaceModel(PaceConfig())
    assert model.estimate(A, OWN, 0.0) is None
    assert model.prefill_s == 0.0


def test_a_line_through_turns_gives_the_pace_at_any_load() -> None:
    estimate = taught().estimate(NEW, OWN, 5000.0)
    assert estimate is not None
    assert estimate.pace_s == pytest.approx(0.015)
    assert estimate.slope_s == pytest.approx(1e-6)
    assert estimate.slowdown == 1.0


def test_a_kind_without_turns_of_its_own_is_taken_for_the_other() -> None:
    estimate = taught().estimate(B, LENT, 5000.0)
    assert estimate is not None
    assert estimate.pace_s == pytest.approx(0.015)
    assert estimate.slowdown == pytest.approx(1.0)


def test_slowdown_compares_a_borrowed_engine_with_a_dedicated_one_at_the_same_load() -> None:
    model = taught()
    teach(model, B, LENT, base_s=0.04, slope_s=4e-6)
    estimate = model.estimate(B, LENT, 3000.0)
    assert estimate is not None
    assert estimate.slowdown == pytest.approx(4.0, rel=0.01)


def test_an_engine_that_is_slower_than_its_kind_is_known_by_itself_and_forgotten_with_time() -> None:
    model = taught(slope_s=0.0)
    for _ in range(10):
        model.observe(B, OWN, load_tokens=0.0, num_tokens=100, duration_s=5.0)
    slow, usual = model.estimate(B, OWN, 0.0), model.estimate(NEW, OWN, 0.0)
    assert slow is not None
    assert usual is not None
    assert slow.pace_s > 1.5 * usual.pace_s
    model.now_s += 10 * PaceConfig().half_life_s
    later = model.estimate(B, OWN, 0.0)
    assert later is not None
    assert later.pace_s == pytest.approx(usual.pace_s, rel=0.01)


def test_an_engine_that_left_is_not_remembered() -> None:
    model = taught(slope_s=0.0)
    for _ in range(10):
        model.observe(B, OWN, load_tokens=0.0, num_tokens=100, duration_s=5.0)
    model.forget(B)
    assert model.estimate(B, OWN, 0.0) == model.estimate(NEW, OWN, 0.0)


def test_the_pace_never_falls_with_load_and_stays_positive() -> None:
    falling, steep = PaceModel(PaceConfig()), PaceModel(PaceConfig())
    for i in range(1, 20):
        falling.observe(A, OWN, load_tokens=100.0 * i, num_tokens=10, duration_s=1.0 / i)
        steep.observe(A, OWN, load_tokens=100.0 * i, num_tokens=10, duration_s=0.01 * i**3)
    for model in (falling, steep):
        paces = [model.estimate(NEW, OWN, load) for load in (0.0, 500.0, 5000.0)]
        seconds = [pace.pace_s for pace in paces if pace is not None]
        assert len(seconds) == 3
        assert seconds == sorted(seconds)
        assert seconds[0] > 0


def test_turns_without_tokens_or_time_teach_nothing() -> None:
    model = PaceModel(PaceConfig())
    model.observe(A, OWN, load_tokens=1.0, num_tokens=0, duration_s=1.0)
    model.observe(A, OWN, load_tokens=1.0, num_tokens=5, duration_s=0.0)
    assert model.estimate(A, OWN, 0.0) is None


def test_prefill_is_a_share_of_the_pace_until_turns_that_moved_show_it() -> None:
    model = taught(slope_s=0.0)
    assert model.prefill_s == pytest.approx(PaceConfig().prefill_share * 0.01)
    for _ in range(2000):
        model.observe_prefill(num_prompt_tokens=10_000, extra_s=21.0)  # what is too much in one turn
        model.observe_prefill(num_prompt_tokens=10_000, extra_s=-1.0)  # is missing in another
    assert model.prefill_s == pytest.approx(0.001, rel=0.05)
    for _ in range(2000):
        model.observe_prefill(num_prompt_tokens=10_000, extra_s=-1.0)
    assert model.prefill_s == pytest.approx(PaceConfig().prefill_share * 0.01), "never less than expected"


def test_settings_are_checked() -> None:
    for wrong in ({"memory_turns": 1}, {"half_life_s": 0.0}, {"prefill_share": 2.0}):
        with pytest.raises((ValueError, TypeError)):
            PaceConfig(**wrong)
