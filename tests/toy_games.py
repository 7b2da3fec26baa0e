"""Small environments for tests; found by worker processes through the parent's module path."""

from __future__ import annotations

import os
import time

from rose.reference.environment import Step


class CountDown:
    """Done after as many ``go`` as the seed says, reward 1; ``crash`` raises, ``die`` ends the process, ``hang`` sleeps."""

    words = ("left", "go", "crash", "die", "hang", "hm")
    action_words = ("go", "crash", "die", "hang")
    max_turns = 5
    max_tokens_per_turn = 3

    def reset(self, seed: int) -> str:
        if seed < 0:
            message = f"seed {seed} is below zero"
            raise ValueError(message)
        self.rest = seed
        print("printing must not disturb the answers")  # noqa: T201
        return "left " * self.rest

    def step(self, text: str | None) -> Step:
        if text == "die":
            os._exit(3)
        if text == "hang":
            time.sleep(60)
        if text == "crash":
            message = "boom"
            raise ZeroDivisionError(message)
        self.rest -= text is not None and text.endswith("go")
        is_done = self.rest <= 0
        return Step(observation="" if is_done else "left " * self.rest, reward=float(is_done), is_done=is_done)


class NoStep:
    words = ("a",)
    action_words = ("a",)
    max_turns = 1

    def reset(self, seed: int) -> str:
        return "a"


class BadWords(CountDown):
    words = ("go", "two words", "<pad>")


class StrangeAction(CountDown):
    action_words = ("jump",)


class NoTurns(CountDown):
    max_turns = 0


not_a_class = CountDown()
