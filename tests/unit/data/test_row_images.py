"""Rows with images: their placeholders, their order, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.api.groups.data import ImageLimits, PromptSource
from sluice.data.messages import MessageError, normalised
from sluice.data.rows import RowError, parse_row
from sluice.images.image import image_part, referred, with_digests
from sluice.images.reading import RawImage

LIMITS = ImageLimits()
URL = "data:image/png;base64,AAAA"


def source(**values: Any) -> PromptSource:
    return PromptSource.model_validate({"path": "rows.jsonl", **values})


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def names(images: tuple[RawImage, ...]) -> list[str]:
    return [image.name for image in images]


def paths(images: tuple[RawImage, ...]) -> list[str]:
    return [str(image.source) for image in images]


TEXT = {"type": "text", "text": "What?"}
PART = image_part("")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (user("<image>What?"), user([PART, TEXT])),
        (user("What?<image>"), user([TEXT, PART])),
        (user([{"type": "image"}, TEXT]), user([PART, TEXT])),
        (user([TEXT, {"type": "image_url"}]), user([TEXT, PART])),
        (
            [{"role": "system", "content": "Look."}, *user("<image>")],
            [{"role": "system", "content": "Look."}, *user([PART])],
        ),
    ],
    ids=["text", "behind the text", "part", "OpenAI part", "system"],
)
def test_a_placeholder_takes_the_next_image_of_the_column(prompt: Any, expected: Any) -> None:
    row = {"prompt": prompt, "images": ["a.png"]}
    parsed = parse_row(row, source(), LIMITS)
    assert parsed.prompt == expected
    assert paths(parsed.images) == ["a.png"]
    assert names(parsed.images) == ["images[0]"]


@pytest.mark.parametrize(
    "column",
    ["a.png", ["a.png"], '["a.png"]', {"path": "a.png"}, [{"bytes": None, "path": "a.png"}]],
    ids=str,
)
def test_the_column_may_have_any_form(column: Any) -> None:
    parsed = parse_row({"prompt": user("<image>"), "pic": column}, source(imagesKey="pic"), LIMITS)
    assert paths(parsed.images) == ["a.png"]


def test_images_in_parts_and_in_the_column_keep_the_order_of_the_prompt() -> None:
    prompt = [
        *user([{"type": "image", "image": "b.png"}, {"type": "image"}, TEXT]),
        {"role": "assistant", "content": "A cat."},
        *user("And <image>?"),
        *user([{"type": "image_url", "image_url": {"url": URL}}]),
    ]
    parsed = parse_row({"prompt": prompt, "images": ["c.png", "d.png"]}, source(), LIMITS)
    assert names(parsed.images) == [
        "prompt[0].content[0]",
        "images[0]",
        "images[1]",
        "prompt[3].content[0]",
    ]
    digests = [f"{i:064x}" for i in range(4)]
    filled = with_digests(parsed.prompt, digests)
    assert referred(filled) == digests
    assert referred([normalised(message) for message in filled if isinstance(message, dict)]) == (
        digests
    )


def test_a_text_prompt_becomes_a_message_that_the_template_renders() -> None:
    row = {"prompt": "<image>What?", "images": ["a.png"]}
    parsed = parse_row(row, source(applyChatTemplate=True), LIMITS)
    assert parsed.prompt == user([PART, TEXT])
    with pytest.raises(RowError, match="prompt: a text with images needs applyChatTemplate: true"):
        parse_row(row, source(), LIMITS)


@pytest.mark.parametrize("prompt", ["What?", user("What?"), user([TEXT])], ids=str)
@pytest.mark.parametrize("column", [{}, {"images": None}, {"images": []}], ids=str)
def test_a_row_without_images_is_as_in_any_job(prompt: Any, column: dict[str, Any]) -> None:
    row = {"prompt": prompt, **column}
    assert parse_row(row, source(), LIMITS) == parse_row(row, source())
    assert parse_row(row, source(), LIMITS).prompt == prompt


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (
            {"prompt": user("What?"), "images": ["a.png"]},
            "images: 1 images for 0 <image> placeholders in prompt; expected one placeholder",
        ),
        ({"prompt": user("<image><image>"), "images": ["a"]}, "1 images for 2 <image>"),
        ({"prompt": user("<image>")}, "0 images for 1 <image>"),
        ({"prompt": user([{"type": "image", "image": URL}]), "images": ["a"]}, "1 images for 0"),
        (
            {"prompt": user("<image>" * 17), "images": ["a"] * 17},
            "images: 17 images, and data.images.maxPerPrompt is 16",
        ),
        ({"prompt": user("<image>"), "images": [3]}, r"images\[0\]: expected an image: a path"),
        (
            {"prompt": user("<image>"), "images": ["http://a/b.png"]},
            r"images\[0\]: 'http://a/b.png' is not fetched",
        ),
        ({"prompt": user("<video>"), "videos": ["a.mp4"]}, "videos: sluice reads no video"),
        (
            {"prompt": user([{"type": "video", "video": "a.mp4"}])},
            r"prompt\[0\].content\[0\]: sluice reads no video",
        ),
        ({"prompt": user([{"type": "input_audio"}])}, "reads no video and no sound"),
        ({"prompt": user("<image>"), "images": "[1"}, "images: not valid JSON"),
        ({"prompt": user([{"type": []}])}, r"prompt\[0\]: content: expected a text"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_rows_that_do_not_fit_together_are_refused(row: dict[str, Any], reason: str) -> None:
    with pytest.raises(RowError, match=reason):
        parse_row(row, source(), LIMITS)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": user("<image>"), "images": ["a.png"]},
        {"prompt": "x", "images": ["a.png"]},
        {"prompt": user([{"type": "image", "image": URL}])},
        {"prompt": user([image_part("0" * 64)])},
        {"prompt": user([{"type": "image_url", "image_url": {"url": URL}}])},
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_job_of_text_says_what_to_set(row: dict[str, Any]) -> None:
    with pytest.raises(RowError, match=r"data\.images"):
        parse_row(row, source())


def test_a_reference_of_a_client_is_no_image_of_its_own() -> None:
    with pytest.raises(MessageError, match="content: expected a text"):
        normalised({"role": "user", "content": [{"type": "image", "image": "a.png"}]})


def test_parsing_reads_no_file(tmp_path: Path) -> None:
    row = {"prompt": user("<image>"), "images": [str(tmp_path / "none.png")]}
    assert len(parse_row(row, source(), LIMITS).images) == 1


texts = st.text(st.sampled_from("ab <"), max_size=4).filter(lambda text: "<image>" not in text)


@given(st.lists(st.lists(texts, min_size=1, max_size=4), min_size=1, max_size=4))
def test_any_number_of_placeholders_keeps_texts_and_order(messages: list[list[str]]) -> None:
    prompt = [{"role": "user", "content": "<image>".join(pieces)} for pieces in messages]
    count = sum(len(pieces) - 1 for pieces in messages)
    column = [f"{i}.png" for i in range(count)]
    parsed = parse_row({"prompt": prompt, "images": column}, source(), LIMITS)
    assert paths(parsed.images) == column
    for pieces, message in zip(messages, parsed.prompt, strict=True):
        assert isinstance(message, dict)
        content = message["content"]
        shown = content if isinstance(content, list) else [{"type": "text", "text": content}]
        texts = ["<image>" if part == PART else part["text"] for part in shown]
        assert "".join(texts) == "<image>".join(pieces)


@pytest.mark.parametrize("images", [None, ImageLimits()], ids=["without images", "with images"])
@pytest.mark.parametrize("videos", ["a.mp4", ["a.mp4"], {"path": "a.mp4"}], ids=str)
def test_videos_of_any_form_are_refused(images: ImageLimits | None, videos: object) -> None:
    with pytest.raises(RowError, match="videos: sluice reads no video"):
        parse_row({"prompt": "What?", "videos": videos}, PromptSource(path="rows.jsonl"), images)
