from __future__ import annotations

import random
import statistics

import pytest

from rose.reference.environment import SupportsDemonstrations, load_environment, longest_episode
from rose.reference.household import Household, Teacher
from rose.reference.household_world import MOST_IN_ONE, NOTHING_HAPPENS, Goal, House, Receptacle, Task
from rose.reference.tokenizer import UNK_ID, WordTokenizer

SPEC = "rose.reference.household:Household"


def house_of(task: Task, *, thing: str = "mug", place: str = "desk") -> House:
    """Return a small house: a mug in a closed cabinet, a lamp on the desk."""
    places = [
        Receptacle("cabinet 1", "kitchen", is_open=False, contents=["mug 1"]),
        Receptacle("fridge 1", "kitchen", is_open=False),
        Receptacle("microwave 1", "kitchen", is_open=False),
        Receptacle("sinkbasin 1", "kitchen", is_open=True),
        Receptacle("desk 1", "bedroom", is_open=True, contents=["desklamp 1", "pen 1"]),
    ]
    return House(Goal(task, thing, "" if task is Task.EXAMINE else place), {place.name: place for place in places})


def act(house: House, *actions: str) -> list[str]:
    return [house.act(action.split()) for action in actions]


def solve(house: House, *, most: int = 49) -> int:
    teacher = Teacher(house)
    for turn in range(most):
        if house.is_won:
            return turn
        house.act(teacher.choose().split())
        teacher.look()
    return most + 1


def test_it_is_an_environment_with_demonstrations():
    assert load_environment(SPEC) is Household
    assert isinstance(Household(), SupportsDemonstrations)


def test_what_is_seen_and_done():
    house = house_of(Task.PUT)
    assert act(house, "look", "go to cabinet 1", "take mug 1 from cabinet 1", "open cabinet 1") == [
        NOTHING_HAPPENS,
        "you are at cabinet 1 in the kitchen . it is closed .",
        NOTHING_HAPPENS,
        "you open cabinet 1 . in/on it : mug 1 .",
    ]
    assert act(house, "take mug 1 from cabinet 1", "inventory", "look", "go to desk 1") == [
        "you take mug 1 from cabinet 1 .",
        "you carry mug 1 .",
        "you are at cabinet 1 in the kitchen . in/on it : nothing .",
        "you are at desk 1 in the bedroom . in/on it : desklamp 1 , pen 1 .",
    ]
    assert not house.is_won
    assert act(house, "put mug 1 in/on desk 1") == ["you put mug 1 in/on desk 1 ."]
    assert house.is_won


@pytest.mark.parametrize(
    ("task", "treat", "other"),
    [
        (Task.CLEAN, "clean mug 1 with sinkbasin 1", "heat mug 1 with microwave 1"),
        (Task.HEAT, "heat mug 1 with microwave 1", "cool mug 1 with fridge 1"),
        (Task.COOL, "cool mug 1 with fridge 1", "clean mug 1 with sinkbasin 1"),
    ],
)
def test_a_treated_object_is_wanted_and_the_last_treatment_counts(task: Task, treat: str, other: str):
    def fetched() -> House:
        house = house_of(task)
        act(house, "go to cabinet 1", "open cabinet 1", "take mug 1 from cabinet 1")
        return house

    def bring(house: House, *treatments: str) -> bool:
        for treatment in treatments:
            act(house, f"go to {treatment.rpartition(' with ')[2]}", treatment)
        act(house, "go to desk 1", "put mug 1 in/on desk 1")
        return house.is_won

    assert bring(fetched(), treat)
    assert bring(fetched(), other, treat)
    assert not bring(fetched())
    assert not bring(fetched(), other)
    assert not bring(fetched(), treat, other)


def test_an_object_is_examined_by_using_the_lamp_with_it_in_the_hand():
    house = house_of(Task.EXAMINE, thing="pen")
    act(house, "go to desk 1", "use desklamp 1")
    assert not house.is_won
    act(house, "take pen 1 from desk 1", "use desklamp 1")
    assert house.is_won


