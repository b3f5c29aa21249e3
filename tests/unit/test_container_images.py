"""The image of a row, and the list of images that rows may name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from sluice.container_images import (
    ALLOWED_PATTERN,
    PATTERN,
    RowImageError,
    image_of_row,
    is_allowed,
)

DIGEST = f"sha256:{'0' * 64}"


@pytest.mark.parametrize(
    ("image", "allowed", "expected"),
    [
        ("ghcr.io/me/app:1", "ghcr.io/me/", True),
        ("ghcr.io/me/deep/app:1", "ghcr.io/me/", True),
        ("ghcr.io/mean/app:1", "ghcr.io/me/", False),
        ("ghcr.io/me/app:1", "ghcr.io/", True),
        ("ghcr.io.evil.com/me/app:1", "ghcr.io/", False),
        ("localhost:5000/app", "localhost:5000/", True),
        ("localhost:5001/app", "localhost:5000/", False),
        ("ghcr.io/me/app:1", "ghcr.io/me/app", True),
        (f"ghcr.io/me/app@{DIGEST}", "ghcr.io/me/app", True),
        ("ghcr.io/me/application:1", "ghcr.io/me/app", False),
        ("ghcr.io/me/app:1", "ghcr.io/me/app:1", True),
        (f"ghcr.io/me/app:1@{DIGEST}", "ghcr.io/me/app:1", True),
        ("ghcr.io/me/app:2", "ghcr.io/me/app:1", False),
        ("swebench/a:1", "docker.io/swebench/", True),
        ("docker.io/swebench/a:1", "swebench/", True),
        ("swebench/a:1", "ghcr.io/swebench/", False),
        ("python:3.12", "python", True),
        ("docker.io/library/python:3.12", "python", True),
        ("me/python:3.12", "python", False),
    ],
)
def test_the_list_allows_an_image(image: str, allowed: str, expected: bool) -> None:
    assert is_allowed(image, [allowed]) is expected
    assert is_allowed(image, ["example.org/other", allowed]) is expected
    assert not is_allowed(image, [])


@pytest.mark.parametrize(
    ("image", "metadata", "expected"),
    [
        ("{metadata.image}", {"image": "ghcr.io/me/a:1"}, "ghcr.io/me/a:1"),
        ("ghcr.io/me/{metadata.id}:1", {"id": "django__django-11099"}, None),
        ("ghcr.io/me/{metadata.a}:{metadata.b}", {"a": "x.y", "b": "V-2"}, "ghcr.io/me/x.y:V-2"),
    ],
)
def test_a_row_names_its_image(image: str, metadata: dict[str, Any], expected: str | None) -> None:
    named = image_of_row(image, metadata, ["ghcr.io/me/"])
    assert named == (expected or "ghcr.io/me/django__django-11099:1")


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, "metadata.image: expected the name of an image, found no such key"),
        ({"image": None}, "metadata.image: expected the name of an image, found None"),
        ({"image": ["ghcr.io/me/a"]}, "found ['ghcr.io/me/a']"),
        ({"image": ""}, "found ''"),
        ({"image": {"x": "y" * 10_000}}, "found {'x': 'yyy"),
        ({"image": "ghcr.io/me/A B"}, "'ghcr.io/me/A B' is not the name of an image"),
        ({"image": "ghcr.io/me/../other/a"}, "is not the name of an image"),
        ({"image": "ghcr.io/me/a:1\n"}, "is not the name of an image"),
        ({"image": f"ghcr.io/me/{'a' * 10_000}"}, "is not the name of an image"),
        ({"image": "ghcr.io/me/" + "a-" * 200 + "!"}, "is not the name of an image"),
        ({"image": "--help"}, "is not the name of an image"),
        ({"image": "evil.com/me/a"}, "the image evil.com/me/a is not on the list"),
    ],
    ids=[
        "no key",
        "null",
        "a list",
        "empty",
        "an object",
        "spaces",
        "dots",
        "a line break",
        "long",
        "many dashes",
        "an option",
        "another registry",
    ],
)
def test_a_row_without_a_usable_image_is_refused(metadata: dict[str, Any], message: str) -> None:
    with pytest.raises(RowImageError, match=re.escape(message)) as refused:
        image_of_row("{metadata.image}", metadata, ["ghcr.io/me/"])
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize("image", ["{label}", "{metadata.}", "a b", "{metadata.a", "", "a}"])
def test_other_references_are_no_image(image: str) -> None:
    assert not re.search(PATTERN, image)


def test_an_entry_of_the_list_has_no_wildcard() -> None:
    assert not re.search(ALLOWED_PATTERN, "ghcr.io/me/*")
