"""The maze of examples/vision/maze: what it draws, its ways and its rewards."""

from __future__ import annotations

import runpy
from typing import Any

import gymnasium.utils.env_checker
import numpy as np
import pytest

from tests.tools import ROOT

MAZE = runpy.run_path(str(ROOT / "examples/vision/maze/maze.py"))
MOVES = list(MAZE["MOVES"])


@pytest.fixture
def maze() -> Any:
    return MAZE["Maze"]()


def centre(picture: Any, square: tuple[int, int]) -> tuple[int, ...]:
    x, y = (coordinate * MAZE["PIXELS"] + MAZE["PIXELS"] // 2 for coordinate in square)
    return tuple(int(value) for value in picture[y, x])


def colour(name: str) -> tuple[int, ...]:
    return tuple(bytes.fromhex(MAZE["COLOURS"][name].removeprefix("#")))


def test_gymnasium_finds_no_fault(maze: Any) -> None:
    gymnasium.utils.env_checker.check_env(maze, skip_render_check=True)


@pytest.mark.parametrize("seed", range(20))
def test_the_drawing_shows_every_square(maze: Any, seed: int) -> None:
    picture, _ = maze.reset(seed=seed)
    assert picture.shape == (64, 64, 3)
    assert picture.dtype == np.uint8
    for square in MAZE["SQUARES"]:
        kind = "wall" if square in maze.walls else "floor"
        kind = {maze.goal: "goal", maze.agent: "agent"}.get(square, kind)
        assert centre(picture, square) == colour(kind)


@pytest.mark.parametrize("seed", range(20))
def test_the_best_moves_lead_to_the_goal_in_the_fewest_steps(maze: Any, seed: int) -> None:
    maze.reset(seed=seed)
    steps = maze.distances()[maze.agent]
    assert 1 <= steps <= MAZE["MOST_STEPS"]
    for left in reversed(range(steps)):
        move = MOVES.index(maze.best_moves()[0])
        picture, reward, terminated, truncated, _ = maze.step(move)
        assert (reward, terminated, truncated) == (float(not left), not left, False)
        assert centre(picture, maze.agent) == colour("agent")


def test_a_step_into_a_wall_or_out_of_the_maze_changes_nothing(maze: Any) -> None:
    maze.reset(seed=0)
    maze.agent, maze.goal, maze.walls = (0, 0), (2, 2), frozenset({(1, 0)})
    before = maze.drawing()
    for move in ("up", "left", "right"):
        picture, reward, terminated, *_ = maze.step(MOVES.index(move))
        assert (maze.agent, reward, terminated) == ((0, 0), 0.0, False)
        assert np.array_equal(picture, before)
    maze.step(MOVES.index("down"))
    assert maze.agent == (0, 1)


def test_a_seed_gives_the_same_maze(maze: Any) -> None:
    first, again = (maze.reset(seed=5)[0] for _ in range(2))
    assert np.array_equal(first, again)
    assert len({maze.reset(seed=seed)[0].tobytes() for seed in range(20)}) > 15
