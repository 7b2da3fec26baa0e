"""FrozenLake in words, on gymnasium's own environment.

An observation is the whole grid, row by row, the player's cell shown as ``P``::

    obs P F F F / F H F H / F F F H / H F F G act

An answer is up to three optional looks (``right? hole``) and then a move (``right``), which ends the turn. A turn without a
move leaves the player where it is. Reward 1 at the goal, 0 otherwise. The map is a function of the seed alone.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from rose.reference.environment import DemonstratedTurn, Step

MOVES = ("left", "down", "right", "up")
LOOKS = ("left?", "down?", "right?", "up?")
SIGHTS = {"S": "ice", "F": "ice", "H": "hole", "G": "goal", "#": "wall"}
_OFFSETS = ((0, -1), (1, 0), (0, 1), (-1, 0))

_HELD_OUT_BASE = 1 << 30


def held_out_seeds(count: int) -> range:
    """Return seeds of evaluation maps; ``training_seed`` never returns one of them."""
    return range(_HELD_OUT_BASE, _HELD_OUT_BASE + count)


def training_seed(number: int) -> int:
    """Fold any whole number into the range of training seeds."""
    return number % _HELD_OUT_BASE


def make_map(seed: int, *, size: int, ice_fraction: float) -> tuple[str, ...]:
    """Return the solvable map that ``seed`` names, one string of ``S F H G`` a row."""
    from gymnasium.envs.toy_text.frozen_lake import generate_random_map  # noqa: PLC0415 - loaded by env workers only

    return tuple(generate_random_map(size, ice_fraction, seed=seed))


def goal_distances(grid: Sequence[str]) -> dict[tuple[int, int], int]:
    """Return for every cell that can reach the goal the number of moves it takes."""
    size = len(grid)
    goals = [(r, c) for r in range(size) for c in range(size) if grid[r][c] == "G"]
    distances = dict.fromkeys(goals, 0)
    queue = deque(goals)
    while queue:
        cell = queue.popleft()
        for neighbour in _neighbours(cell):
            if neighbour not in distances and _sight(grid, neighbour) in {"ice", "goal"}:
                distances[neighbour] = distances[cell] + 1
                queue.append(neighbour)
    return distances


def _neighbours(cell: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the four cells around ``cell`` in the order of ``MOVES``; some may lie off the map."""
    return [(cell[0] + dr, cell[1] + dc) for dr, dc in _OFFSETS]


def _sight(grid: Sequence[str], cell: tuple[int, int]) -> str:
    row, column = cell
    is_inside = 0 <= row < len(grid) and 0 <= column < len(grid)
    return SIGHTS[grid[row][column] if is_inside else "#"]


def _describe(grid: Sequence[str], player: tuple[int, int]) -> list[str]:
    words = ["obs"]
    for r, row in enumerate(grid):
        words += ["/"] * (r > 0)
        words += ["P" if (r, c) == player else cell for c, cell in enumerate(row)]
    return [*words, "act"]


class FrozenLake:
    """4x4, four cells in five are ice, not slippery, ten turns (implements ``Environment``).

    A demonstration walks a shortest path, but ``noise_fraction`` of its moves are drawn at random, so that the warm-started
    policy reads the map and still has most of the game to learn by reinforcement.
    """

    words: Sequence[str] = ("obs", "act", "/", "S", "F", "H", "G", "P", *MOVES, *LOOKS, "ice", "hole", "goal", "wall")
    action_words: Sequence[str] = MOVES
    max_turns = 10
    max_tokens_per_turn = 8
    size = 4
    ice_fraction = 0.8
    noise_fraction = 0.35
    look_probability = 0.15
    max_looks = 3

    def __init__(self) -> None:
        self._env: Any = None
        self._grid: tuple[str, ...] = ()
        self._player = (0, 0)
        self._num_turns = 0

    def reset(self, seed: int) -> str:
        """Start on the map of ``seed``."""
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv  # noqa: PLC0415 - loaded by env workers only

        self._grid = make_map(seed, size=self.size, ice_fraction=self.ice_fraction)
        self._env = FrozenLakeEnv(desc=list(self._grid), is_slippery=False)
        position, _ = self._env.reset(seed=seed)
        self._player = divmod(int(position), self.size)
        self._num_turns = 0
        return self._observation()

    def step(self, text: str | None) -> Step:
        """Make the move that ``text`` ends with; none when it does not end with a move."""
        if self._env is None:
            message = "FrozenLake.step before reset"
            raise RuntimeError(message)
        self._num_turns += 1
        words = (text or "").split()
        reward, is_done = 0.0, False
        if words and words[-1] in MOVES:
            position, reward, is_done, _, _ = self._env.step(MOVES.index(words[-1]))
            self._player = divmod(int(position), self.size)
        is_done = is_done or self._num_turns >= self.max_turns
        return Step(observation="" if is_done else self._observation(), reward=float(reward), is_done=is_done)

    def demonstrate(self, seed: int) -> list[DemonstratedTurn]:
        """Return one noisy shortest-path episode with random looks."""
        rng = random.Random(seed)
        grid = make_map(rng.randrange(_HELD_OUT_BASE), size=self.size, ice_fraction=self.ice_fraction)
        distances, player = goal_distances(grid), (0, 0)
        turns: list[DemonstratedTurn] = []
        while len(turns) < self.max_turns and _sight(grid, player) == "ice":
            move = self._teach(rng, distances, player)
            answer = (*self._looks(rng, grid, player), MOVES[move])
            turns.append(DemonstratedTurn(observation=tuple(_describe(grid, player)), answer=answer))
            target = _neighbours(player)[move]
            player = player if _sight(grid, target) == "wall" else target
        return turns

    def _teach(self, rng: random.Random, distances: dict[tuple[int, int], int], player: tuple[int, int]) -> int:
        if rng.random() < self.noise_fraction:
            return rng.randrange(len(MOVES))
        closer = [i for i, cell in enumerate(_neighbours(player)) if distances.get(cell) == distances[player] - 1]
        return rng.choice(closer)

    def _looks(self, rng: random.Random, grid: Sequence[str], player: tuple[int, int]) -> Iterable[str]:
        for direction in rng.sample(range(len(LOOKS)), self.max_looks):
            if rng.random() >= self.look_probability:
                return
            yield LOOKS[direction]
            yield _sight(grid, _neighbours(player)[direction])

    def _observation(self) -> str:
        return " ".join(_describe(self._grid, self._player))
