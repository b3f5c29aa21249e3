"""An episode, whatever plays it: other models that it may ask, its seats, and its bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.lifecycle import SecretKey
from sluice.api.schema.base import Model, PositiveFloat, PositiveInt
from sluice.api.schema.rules import field, only_with


class OtherModel(Model):
    """A model that episodes may ask besides the one that is trained. Nothing of it is trained."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = Field(
        description="What a program asks for, as `model` of its request."
    )
    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] = Field(
        description="Its server, as `http://judge:30000/v1`: it speaks what the program speaks."
    )
    model: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None, description="Its name there. Default: `name`."
    )
    key: SecretKey | None = Field(
        None,
        description="The key that its server asks for. On a laptop the variable NAME_API_KEY.",
    )
    timeout_seconds: PositiveFloat = Field(600.0, description="Time of one answer.")

    @property
    def key_variable(self) -> str:
        """The worker's variable that holds the key: JUDGE_API_KEY for `judge`."""
        return f"{self.name.upper().replace('-', '_')}_API_KEY"


class EpisodeSeat(Model):
    """A player of an episode, whom the model that is trained plays."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = Field(
        description="What a program asks for, as `model` of its request."
    )


class Summary(Model):
    """The summaries of `overflow: summarise`."""

    prompt: Annotated[str, Field(min_length=1, max_length=8192)] = Field(
        "The conversation is too long to go on. Summarise it for yourself: the task, what has been "
        "done and found out, and what is left to do. You will go on from the task and your summary "
        "alone. Answer with the summary and nothing else.",
        description="The message that asks the model for one.",
    )
    tokens: PositiveInt = Field(
        512, description="Tokens of one, which stay free for it. A longer one ends the episode."
    )
    most: PositiveInt = Field(
        8, description="Of one episode. Behind the last one it ends where its history does not fit."
    )


class EpisodeLimits(Model):
    """Bounds of an episode whose program is at the gateway, whatever it does there."""

    turns: PositiveInt = Field(
        256,
        description="Turns of the model, those of all branches together. One more is refused as if "
        "it did not fit: the sample is truncated.",
    )
    branches: PositiveInt = Field(
        64,
        description="Ways through the conversation, each of which is trained as a sequence. One "
        "more is refused likewise.",
    )
    turn_tokens: PositiveInt | None = Field(
        None, description="Tokens of one turn. Default: what is left of maxResponseTokens."
    )
    overflow: Literal["stop", "drop_tool_results", "summarise"] = Field(
        "stop",
        description="What becomes of a history that leaves no room for a turn (of `turnTokens`, "
        "where that is set). `stop`: it is refused, and the sample truncated. `drop_tool_results`: "
        "the model no longer sees the oldest results of tools, and goes on in another branch. "
        "`summarise`: it goes on from a summary that it writes itself, which is trained as well.",
    )
    summary: Summary = Field(default_factory=Summary)

    rules = (
        only_with(
            "summary",
            field("overflow") == "summarise",
            "summary needs overflow: summarise; set that, or leave it out",
        ),
    )
