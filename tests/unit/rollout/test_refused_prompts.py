"""Prompts that cannot be used: left out and counted, or failed with a reason."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.data.chat import PromptError
from sluice.images.image import Image
from sluice.samples.sample import Prompt, SampleStatus
from sluice_rollout.group import GroupMaker
from sluice_rollout.prompts import PromptTooLongError

SPEC = {
    "model": {"path": "m"}, "data": {"prompts": [{"path": "p.jsonl"}]}, "reward": {"type": "f1"},
    "trainer": {"steps": 1}, "rollout": {"samplesPerPrompt": 2},
}  # fmt: skip


class Refuses:
    """An encoder that refuses every prompt."""

    latest = None

    def __init__(self, error: PromptError) -> None:
        self.error = error

    def encode(self, prompt: Prompt, images: Sequence[Image] = ()) -> list[int]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "filtered"),
    [
        (PromptTooLongError("p row 7: 9 tokens"), "prompt_too_long"),
        (PromptError("p row 7: no such role"), None),
    ],
)
def test_only_a_prompt_that_is_too_long_counts_as_left_out(
    error: PromptError, filtered: str | None
) -> None:
    encoder: Any = Refuses(error)
    make = GroupMaker(RLJobSpec.model_validate(SPEC), encoder, encoder, encoder, encoder)
    group = asyncio.run(make.make(Prompt(0, "x", dataset="p", row=7), []))
    assert [(s.status, s.error) for s in group.samples] == [(SampleStatus.FAILED, str(error))] * 2
    assert group.samples[0].metadata.get("filtered") == filtered
    assert make.refused == {"p": 1}
