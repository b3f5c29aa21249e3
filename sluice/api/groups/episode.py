"""An episode, whatever plays it: other models that it may ask, its seats, and its bounds."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sluice.api.groups.lifecycle import SecretKey
from sluice.api.schema.base import Model, PositiveFloat, PositiveInt
from sluice.api.schema.rules import field, only_with


class OtherModel(Model):
    """Model that episodes may ask in addition to the trained one. It is not trained."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = Field(
        description="Name by which programs ask for it, `model` of a request."
    )
    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)] = Field(
        description="Address of its server, such as `http://judge:30000/v1`, in the protocol "
        "of the program."
    )
    model: Annotated[str, Field(min_length=1, max_length=253)] | None = Field(
        None, description="Name of the model on its server. Default: `name`."
    )
    key: SecretKey | None = Field(
        None,
        description="API key of its server. On a laptop the environment variable NAME_API_KEY.",
    )
    timeout_seconds: PositiveFloat = Field(600.0, description="Timeout of one answer, in seconds.")

    @property
    def key_variable(self) -> str:
        """The worker's variable that holds the key: JUDGE_API_KEY for `judge`."""
        return f"{self.name.upper().replace('-', '_')}_API_KEY"


class EpisodeSeat(Model):
    """Player of an episode that the trained model plays."""

    name: Annotated[str, Field(pattern=r"^[a-z]([-a-z0-9]*[a-z0-9])?$", max_length=63)] = Field(
        description="Name by which programs ask for it, `model` of a request."
    )


class Summary(Model):
    """Summaries of `overflow: summarise`."""

    prompt: Annotated[str, Field(min_length=1, max_length=8192)] = Field(
        "The conversation is too long to go on. Summarise it for yourself: the task, what has been "
        "done and found out, and what is left to do. You will go on from the task and your summary "
        "alone. Answer with the summary and nothing else.",
        description="Message that asks the model for a summary.",
    )
    tokens: PositiveInt = Field(
        512,
        description="Largest number of tokens of a summary, which are kept free for it. A "
        "longer summary ends the episode.",
    )
    most: PositiveInt = Field(
        8,
        description="Largest number of summaries in an episode. After the last one, an "
        "episode whose history does not fit ends.",
    )


class EpisodeLimits(Model):
    """Limits of an episode, whatever plays it. Turns and branches are those at the gateway."""

    seconds: PositiveFloat | None = Field(
        None,
        description="Longest time of an episode in seconds, from its first turn: at the engine, "
        "in tools, and waiting. Default: unlimited. `functionSeconds` limits each time "
        "between two turns.",
    )
    on_timeout: Literal["truncate", "fail"] = Field(
        "truncate",
        description="What happens after `seconds`. truncate: the turn is cut off and no other is "
        "generated; what does not end within 30 s is ended. The sample is truncated, and judged by "
        "what there is. fail: what plays the episode is ended at once, and the sample fails.",
    )

    turns: PositiveInt = Field(
        256,
        description="Largest number of turns of the model, over all branches. A further turn "
        "is refused as if it did not fit, and the sample is truncated.",
    )
    branches: PositiveInt = Field(
        64,
        description="Largest number of branches of the conversation, each of which is "
        "trained as a sequence. A further branch is refused likewise.",
    )
    turn_tokens: PositiveInt | None = Field(
        None,
        description="Largest number of tokens of one turn. Default: what is left of "
        "maxResponseTokens.",
    )
    overflow: Literal["stop", "drop_tool_results", "summarise"] = Field(
        "stop",
        description="What happens if the history leaves no space for a turn (of "
        "`turnTokens`, if set). stop: the turn is refused, and the sample truncated. "
        "drop_tool_results: the model no longer sees the oldest results of tools, and "
        "continues in another branch. summarise: it continues from a summary that it writes "
        "itself and that is trained too.",
    )
    summary: Summary = Field(default_factory=Summary)

    rules = (
        only_with("onTimeout", field("seconds").is_set, "onTimeout needs seconds; set both"),
        only_with(
            "summary",
            field("overflow") == "summarise",
            "summary needs overflow: summarise; set that, or leave it out",
        ),
    )
