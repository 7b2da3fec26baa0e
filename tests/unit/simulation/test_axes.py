from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st
from study_standins import SCENARIO

from rose.errors import ConfigError
from rose.simulation import axes
from rose.simulation.axes import Sweep, evolve, evolve_all, parse_sweep, parse_value, scaled
from rose.simulation.presets import PRESETS, with_tail
from rose.simulation.scenario import Layout, Scenario, Tail


def refusal(call, *args):
    with pytest.raises(ConfigError) as caught:
        call(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(
    ("key", "value", "kept"),
    [
        ("serving.max_seqs", 64, 64),
        ("serving.load_fraction", 1, 1.0),
        ("serving.layout", "pd", Layout.DISAGGREGATED),
        ("rollout.tail", Tail.END_TIME, Tail.END_TIME),
        ("serving.rate_rps", None, None),
        ("link.model", "qwen3-8b", "qwen3-8b"),
        ("name", "mine", "mine"),
    ],
)
def test_one_setting_changes_and_nothing_else(key, value, kept):
    changed = evolve(SCENARIO, key, value)
    section, _, name = key.rpartition(".")
    assert getattr(getattr(changed, section) if section else changed, name) == kept
    back = evolve(changed, key, axes.get(SCENARIO, key))
    assert back == SCENARIO


def test_every_key_can_be_read_and_set_to_what_it_is():
    assert "serving.max_seqs" in axes.setting_keys()
    assert not any("assumptions" in key for key in axes.setting_keys())
    for key in axes.setting_keys():
        assert evolve(SCENARIO, key, axes.get(SCENARIO, key)) == SCENARIO


@pytest.mark.parametrize(
    ("key", "value", "parts"),
    [
        ("serving.max_seqs", 0, ["serving.max_seqs must be an integer >= 1, got 0"]),
        ("serving.max_seqs", "64", ["serving.max_seqs: expected an integer, got a string ('64')"]),
        ("serving.max_seqs", True, ["serving.max_seqs", "expected an integer", "boolean"]),
        ("serving.layout", "pdd", ["serving.layout", "'colocated', 'pd'", "'pdd'"]),
        ("rollout.group_size", 7, ["rollout.num_trajectories = 256", "rollout.group_size = 7"]),
        ("serving.max_sqs", 1, ["serving.max_sqs: unknown key", "did you mean 'serving.max_seqs'"]),
        ("max_seqs", 1, ["max_seqs: unknown key", "did you mean 'serving.max_seqs'"]),
        ("serving", 1, ["serving: unknown key"]),
        ("zzz", 1, ["zzz: unknown key; allowed"]),
        ("assumptions", (), ["assumptions: unknown key"]),
        ("name", 3, ["name: expected a string, got an integer (3)"]),
    ],
)
def test_a_wrong_key_or_value_is_refused_in_one_line_with_the_key(key, value, parts):
    message = refusal(evolve, SCENARIO, key, value)
    assert all(part in message for part in parts), message


def test_settings_that_hang_together_are_checked_together():
    changed = evolve_all(SCENARIO, {"rollout.group_size": 24, "rollout.num_trajectories": 48})
    assert (changed.rollout.group_size, changed.rollout.num_trajectories) == (24, 48)


@pytest.mark.parametrize(
    ("key", "value", "other", "setting"),
    [
        ("serving.load_fraction", 0.2, "serving.rate_rps", 3.0),
        ("rollout.workload", "frozenlake", "rollout.logs", "own.jsonl"),
        ("loop.rollout_share", 0.7, "loop.train_s", 10.0),
    ],
)
def test_a_setting_without_effect_is_refused(key, value, other, setting):
    scenario = evolve(SCENARIO, other, setting)
    message = refusal(evolve, scenario, key, value)
    assert f"{key} has no effect while {other} is {setting}; set {other}=none too" in message
    assert axes.get(evolve_all(scenario, {key: value, other: None}), key) == value


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("serving.max_seqs", "64", 64),
        ("serving.load_fraction", "0.5", 0.5),
        ("serving.rate_rps", "none", None),
        ("serving.rate_rps", "2", 2.0),
        ("serving.layout", "pd", "pd"),
        ("serving.trace", " a.csv ", "a.csv"),
        ("serving.profile", "none", "none"),
    ],
)
def test_texts_become_values_of_the_keys_type(key, text, value):
    parsed = parse_value(key, text)
    assert (parsed, type(parsed)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("borrowed", ["'borrowed'", "AXIS=V1,V2"]),
        ("=1", ["AXIS=V1,V2"]),
        ("borrowed=", ["AXIS=V1,V2"]),
        ("borrowd=1", ["borrowd", "did you mean 'borrowed'"]),
        ("borrowed=1,2.5", ["cluster.borrowed_gpus", "'2.5' is not a whole number"]),
        ("load=0.1,", ["serving.load_fraction", "'' is not a number"]),
        ("layout=pd,", ["serving.layout", "a value is empty"]),
        ("scale=big", ["scale", "'big' is not a number"]),
        ("link=10,20,10.0", ["link", "10.0 is there twice"]),
    ],
)
def test_a_wrong_sweep_is_refused(text, parts):
    message = refusal(parse_sweep, text)
    assert all(part in message for part in parts), message


