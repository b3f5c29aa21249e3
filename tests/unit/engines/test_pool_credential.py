"""A job's credential in a pool: signed by the pool, bound to name and weight."""

from __future__ import annotations

import pytest

from sluice.engines.plugin_common.pool_credential import (
    TAG_END,
    created_of,
    credential,
    job_of,
    name_start,
    tag_of,
    verified_tag,
    weight_of,
)

KEY, OTHER_KEY = "ab" * 32, "cd" * 32


def test_a_credential_says_who_calls() -> None:
    text = credential(KEY, "team/math", 3, 1700000000)
    tag = verified_tag(KEY, text)
    assert tag == "team/math:3:1700000000"
    assert (job_of(tag), weight_of(tag), created_of(tag)) == ("team/math", 3, 1700000000)
    assert tag_of(f"{tag}{TAG_END}request-1") == tag
    assert tag_of(f"{name_start(text)}request-1") == tag


@pytest.mark.parametrize(
    "text",
    [
        "",
        ":",
        "team/math:3",
        credential(OTHER_KEY, "team/math", 3, 7),
        credential(KEY, "team/math", 3, 7).replace("math:3", "math:9"),
        credential(KEY, "team/math", 3, 7).replace(":7:", ":8:"),
        credential(KEY, "team/math", 3, 7).replace("math", "code"),
        credential(KEY, "team/math", 3, 7) + "0",
        "tëam/math:3:" + "0" * 64,
    ],
    ids=[
        "empty",
        "no tag",
        "no signature",
        "another key",
        "another weight",
        "another time",
        "another job",
        "a longer signature",
        "not ASCII",
    ],
)
def test_a_forged_credential_is_nobodys(text: str) -> None:
    assert verified_tag(KEY, text) == ""


def test_a_name_without_a_tag_is_nobodys() -> None:
    assert tag_of("request-1") == ""
    assert (weight_of(""), created_of("")) == (1, 0)
    assert name_start("") == ""
