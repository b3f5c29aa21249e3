"""Prompts with images become compact tokens, and count as long as the engine makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from sluice.api import RLJobSpec
from sluice.data.chat import PromptError
from sluice.images.image import Image, image_part
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Messages, Prompt
from sluice_rollout.prompts import PromptEncoder, PromptTooLongError
from tests.vision_models import FAMILIES, make_model, picture

SMALL, LARGE = picture(64, 64), picture(200, 100)


@pytest.fixture(scope="module", params=FAMILIES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("vision") / "model", request.param)


def encoder(model: Path, **data: Any) -> PromptEncoder:
    spec = {
        "model": {"path": str(model)},
        "data": {"prompts": [{"path": "rows.jsonl"}], "images": {}, **data},
        "reward": {"type": "exact_match"},
        "rollout": {"sampling": {"maxResponseTokens": 16}},
        "trainer": {"backend": "fsdp", "steps": 1},
    }
    return PromptEncoder(RLJobSpec.model_validate(spec), model)


def row(*images: Image, text: str = "Which is larger?") -> Prompt:
    parts = [image_part(image.digest) for image in images]
    content = [*parts, {"type": "text", "text": text}]
    messages = [{"role": "user", "content": content}]
    return Prompt(0, messages, dataset="rows", row=3, images=[image.digest for image in images])


def test_each_image_is_one_token_and_counts_as_long_as_it_is(model: Path) -> None:
    prompts = encoder(model)
    images = [SMALL, LARGE]
    ids = prompts.encode(row(*images), images)
    processor = prompts.image_processor
    assert processor is not None
    assert ids.count(processor.placeholder) == 2
    sizes = [processor.tokens_of(image.width, image.height) for image in images]
    assert prompts.image_tokens(images) == sum(sizes) - 2 > 15

    length = len(ids) + prompts.image_tokens(images)
    assert encoder(model, maxPromptTokens=length).encode(row(*images), images) == ids
    with pytest.raises(PromptTooLongError, match=f"row 3: the prompt has {length} tokens"):
        encoder(model, maxPromptTokens=length - 1).encode(row(*images), images)


@pytest.mark.parametrize(
    ("prompt", "images", "message"),
    [
        pytest.param(
            row(SMALL, text="a <|image_pad|> in a text"),
            [SMALL],
            "rows row 3: the prompt has 2 placeholders <|image_pad|> for 1 images",
            id="a placeholder in a text",
        ),
        pytest.param(
            row(text="<|image_pad|>"),
            [],
            "the prompt has 1 placeholders <|image_pad|> for 0 images",
            id="a placeholder without an image",
        ),
        pytest.param(
            Prompt(0, "What is it?", dataset="rows", row=3, images=[SMALL.digest]),
            [SMALL],
            "a plain text has no places for its 1 images: write the prompt as chat messages",
            id="a plain text",
        ),
        pytest.param(
            row(picture(1000, 4)), [picture(1000, 4)], "1000x4 pixels", id="a shape out of bounds"
        ),
    ],
)
def test_a_prompt_that_does_not_fit_its_images_is_refused(
    model: Path, prompt: Prompt, images: list[Image], message: str
) -> None:
    with pytest.raises(PromptError) as error:
        encoder(model).encode(prompt, images)
    assert message in str(error.value)


def test_a_template_without_images_is_refused(model: Path) -> None:
    prompts = encoder(model)
    prompts.tokenizer.chat_template = "{% for m in messages %}{{ m.role }}{% endfor %}"
    with pytest.raises(PromptError, match="expected a chat template that writes one"):
        prompts.encode(row(SMALL), [SMALL])


def test_a_model_without_images_is_a_wrong_configuration(model: Path, tmp_path: Path) -> None:
    for file in model.iterdir():
        if "preprocessor" not in file.name:
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(ConfigurationError, match="no preprocessor_config"):
        encoder(tmp_path)


def test_messages_without_images_are_encoded_as_ever(model: Path) -> None:
    messages: Messages = [{"role": "user", "content": "What?"}]
    assert encoder(model).encode(Prompt(0, messages)) == encoder(model).encode(row(text="What?"))
