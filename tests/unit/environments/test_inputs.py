"""Inputs of a program: a few variables, without the worker's secrets, and its row."""

from __future__ import annotations

from typing import Any

import pytest

from sluice.images.image import Image, data_url, image_part
from sluice.samples.sample import Prompt, Purpose
from sluice_rollout.environments import inputs
from sluice_rollout.gateway.endpoint import Gateway

GATEWAY = Gateway("http://127.0.0.1:1/v1", "sk-0", print, print, lambda: False, print)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "first"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": [{"type": "text", "text": "second"}]},
]


def variables(prompt: Any = "?", label: Any = None) -> dict[str, str]:
    return inputs.episode_variables(Prompt(0, prompt, label), GATEWAY, "/e/0", "tiny")


def test_the_gateway_is_where_common_clients_look_for_it() -> None:
    seen = variables()
    assert {seen["OPENAI_BASE_URL"], seen["OPENAI_API_BASE"]} == {"http://127.0.0.1:1/v1"}
    assert seen["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"
    assert {seen["OPENAI_API_KEY"], seen["ANTHROPIC_API_KEY"]} == {"sk-0"}
    assert (seen["SLUICE_EPISODE"], seen["TMPDIR"]) == ("/e/0", "/e/0/tmp")
    assert seen["SLUICE_MODEL"] == "tiny"


@pytest.mark.parametrize(
    ("prompt", "label", "expected"),
    [
        pytest.param("2+2", "4", ("2+2", "4"), id="texts"),
        pytest.param("2+2", 4, ("2+2", "4"), id="number"),
        pytest.param("2+2", {"a": [1]}, ("2+2", '{"a": [1]}'), id="object"),
        pytest.param("2+2", None, ("2+2", ""), id="no label"),
        pytest.param(MESSAGES[:2], None, ("first", ""), id="messages"),
        pytest.param(
            MESSAGES, None, ('[{"type": "text", "text": "second"}]', ""), id="parts of a message"
        ),
        pytest.param("x" * 200_000, "4", (None, "4"), id="too long for the kernel"),
        pytest.param("a\0b", "4", (None, "4"), id="a null character"),
        pytest.param("a\ud800b", "4", (None, "4"), id="half a character"),
    ],
)
def test_prompt_and_label_are_variables(
    prompt: Any, label: Any, expected: tuple[str | None, str]
) -> None:
    seen = variables(prompt, label)
    assert (seen.get("SLUICE_PROMPT"), seen.get("SLUICE_LABEL")) == expected


def test_programs_inherit_only_a_few_variables_of_the_worker() -> None:
    worker = {
        "PATH": "/bin",
        "HOME": "/root",
        "SLUICE_TOKEN": "secret",
        "SLUICE_RENDEZVOUS": "r:1",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "PYTHONPATH": "/ours",
    }
    passed = inputs.inherited_variables(worker, {"HOME": "/home/agent", "MODE": "fast"})
    assert passed == {"PATH": "/bin", "HOME": "/home/agent", "MODE": "fast"}


def test_the_row_is_a_json_object() -> None:
    prompt = Prompt(
        7, MESSAGES, {"a": 1}, {"level": 3}, dataset="sums", row=5, purpose=Purpose.EVALUATE
    )
    assert inputs.row(prompt, 2) == {
        "prompt": '[{"type": "text", "text": "second"}]',
        "messages": MESSAGES,
        "label": {"a": 1},
        "metadata": {"level": 3},
        "tools": [],
        "dataset": "sums",
        "row": 5,
        "purpose": "evaluate",
        "seats": [],
        "group": 7,
        "sample": 2,
    }


def test_a_row_has_its_images_as_data_urls() -> None:
    cat, dog = Image("image/png", 8, 8, b"cat"), Image("image/jpeg", 8, 8, b"dog")
    text = {"type": "text", "text": "Which barks?"}
    content = [image_part(cat.digest), text, image_part(dog.digest)]
    prompt = Prompt(7, [*MESSAGES, {"role": "user", "content": content}])
    row = inputs.row(prompt, 0, (), [cat, dog])
    assert row["prompt"] == "Which barks?"
    assert row["messages"][:-1] == MESSAGES
    assert row["messages"][-1]["content"] == [
        {"type": "image_url", "image_url": {"url": data_url(cat)}},
        text,
        {"type": "image_url", "image_url": {"url": data_url(dog)}},
    ]
    assert data_url(cat) == "data:image/png;base64,Y2F0"
