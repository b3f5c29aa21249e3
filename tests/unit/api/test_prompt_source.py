"""The source of a job's prompts: a file, or the user's own code."""

import pytest
from pydantic import ValidationError

from sluice.api.groups.data import PromptSource

SOURCE = {"function": "package.tasks.additions"}


@pytest.mark.parametrize("fields", [{}, {"path": "x.jsonl", "source": SOURCE}], ids=str)
def test_a_prompt_source_has_either_path_or_source(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="exactly one of path"):
        PromptSource.model_validate(fields)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"path": "dir/x.jsonl@[0:3]"}, "x"),
        ({"source": SOURCE}, "additions"),
        ({"source": {"function": "a/b.py:make"}}, "make"),
        ({"source": SOURCE, "name": "sums"}, "sums"),
    ],
)
def test_a_prompt_source_is_named_by_name_file_or_function(
    fields: dict[str, object], name: str
) -> None:
    assert PromptSource.model_validate(fields).source_name == name
