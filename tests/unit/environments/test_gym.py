"""Real environments with Gymnasium's interface at a real gateway, with a scripted engine."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sluice.api.groups.environment import Gym
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, Sample, SampleStatus
from sluice.samples.turns import turn_rewards
from sluice_rollout.environments import gym_play, package_environments
from sluice_rollout.environments.program import Program
from sluice_rollout.scoring import seat_rewards
from tests.unit.environments.program_tools import program_runner
from tests.unit.gateway.gateway_tools import token_ids
from tests.unit.rollout.scripted_engine import PARAMS, Script

MOVES = ["left", "down", "right", "up"]
LAKE: dict[str, Any] = {"id": "FrozenLake-v1", "args": {"is_slippery": False}}
ECHO: dict[str, Any] = {"make": "tests/unit/environments/gym_lakes.py:Echo"}
LENS = "tests/unit/environments/gym_lakes.py:Lens"
COMPASS = "tests/unit/environments/gym_lakes.py:Compass"


@contextlib.asynccontextmanager
async def gym_program(**settings: Any) -> AsyncIterator[Program]:
    variables = {"PATH": os.environ["PATH"]}
    fork_server = package_environments.gym_fork_server(Gym(**settings), sys.executable, variables)
    program = Program(
        fork_server.name, fork_server.single_episode_command, variables, "tiny", 8, fork_server
    )
    program.open()
    try:
        yield program
    finally:
        program.close()


async def play_gym(
    directory: Path, *answers: str, tokens: int = 2000, reset: Any = None, **settings: Any
) -> tuple[Sample, list[str]]:
    """Play an episode with these answers of the model. Returns the sample and the prompts."""
    engine = Script(*map(token_ids, answers))
    prompt = Prompt(3, "Cross.", None, {"reset": reset} if reset else {})
    async with (
        gym_program(**settings) as program,
        program_runner(program, engine, directory) as runner,
    ):
        sample = await runner(prompt, [1], Sample(0), PARAMS | {"max_new_tokens": tokens})
        decode = runner.generator.decode
    return sample, [decode(tokens) for tokens in engine.prompt_ids]


async def test_a_walk_over_the_ice(tmp_path: Path) -> None:
    way = ["down", "I go Down", "right", "right", "down", "left or right? right"]
    sample, prompts = await play_gym(tmp_path, *way, **LAKE, actions=MOVES)
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert turn_rewards(sample) == {"": [0, 0, 0, 0, 0, 1]}
    seat_rewards.settle(sample)
    assert sample.reward == 1.0
    assert sample.metadata["gym"] == {
        "steps": 6, "refused": 0, "terminated": True, "truncated": False,
    }  # fmt: skip
    first = "Cross.\n\n[S]FFF\nFHFH\nFFFH\nHFFG\n\nAnswer with one of left, down, right, up."
    assert first in prompts[0]
    assert "SFFF\n[F]HFH" in prompts[1]
    assert prompts[1].count("Answer with") == 1


async def test_an_invalid_action_is_a_turn_that_is_answered_with_an_error(tmp_path: Path) -> None:
    answers = ["north", "right", "down"]  # and into a hole
    sample, prompts = await play_gym(tmp_path, *answers, **LAKE, actions=MOVES)
    assert (sample.error, turn_rewards(sample)) == ("", {"": [0, 0, 0]})
    assert "error: expected one of left, down, right, up" in prompts[1]
    assert (sample.metadata["gym"]["steps"], sample.metadata["gym"]["refused"]) == (2, 1)


async def test_an_episode_ends_after_its_turns(tmp_path: Path) -> None:
    sample, _ = await play_gym(tmp_path, "0", "0", **LAKE, max_turns=2)
    assert (sample.error, sample.status) == ("", SampleStatus.COMPLETED)
    assert sample.metadata["gym"]["truncated"]


async def test_a_users_function_translates_observations_and_actions(tmp_path: Path) -> None:
    answers = ["S", "down", "E"]
    sample, prompts = await play_gym(tmp_path, *answers, **LAKE, function=COMPASS)
    assert (sample.error, sample.metadata["gym"]["steps"]) == ("", 2)
    assert "Cross.\n\nrow 0 column 0" in prompts[0]
    assert "Answer with" not in prompts[0]
    assert "row 1 column 0" in prompts[1]
    assert "error: down is no point of the compass" in prompts[2]


@pytest.mark.parametrize(
    ("reset", "words"),
    [
        pytest.param(None, "hello, seed 3, options None", id="the group's"),
        pytest.param({"seed": 8, "options": {"a": 1}}, "seed 8, options {'a': 1}", id="the row's"),
    ],
)
async def test_an_environment_of_texts_without_spaces(
    reset: Any, words: str, tmp_path: Path
) -> None:
    answers = ["go on", "stop"]
    sample, prompts = await play_gym(tmp_path, *answers, **ECHO, reset=reset)
    assert (sample.error, turn_rewards(sample)) == ("", {"": [0.5, 0.5]})
    assert words in prompts[0]
    assert "\nSpeak." in prompts[0]
    assert "heard go on" in prompts[1]


async def test_a_truncated_episode_of_the_environments_is_complete(tmp_path: Path) -> None:
    sample, _ = await play_gym(tmp_path, "enough", **ECHO)
    assert (sample.status, sample.metadata["gym"]["truncated"]) == (SampleStatus.COMPLETED, True)


async def test_a_history_that_does_not_fit_keeps_the_rewards_until_then(tmp_path: Path) -> None:
    sample, _ = await play_gym(tmp_path, *["a" * 30] * 9, tokens=80, **ECHO)
    assert (sample.error, sample.status) == ("", SampleStatus.TRUNCATED)
    (rewards,) = turn_rewards(sample).values()
    assert 0 < len(rewards) < 9
    assert set(rewards) == {0.5}
    assert sample.metadata["gym"]["steps"] == len(rewards)


async def test_a_step_that_raises_fails_the_sample_with_its_error(tmp_path: Path) -> None:
    sample, _ = await play_gym(tmp_path, "fail", **ECHO)
    assert sample.status is SampleStatus.FAILED
    assert "ended with status 1: RuntimeError: the lake is on fire" in sample.error


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        pytest.param({"id": "Nope-v1"}, "gym.id: Nope-v1 cannot be made: NameNotFound", id="id"),
        pytest.param(
            {"id": "a", "module": "nope"}, "gym.module: cannot import nope in .*No module", id="pip"
        ),
        pytest.param(LAKE | {"args": {"warm": True}}, "gym.id: .*TypeError: .*'warm'", id="args"),
        pytest.param(LAKE | {"actions": MOVES[:3]}, "gym.actions: expected 4 diff", id="actions"),
        pytest.param(
            LAKE | {"actions": MOVES, "function": COMPASS}, "leave actions out", id="both"
        ),
        pytest.param(
            {"make": ECHO["make"].replace("Echo", "Camera")},
            "gym.function: an observation of 3072 numbers, as in a picture: set one .* or show a "
            "picture to a vision-language model with data.images",
            id="a picture",
        ),
        pytest.param(
            {"make": ECHO["make"].replace("Echo", "Camera"), "function": LENS},
            "gym.function: observation.. gave a picture, .* set data.images: {}",
            id="a function's picture",
        ),
        pytest.param(
            {"make": "gymnasium.spaces.Nothing"}, "gym.make: .* has no function Nothing", id="make"
        ),
        pytest.param(
            LAKE | {"function": COMPASS.replace("Compass", "Silent")},
            "gym.function: .* gave Silent: expected an object with observation",
            id="function",
        ),
        pytest.param(
            LAKE | {"function": "no/such.py:f"}, "gym.function: cannot import .*such.py", id="file"
        ),
    ],
)
def test_an_environment_that_cannot_be_played_is_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        gym_play.load(
            json.loads(package_environments.gym_fork_server(Gym(**settings), "python", {}).config)
        )
    assert re.search(words, str(ended.value))


@pytest.mark.parametrize(
    ("settings", "texts"),
    [
        pytest.param({}, [], id="an observation"),
        pytest.param({"function": LENS}, ["left:", "right:"], id="a user's function"),
        pytest.param(
            {"make": ECHO["make"].replace("Echo", "Easel"), "args": {"render_mode": "rgb_array"}},
            [],
            id="a drawing",
        ),
    ],
)
def test_pictures_are_shown_to_a_model_that_gets_images(
    settings: dict[str, Any], texts: list[str]
) -> None:
    gym = Gym(**{"make": ECHO["make"].replace("Echo", "Camera")} | settings)
    config = package_environments.gym_fork_server(gym, "python", {}, images=True).config
    loaded = gym_play.load(json.loads(config))
    observation, info = loaded.env.reset(seed=1)
    parts = gym_play.observation_parts(loaded, observation, info)
    (message,) = gym_play.opening({"prompt": "Go."}, parts, "it")
    first, *images, last = message["content"]
    assert [part["text"] for part in (first, last)] == [
        "\n\n".join(["Go.", *texts[:1]]),
        "Answer with it.",
    ]
    assert [part["text"] for part in images if part["type"] == "text"] == texts[1:]
    sent = [part["image_url"]["url"] for part in images if part["type"] == "image_url"]
    pictures = [part for part in parts if not isinstance(part, str)]
    for url, picture in zip(sent, pictures, strict=True):
        file = io.BytesIO(base64.b64decode(url.removeprefix("data:image/png;base64,")))
        with Image.open(file) as image:
            assert (image.format, image.mode) == ("PNG", "RGB")
            assert np.array_equal(np.asarray(image), picture)


def test_a_row_with_images_keeps_them_before_the_first_observation() -> None:
    shown = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    question = [{"type": "text", "text": "Here:"}, shown, {"type": "text", "text": "Cross."}]
    row = {"prompt": "", "messages": [{"role": "user", "content": question}]}
    (message,) = gym_play.opening(row, ["ice"], "it")
    assert message["content"] == [
        *question[:2],
        {"type": "text", "text": "Cross.\n\nice\n\nAnswer with it."},
    ]


async def test_a_broken_environment_is_an_error_before_the_first_episode() -> None:
    async with gym_program(**LAKE, actions=MOVES) as program:
        await program.check()
    async with gym_program(id="Nope-v1") as program:
        with pytest.raises(
            ConfigurationError, match=r"gym Nope-v1 cannot be loaded: .* gym\.id: Nope"
        ):
            await program.check()


@pytest.mark.parametrize(
    ("row", "contents"),
    [
        pytest.param({"prompt": "Cross."}, ["Cross.\n\nice\n\nAnswer with it."], id="a text"),
        pytest.param(
            {"prompt": "b", "messages": [{"role": "system", "content": "a"},
                                         {"role": "user", "content": "b"}]},
            ["a", "b\n\nice\n\nAnswer with it."],
            id="messages",
        ),
        pytest.param(
            {"prompt": "", "messages": [{"role": "system", "content": "a"}]},
            ["a", "ice\n\nAnswer with it."],
            id="nothing of a user",
        ),
    ],
)  # fmt: skip
def test_the_first_messages(row: dict[str, Any], contents: list[str]) -> None:
    messages = gym_play.opening(row, ["ice"], "it")
    assert [message["content"] for message in messages] == contents
    assert messages[-1]["role"] == "user"
