"""Parameters that the interfaces share, checked in the same way.

The job's sampling applies whatever a client asks for (`exchange.settings`). Its values are checked
all the same: a client that sends a wrong value should learn so here and not in production.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from sluice_rollout.gateway.interfaces.errors import GatewayError, invalid

MOST_STOPS = 32  # as many as in `rollout.sampling.stop`
MOST_STOP_BYTES = 1024
MOST_STOP_IDS = 64
_LONGEST_REASON = 200
P = TypeVar("P", bound="Parameters")


def _single_answer(value: int | None) -> int | None:
    if value not in (None, 1):
        raise ValueError("one answer per request; ask again for another branch")
    return value


def _listed(value: Any) -> Any:
    # OpenAI's `stop` is a text or a list of texts.
    return [value] if isinstance(value, str) else value


def _stop(text: str) -> str:
    if not text:
        raise ValueError("expected a text that is not empty")
    if len(text.encode()) > MOST_STOP_BYTES:
        raise ValueError(f"expected at most {MOST_STOP_BYTES} bytes")
    return text


def _choice(value: Any) -> Any:
    if value is not None and not isinstance(value, str | dict):
        raise ValueError("expected a text or an object")
    return value


Count = Annotated[int, Field(ge=1)]
SingleAnswer = Annotated[int | None, AfterValidator(_single_answer)]
StopList = Annotated[list[Annotated[str, AfterValidator(_stop)]], Field(max_length=MOST_STOPS)]
Stops = Annotated[StopList | None, BeforeValidator(_listed)]
Choice = Annotated[Any, AfterValidator(_choice)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]


class Typed(BaseModel):
    """An object with a `type`."""

    model_config = ConfigDict(strict=True)

    type: str


class Parameters(BaseModel):
    """Parameters of all interfaces. Unknown parameters are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False, extra="ignore", frozen=True)

    model: str | None = None
    stream: bool | None = None
    n: SingleAnswer = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0)] | None = None
    logit_bias: dict[str, float] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    response_format: dict[str, Any] | None = None


def checked(model: type[P], body: dict[str, Any]) -> P:
    """Check the parameters in a body. Raises GatewayError, which names the first wrong one."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from None  # pydantic's text repeats the value, whatever its size


def _refusal(error: ValidationError) -> GatewayError:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    location = ".".join(map(str, first["loc"]))
    reason = first["msg"].removeprefix("Value error, ").replace("Input should be", "expected")
    return invalid(
        f"{location[:_LONGEST_REASON]}: {reason[:_LONGEST_REASON]}", str(first["loc"][0])
    )
