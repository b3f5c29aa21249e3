"""spec.reward.terms: what is added to the reward of training samples, whoever judges them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, PositiveFloat, PositiveInt
from sluice.api.schema.rules import any_set, belong_together, field, only_with, requires

RewardTermType = Literal["format", "length", "repetition"]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=63)]


class RewardTerm(Model):
    """Term that is added to the reward: weight * its value for the response."""

    type: RewardTermType = Field(
        description="format: 1 if the response has all tags, each once and in order, else 0. "
        "repetition: minus the fraction of its n-grams that occurred before. length: between "
        "0 and -1 on a cosine; the longer a right response (reward 1) and the shorter a "
        "wrong one, the lower."
    )
    weight: PositiveFloat = Field(1.0, description="Factor of the term.")
    tags: Annotated[list[Tag], Field(min_length=1, max_length=8)] | None = Field(
        None,
        description="Tags of format: `[think, answer]` is <think>...</think> "
        "<answer>...</answer>. Default: [think].",
    )
    opened: bool = Field(
        False, description="The chat template has already opened the first tag of format."
    )
    ngram: PositiveInt | None = Field(
        None, description="Number of tokens of an n-gram, for repetition. Default: 3."
    )
    longest: PositiveInt | None = Field(
        None, description="Number of tokens at which the cosine of length ends."
    )

    rules = (
        requires(
            any_set("tags", "opened"),
            field("type") == "format",
            "only the term format looks at tags",
            "tags",
            reason="FieldValueForbidden",
        ),
        only_with("ngram", field("type") == "repetition", "only the term repetition has n-grams"),
        belong_together(
            field("type") == "length",
            field("longest").is_set,
            "longest belongs to the term length, which needs it",
            "longest",
        ),
    )
