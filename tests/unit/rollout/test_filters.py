"""Dynamic filters of the user."""

from __future__ import annotations

from pathlib import Path

import pytest

from sluice.runtime import user_code
from sluice.runtime.pod_env import ConfigurationError
from sluice.samples.sample import Prompt, SampleGroup
from sluice_rollout.user_functions import filters


@pytest.mark.parametrize(("body", "reason"), [
    ("True", None), ("False", "mine"), ("None", None), ("'too easy'", "too easy"), ("0 and 1", "0"),
])  # fmt: skip
async def test_the_verdict_of_a_filter(tmp_path: Path, body: str, reason: str | None) -> None:
    (tmp_path / "filter.py").write_text(f"def mine(group):\n    return {body}\n")
    user_code.load.cache_clear()
    assert await filters.load(f"{tmp_path}/filter.py:mine")(SampleGroup(Prompt(0, "x"))) == reason


async def test_built_in_filters_keep_all_groups_in_the_worker() -> None:
    for name in (None, *filters.BUILT_IN):
        assert await filters.load(name)(SampleGroup(Prompt(0, "x"))) is None


def test_a_filter_that_cannot_be_loaded(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"spec\.rollout\.dynamicFilter: .*there is no file"
    ):
        filters.load(f"{tmp_path}/none.py:mine")