@pytest.mark.parametrize(
    "action",
    [
        "go to cabinet 9",
        "go to desk 1",
        "open desk 1",
        "close desk 1",
        "take desklamp 1 from desk 1",
        "take mug 1 from cabinet 1",
        "put pen 1 in/on desk 1",
        "clean pen 1 with sinkbasin 1",
        "use pen 1",
        "go to",
        "fly",
        "",
    ],
)
def test_what_cannot_be_done_changes_nothing(action: str):
    house, same = house_of(Task.PUT), house_of(Task.PUT)
    act(house, "go to desk 1")
    act(same, "go to desk 1")
    assert act(house, action) == [NOTHING_HAPPENS]
    assert house == same


def test_a_full_place_takes_no_more():
    house = house_of(Task.PUT)
    act(house, "go to desk 1", "take pen 1 from desk 1")
    house.places["desk 1"].contents = ["cup 1"] * MOST_IN_ONE
    assert act(house, "put pen 1 in/on desk 1") == [NOTHING_HAPPENS]


def test_every_admissible_action_does_something_and_nothing_else_that_was_tried_does():
    rng = random.Random(1)
    for seed in range(40):
        house = House.generate(seed)
        for _ in range(30):
            possible = house.admissible()
            action = rng.choice(possible)
            assert house.act(action.split()) != NOTHING_HAPPENS or action == "look"


def test_the_house_is_a_function_of_the_seed():
    assert [House.generate(seed) for seed in range(20)] == [House.generate(seed) for seed in range(20)]
    assert len({House.generate(seed).describe() for seed in range(200)}) == 200
    assert {House.generate(seed).goal.task for seed in range(100)} == set(Task)


def test_every_house_can_be_solved_and_is_not_won_at_first():
    for seed in range(400):
        house = House.generate(seed)
        assert not house.is_won
        assert solve(house) <= 49, f"house {seed}: {house.goal}"


def test_an_episode_ends_at_the_cap_without_reward():
    game = Household()
    assert game.reset(3).endswith("> ".strip())
    steps = [game.step(None if i % 2 else "look .") for i in range(49)]
    assert [step.is_done for step in steps] == [False] * 48 + [True]
    assert (steps[-1].observation, sum(step.reward for step in steps)) == ("", 0.0)


def test_the_admissible_actions_play_the_game_through():
    for seed in range(10):
        game, rng = Household(), random.Random(seed)
        game.reset(seed)
        for _ in range(49):
            if game.step(rng.choice(game.admissible())).is_done:
                break
        else:
            pytest.fail("an episode never ended")


def test_all_that_is_said_is_in_the_vocabulary_and_within_the_bounds():
    tokenizer = WordTokenizer.for_environment(Household)
    longest = 0
    for seed in range(60):
        turns = Household().demonstrate(seed)
        words = [word for turn in turns for word in (*turn.observation, *turn.answer)]
        assert UNK_ID not in tokenizer.encode(words)
        assert all(len(turn.answer) <= Household.max_tokens_per_turn for turn in turns)
        longest = max(longest, len(words))
    assert longest < longest_episode(Household) <= 2048


def test_demonstrations_have_the_shape_of_recorded_ones():
    """Recorded: median 14 actions, 10 to 31, four tokens an action, ten an observation; see docs/run-a-job.md."""
    demos = [Household().demonstrate(seed) for seed in range(200)]
    assert demos[:3] == [Household().demonstrate(seed) for seed in range(3)]
    lengths = [len(turns) for turns in demos]
    answers = [len(turn.answer) for turns in demos for turn in turns]
    assert 12 <= statistics.median(lengths) <= 17
    assert sum(length < 49 for length in lengths) >= 195
    assert 4 <= statistics.median(answers) <= 6
