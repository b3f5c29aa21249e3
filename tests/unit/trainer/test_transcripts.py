"""Transcripts of episodes in the records of samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sluice.samples.sample import Prompt, Sample, SampleGroup, TokenSequence, WeightSpan
from sluice.samples.turns import BRANCH_TURNS, TURNS
from sluice_trainer.telemetry.recorder import Recorder
from sluice_trainer.telemetry.transcripts import (
    MOST_TOKENS,
    LazyDecoder,
    chosen,
    transcript,
)


def decode(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))


def model(turn: int, length: int, **more: Any) -> dict[str, Any]:
    return {"by": "model", "length": length, "finish": "stop", "turn": turn, **more}


def tool(length: int) -> dict[str, Any]:
    return {"by": "environment", "length": length, "finish": "stop"}


def sequence(kind: Any, prompt: list[int], response: list[int], **fields: Any) -> Any:
    made = kind(**fields)
    made.tokens = np.asarray(prompt, np.int32)
    made.append(response, [-1.0] * len(response), [WeightSpan(0, 0, len(response))])
    return made


def episode(**fields: Any) -> Sample:
    """Two turns with a tool between them, and a branch from the first one."""
    sample = sequence(Sample, [1, 2], [3, 4, 5, 6, 7], index=0, **fields)
    sample.branches = [sequence(TokenSequence, [1, 2], [3, 4, 8, 9])]
    sample.metadata = {
        TURNS: [model(0, 2, reward=0.5), tool(2), model(1, 1, stop="x")],
        BRANCH_TURNS: [[model(0, 2, reward=0.5), tool(1), model(2, 1)]],
    }
    return sample


def test_each_turn_is_told_once() -> None:
    main, branch = transcript(episode(), decode)
    assert main == {
        "turns": [
            {"by": "environment", "text": "1 2", "tokens": 2},
            {"by": "model", "text": "3 4", "tokens": 2, "turn": 0, "finish": "stop", "reward": 0.5},
            {"by": "environment", "text": "5 6", "tokens": 2},
            {"by": "model", "text": "7", "tokens": 1, "turn": 1, "finish": "stop", "stop": "x"},
        ]
    }
    assert branch == {
        "after": 0,
        "turns": [
            {"by": "environment", "text": "8", "tokens": 1},
            {"by": "model", "text": "9", "tokens": 1, "turn": 2, "finish": "stop"},
        ],
    }


def test_images_belong_to_the_turn_that_sees_them() -> None:
    sample = episode(images=["a", "b", "c"])
    sample.metadata[TURNS][0]["images"] = 1
    sample.metadata[TURNS][2]["images"] = 2
    main, _ = transcript(sample, decode)
    assert [turn.get("images") for turn in main["turns"]] == [None, ["a"], None, ["b", "c"]]


def test_a_long_turn_is_cut() -> None:
    sample = sequence(Sample, [1], [2] * (MOST_TOKENS + 5), index=0)
    sample.metadata = {TURNS: [model(0, MOST_TOKENS + 5)]}
    (main,) = transcript(sample, decode)
    text = main["turns"][1]["text"]
    assert text.endswith(" ... (5 more tokens)")
    assert len(text.split()) == MOST_TOKENS + 4
    assert main["turns"][1]["tokens"] == MOST_TOKENS + 5


@pytest.mark.parametrize(
    ("rewards", "kept"),
    [
        pytest.param([0.0, 1.0, 0.5], [1, 0], id="the best and the worst"),
        pytest.param([0.5], [0], id="one"),
        pytest.param([], [], id="none"),
        pytest.param([None, 1.0], [1, 0], id="one without a reward"),
    ],
)
def test_a_group_has_two_transcripts(rewards: list[float | None], kept: list[int]) -> None:
    samples = [episode(reward=reward) for reward in rewards]
    for index, sample in enumerate(samples):
        sample.index = index
    plain = Sample(9)
    group = SampleGroup(Prompt(0, "?"), [plain, *samples])
    assert [sample.index for sample in chosen(group)] == kept


def test_the_recorder_writes_transcripts_of_episodes(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path, 1, decode=decode)
    samples = [episode(reward=1.0), episode(reward=0.0), episode(reward=0.5), Sample(3)]
    recorder.samples(1, [SampleGroup(Prompt(0, "?"), samples)])
    recorder.close()
    text = (tmp_path / "samples/step_0000001.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    assert ["transcript" in row for row in rows] == [True, True, False, False]
    assert rows[0]["transcript"][0]["turns"][1]["text"] == "3 4"


def test_a_trainer_without_a_tokenizer_writes_no_texts(tmp_path: Path) -> None:
    decoder = LazyDecoder(tmp_path, trust_remote_code=False)
    main, _ = transcript(episode(), decoder)
    assert [turn["text"] for turn in main["turns"]] == [""] * 4
    assert [turn["tokens"] for turn in main["turns"]] == [2, 2, 2, 1]