def test_a_sweep_gives_a_scenario_for_each_value():
    sweep = parse_sweep("borrowed=0,8")
    assert sweep == Sweep(axis="borrowed", values=(0, 8))
    assert [sweep.apply(SCENARIO, value).cluster.borrowed_gpus for value in sweep.values] == [0, 8]
    assert parse_sweep("serving.rate_rps=1,none").values == (1.0, None)


def test_a_sweep_leaves_refusing_values_to_the_scenario():
    sweep = parse_sweep("load=0.5,3")
    assert "serving.load_fraction must be" in refusal(sweep.apply, SCENARIO, 3.0)


def test_the_other_reading_of_the_tail_brings_its_own_fit():
    own = PRESETS["frozenlake-8b-grpo"]
    other = evolve(own, "rollout.tail", "end-time")
    assert other == with_tail(own, Tail.END_TIME)
    assert other.rollout.sigma != own.rollout.sigma
    assert evolve(other, "rollout.tail", Tail.OWN_DURATION) == own
    assert parse_sweep("rollout.tail=end-time").apply(own, "end-time") == other


def test_own_logs_take_the_fit_away():
    mine = evolve(PRESETS["frozenlake-8b-grpo"], "rollout.logs", "own.jsonl")
    assert (mine.rollout.logs, mine.rollout.median_tokens, mine.rollout.sigma) == ("own.jsonl", None, None)
    chosen = evolve(SCENARIO, "rollout.sigma", 0.5)
    assert evolve(chosen, "rollout.logs", "own.jsonl").rollout.sigma == 0.5


def test_lengths_that_are_no_fit_are_left_alone():
    mine = evolve(PRESETS["frozenlake-8b-grpo"], "rollout.sigma", 0.111)
    assert evolve(mine, "rollout.tail", "end-time").rollout.sigma == 0.111
    both = {"rollout.tail": "end-time", "rollout.sigma": 0.111}
    assert evolve_all(PRESETS["frozenlake-8b-grpo"], both).rollout.sigma == 0.111


@given(st.integers(1, 700))
def test_scale_multiplies_all_gpus_and_trajectories(factor):
    changed = scaled(SCENARIO, float(factor))
    for name in ("rollout_gpus", "training_gpus", "borrowed_gpus"):
        assert getattr(changed.cluster, name) == factor * getattr(SCENARIO.cluster, name)
    assert changed.rollout.num_trajectories == factor * SCENARIO.rollout.num_trajectories
    kept = attrs.evolve(changed, cluster=SCENARIO.cluster, rollout=SCENARIO.rollout)
    assert kept == SCENARIO
    assert type(changed.cluster.rollout_gpus) is int


@pytest.mark.parametrize(
    ("factor", "parts"),
    [
        (0.3, ["scale = 0.3", "cluster.rollout_gpus = 2.4", "whole"]),
        (0.125, ["scale = 0.125"]),
        (0.0, ["scale must be", "got 0.0"]),
        (float("inf"), ["scale must be", "inf"]),
        (float("nan"), ["scale must be", "nan"]),
        ("2", ["scale must be", "'2'"]),
        (True, ["scale must be", "True"]),
    ],
)
def test_a_scale_that_leaves_parts_is_refused(factor, parts):
    scenario = evolve(SCENARIO, "rollout.group_size", 64)
    message = refusal(scaled, scenario, factor)
    assert all(part in message for part in parts), message


def test_types_of_the_contract_are_all_understood():
    """A new field of the scenario must be one that the command line can set."""
    texts = {int: "3", float: "0.5", str: "x"}
    for key in axes.setting_keys():
        kind, _ = axes._kind(key)
        if kind in texts:
            assert type(parse_value(key, texts[kind])) is kind
        else:
            assert [parse_value(key, member.value) for member in kind]
    assert isinstance(SCENARIO, Scenario)
