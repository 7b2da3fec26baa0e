from __future__ import annotations

import pytest

from rose.reference.lake import FrozenLake, goal_distances, held_out_seeds, make_map, training_seed

OPEN = ("SFFF", "FHFH", "FFFH", "HFFG")


def started(grid: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> FrozenLake:
    monkeypatch.setattr("rose.reference.lake.make_map", lambda seed, *, size, ice_fraction: grid)
    lake = FrozenLake()
    lake.reset(0)
    return lake


def test_the_first_observation_shows_the_whole_grid(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rose.reference.lake.make_map", lambda seed, *, size, ice_fraction: OPEN)
    observation = FrozenLake().reset(7)
    assert observation == "obs P F F F / F H F H / F F F H / H F F G act"
    assert len(observation.split()) == 21


def test_the_goal_pays_one_and_ends_the_episode(monkeypatch: pytest.MonkeyPatch):
    lake = started(OPEN, monkeypatch)
    steps = [lake.step(move) for move in ("down", "down", "right? ice right", "down", "right", "right")]
    assert [step.reward for step in steps] == [0, 0, 0, 0, 0, 1]
    assert [step.is_done for step in steps] == [False] * 5 + [True]
    assert steps[0].observation == "obs S F F F / P H F H / F F F H / H F F G act"
    assert steps[-1].observation == ""


def test_a_hole_ends_the_episode_without_reward(monkeypatch: pytest.MonkeyPatch):
    lake = started(OPEN, monkeypatch)
    lake.step("right")
    last = lake.step("down")
    assert (last.reward, last.is_done) == (0.0, True)


@pytest.mark.parametrize("text", [None, "", "right? ice", "right left?"])
def test_words_without_a_final_move_leave_the_player_and_use_a_turn(text, monkeypatch: pytest.MonkeyPatch):
    lake = started(OPEN, monkeypatch)
    first = lake.step(text)
    assert first.observation.startswith("obs P")
    assert not first.is_done
    assert [lake.step(text).is_done for _ in range(9)] == [False] * 8 + [True]


def test_step_before_reset_is_a_clear_error():
    with pytest.raises(RuntimeError, match="before reset"):
        FrozenLake().step("left")


def test_a_map_is_a_function_of_its_seed_and_solvable():
    maps = [make_map(seed, size=4, ice_fraction=0.8) for seed in range(40)]
    assert maps == [make_map(seed, size=4, ice_fraction=0.8) for seed in range(40)]
    assert len(set(maps)) > 30
    assert all((0, 0) in goal_distances(grid) for grid in maps)


def test_goal_distances_on_a_known_map():
    distances = goal_distances(OPEN)
    assert distances[3, 3] == 0
    assert distances[0, 0] == 6
    assert (1, 1) not in distances


def test_training_never_meets_a_held_out_seed():
    held_out = held_out_seeds(128)
    assert len(held_out) == 128
    assert all(training_seed(seed) not in held_out for seed in (0, *held_out, 2**31 - 1, 2**40 + 5))


def test_a_demonstration_is_repeatable_and_speaks_the_vocabulary():
    teacher = FrozenLake()
    episode = teacher.demonstrate(11)
    assert episode == FrozenLake().demonstrate(11)
    assert episode != teacher.demonstrate(12)
    for turn in (turn for seed in range(50) for turn in teacher.demonstrate(seed)):
        assert {*turn.observation, *turn.answer} <= set(FrozenLake.words)
        assert turn.answer[-1] in FrozenLake.action_words
        assert len(turn.answer) <= FrozenLake.max_tokens_per_turn
        assert len(turn.observation) == 21


def test_demonstrated_moves_lead_from_one_observation_to_the_next():
    teacher = FrozenLake()
    teacher.noise_fraction = 0.0
    for seed in range(20):
        turns = teacher.demonstrate(seed)
        rows = " ".join(turns[0].observation[1:-1]).replace(" ", "").split("/")
        grid = tuple(row.replace("P", "S") for row in rows)
        assert len(turns) == goal_distances(grid)[0, 0], "without noise a demonstration is a shortest path"


def test_looks_say_what_is_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rose.reference.lake.make_map", lambda seed, *, size, ice_fraction: OPEN)
    teacher = FrozenLake()
    teacher.look_probability, teacher.noise_fraction = 1.0, 0.0
    first = teacher.demonstrate(3)[0].answer
    seen = dict(zip(first[:-1:2], first[1:-1:2], strict=True))
    assert len(seen) == teacher.max_looks
    assert seen.items() <= {"left?": "wall", "up?": "wall", "right?": "ice", "down?": "ice"}.items()
