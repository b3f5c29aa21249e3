"""spec.reward.terms: what is added to the reward of training samples, whoever judges them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, PositiveFloat, PositiveInt
from sluice.api.schema.rules import any_given, belong_together, field, only_with, requires

RewardTermType = Literal["format", "length", "repetition"]
Tag = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_-]*$", max_length=63)]


class RewardTerm(Model):
    """A further term of the reward: weight * what it finds in the response."""

    type: RewardTermType = Field(
        description="format: 1 where the response has all tags, each once and in order, else 0; "
        "repetition: minus the share of its n-grams that were there before; length: between 0 and "
        "-1 on a cosine, the lower, the longer a right response (reward 1) and the shorter a wrong "
        "one is."
    )
    weight: PositiveFloat = Field(1.0, description="The term is multiplied by it.")
    tags: Annotated[list[Tag], Field(min_length=1, max_length=8)] | None = Field(
        None,
        description="Of format: `[think, answer]` is <think>...</think> <answer>...</answer>. "
        "Default: [think].",
    )
    opened: bool = Field(
        False, description="Of format: the chat template has opened the first tag already."
    )
    ngram: PositiveInt | None = Field(
        None, description="Of repetition: tokens of an n-gram. Default: 3."
    )
    longest: PositiveInt | None = Field(
        None, description="Of length: tokens at which the cosine ends."
    )

    rules = (
        requires(
            any_given("tags", "opened"),
            field("type") == "format",
            "only the term format looks at tags",
            "tags",
            reason="FieldValueForbidden",
        ),
        only_with("ngram", field("type") == "repetition", "only the term repetition has n-grams"),
        belong_together(
            field("type") == "length",
            field("longest").given,
            "longest belongs to the term length, which needs it",
            "longest",
        ),
    )
