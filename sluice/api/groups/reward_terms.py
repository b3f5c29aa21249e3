"""spec.reward.terms: what is added to the reward of training samples, whoever judges them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.schema.base import Model, PositiveFloat, PositiveInt, Rule

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
        Rule(
            "self.type == 'format' || !(has(self.tags) || self.opened)",
            lambda t: t.type == "format" or not (t.tags or t.opened),
            "only the term format looks at tags",
            "tags",
            reason="FieldValueForbidden",
        ),
        Rule(
            "self.type == 'repetition' || !has(self.ngram)",
            lambda t: t.type == "repetition" or t.ngram is None,
            "only the term repetition has n-grams",
            "ngram",
            reason="FieldValueForbidden",
        ),
        Rule(
            "(self.type == 'length') == has(self.longest)",
            lambda t: (t.type == "length") == (t.longest is not None),
            "longest belongs to the term length, which needs it",
            "longest",
        ),
    )
