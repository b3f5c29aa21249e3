"""A maze that is seen, not told: an environment with Gymnasium's interface, drawn with Pillow.

An agent (blue) walks over a floor of three by three squares to the goal (green), around walls
(black). Each observation is a drawing of 64 by 64 pixels. Reaching the goal gives reward 1 and ends
the episode; a step into a wall, or out of the maze, changes nothing.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import gymnasium
import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

Square = tuple[int, int]

SIZE = 3
WALLS = 2
# Steps on a shortest way, at most, so that a model has time for it.
MOST_STEPS = 3
PIXELS = 21  # of a square's side
SIDE = SIZE * PIXELS + 1
MOVES: dict[str, Square] = {"up": (0, -1), "down": (0, 1), "left": (-1, 0), "right": (1, 0)}
COLOURS = {"floor": "#e8e4d8", "wall": "#202020", "agent": "#2040d0", "goal": "#20b040"}
SQUARES = [(x, y) for y in range(SIZE) for x in range(SIZE)]


class Maze(gymnasium.Env[NDArray[np.uint8], np.int64]):
    """A maze; each seed gives another one. The actions are up, down, left and right."""

    def __init__(self) -> None:
        self.action_space = gymnasium.spaces.Discrete(len(MOVES))
        shape = (SIDE, SIDE, 3)
        self.observation_space = gymnasium.spaces.Box(0, 255, shape, np.uint8)
        self.agent = self.goal = SQUARES[0]
        self.walls: frozenset[Square] = frozenset()

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.uint8], dict[str, Any]]:
        """Draw a maze of which the goal can be reached in 1 to MOST_STEPS steps."""
        super().reset(seed=seed)
        while True:
            order = self.np_random.permutation(len(SQUARES))
            self.agent, self.goal, *walls = (SQUARES[i] for i in order[: WALLS + 2])
            self.walls = frozenset(walls)
            if self.distances().get(self.agent, MOST_STEPS + 1) <= MOST_STEPS:
                return self.drawing(), {}

    def step(
        self, action: int | np.int64
    ) -> tuple[NDArray[np.uint8], float, bool, bool, dict[str, Any]]:
        """Move the agent one square if the square is free."""
        self.agent = self.after(list(MOVES)[int(action)])
        reached = self.agent == self.goal
        return self.drawing(), float(reached), reached, False, {}

    def drawing(self) -> NDArray[np.uint8]:
        """Return the drawing: [height, width, 3] of uint8."""
        drawing = Image.new("RGB", (SIDE, SIDE), COLOURS["floor"])
        draw = ImageDraw.Draw(drawing)
        for square in self.walls:
            draw.rectangle(_corners(square), COLOURS["wall"])
        draw.rectangle(_corners(self.goal), COLOURS["goal"])
        draw.ellipse(_corners(self.agent), COLOURS["agent"])
        return np.asarray(drawing)

    def after(self, move: str) -> Square:
        """Return the agent's square after a move."""
        (x, y), (dx, dy) = self.agent, MOVES[move]
        square = (x + dx, y + dy)
        return square if square in SQUARES and square not in self.walls else self.agent

    def distances(self) -> dict[Square, int]:
        """Return the number of steps to the goal from each square that has a way to it."""
        found, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            x, y = queue.popleft()
            for dx, dy in MOVES.values():
                square = (x + dx, y + dy)
                if square in SQUARES and square not in self.walls and square not in found:
                    found[square] = found[x, y] + 1
                    queue.append(square)
        return found

    def best_moves(self) -> list[str]:
        """Return the moves that bring the agent nearer to the goal."""
        distances = self.distances()
        return [m for m in MOVES if distances[self.after(m)] < distances[self.agent]]


def _corners(square: Square) -> tuple[int, int, int, int]:
    left, top = (coordinate * PIXELS + 1 for coordinate in square)
    return left, top, left + PIXELS - 2, top + PIXELS - 2
