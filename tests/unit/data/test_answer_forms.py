"""Rows with given answers in the forms of other trainers, with and without images."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.api.groups.data import ImageLimits, PromptSource
from sluice.data.answers import Encoded, check_places, parse_answer
from sluice.data.chat import PromptError
from sluice.data.rows import RowError

LIMITS = ImageLimits()
PLACE = {"type": "image", "image": "sha256:"}
ANSWER = {"role": "assistant", "content": "a cat"}


def parsed(row: dict[str, Any], images: ImageLimits | None = LIMITS, **source: Any) -> Any:
    return parse_answer(
        row, PromptSource.model_validate({"path": "rows.jsonl", **source}), 300, images
    )


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


FORMS: dict[str, dict[str, Any]] = {
    "verl, LLaMA-Factory": {
        "messages": [{"role": "user", "content": "<image>What is it?"}, ANSWER],
        "images": ["cat.png"],
    },
    "TRL, with a place": {
        "messages": [
            {"role": "user", "content": [{"type": "image"}, text("What is it?")]},
            {"role": "assistant", "content": [text("a cat")]},
        ],
        "images": [{"bytes": b"png", "path": None}],
    },
    "TRL, without a place": {
        "messages": [{"role": "user", "content": "What is it?"}, ANSWER],
        "images": ["cat.png"],
    },
    "TRL, prompt and completion": {
        "prompt": [{"role": "user", "content": "What is it?"}],
        "completion": [ANSWER],
        "images": ["cat.png"],
    },
    "LLaVA": {
        "conversations": [
            {"from": "human", "value": "<image>What is it?"},
            {"from": "gpt", "value": "a cat"},
        ],
        "images": "cat.png",
    },
    "OpenAI": {
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "image_url", "image_url": {"url": "cat.png"}},
                    text("What is it?"),
                ],
            },
            ANSWER,
        ]
    },
}


@pytest.mark.parametrize("row", FORMS.values(), ids=FORMS)
def test_all_forms_are_one_conversation(row: dict[str, Any]) -> None:
    result = parsed(row)
    question, answer = result.prompt
    assert question == {"role": "user", "content": [PLACE, text("What is it?")]}
    assert answer["role"] == "assistant"
    assert len(result.images) == 1
    assert result.answer is None


def test_a_prompt_with_its_label_has_images_too() -> None:
    row = {"prompt": "<image>What is it?", "images": ["cat.png"], "label": "a cat"}
    result = parsed(row, applyChatTemplate=True)
    assert result.prompt == [{"role": "user", "content": [PLACE, text("What is it?")]}]
    assert (result.answer, len(result.images)) == ("a cat", 1)


def test_a_completion_of_text_is_the_answer() -> None:
    assert parsed({"prompt": "1 + 1 =", "completion": " 2"}, None).answer == " 2"
    named = parsed({"prompt": "1 + 1 =", "completion": " 2", "label": "x"}, None)
    assert named.answer == "x"


def test_what_a_prompt_has_of_the_assistant_is_not_trained() -> None:
    row = {"prompt": [{"role": "user", "content": "a"}, ANSWER], "completion": [ANSWER]}
    assert [m.get("step_loss_mask") for m in parsed(row, None).prompt] == [None, 0, None]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"messages": [{"role": "user", "content": "<image>?"}, ANSWER]},
            "images: 0 images for 1 <image> placeholders",
        ),
        (
            {"messages": [{"role": "user", "content": "<image>?"}, ANSWER], "images": ["a", "b"]},
            "images: 2 images for 1 <image> placeholders",
        ),
        ({"tokens": [1, 2], "loss_mask": [0, 1], "images": ["a"]}, "a row of token ids cannot"),
        (
            {"conversations": [{"from": "ape", "value": "?"}, {"from": "gpt", "value": "!"}]},
            r"conversations\[0\].from: expected one of human, .* found 'ape'",
        ),
        (
            {"conversations": [{"from": ["ape"], "value": "?"}]},
            r"conversations\[0\].from: expected one of",
        ),
    ],
    ids=["no image", "an image too many", "token ids", "unknown speaker", "no speaker"],
)
def test_other_rows_are_refused(row: dict[str, Any], message: str) -> None:
    with pytest.raises(RowError, match=message):
        parsed(row)


def test_images_need_the_field() -> None:
    with pytest.raises(RowError, match=r"set data\.images"):
        parsed(FORMS["TRL, without a place"], None)


class Names:
    def convert_ids_to_tokens(self, token: int) -> str:
        return f"<{token}>"


@pytest.mark.parametrize(
    ("images", "mask", "message"),
    [
        (2, [0, 0, 1], "the row has 1 placeholders <7> for 2 images"),
        (0, [0, 0, 1], "the row has 1 placeholders <7> for 0 images"),
        (1, [0, 1, 1], "a trained answer has an image"),
    ],
    ids=["too few", "too many", "in an answer"],
)
def test_each_image_needs_a_place_that_is_not_trained(
    images: int, mask: list[int], message: str
) -> None:
    encoded = Encoded([1, 7, 2], mask)
    check_places(Names(), Encoded([1, 7, 2], [0, 0, 1]), 7, 1)
    with pytest.raises(PromptError, match=message):
        check_places(Names(), encoded, 7, images)
