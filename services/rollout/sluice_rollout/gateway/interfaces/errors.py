"""Errors that clients of OpenAI's API understand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

# Code of a request that does not fit. It truncates the episode, and does not fail it.
TOO_LONG = "context_length_exceeded"


@dataclass
class GatewayError(Exception):
    """A refusal of a request."""

    status: int
    message: str
    kind: str = "invalid_request_error"  # OpenAI's `type` of an error
    code: str | None = None
    param: str | None = None
    retry: bool = False  # True if the same request may succeed later

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        """The body of the HTTP response."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = None) -> GatewayError:
    """Refuse a request that is wrong."""
    return GatewayError(400, message, param=param, code=code)


def too_long(message: str) -> GatewayError:
    """Refuse a request that does not fit the model's context."""
    return invalid(message, "messages", TOO_LONG)


def no_such_model(name: str, names: Sequence[str]) -> GatewayError:
    """Refuse a request whose `model` is not a seat of the job."""
    message = (
        f"model: {name!r} is not a seat of this job (rollout.seats): expected one of "
        f"{', '.join(names)}"
    )
    return GatewayError(404, message, code="model_not_found", param="model")


def refused_key(message: str) -> GatewayError:
    """Refuse a request without a valid key."""
    return GatewayError(401, message, code="invalid_api_key")


def unavailable(message: str) -> GatewayError:
    """Refuse a request that the engine cannot answer."""
    return GatewayError(503, message, "server_error", "unavailable")


def truncated(error: BaseException | None) -> bool:
    """True if an error is, or comes from, the refusal of a request that did not fit."""
    while error is not None:
        if TOO_LONG in (getattr(error, "code", None), _code(getattr(error, "body", None))):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code(body: object) -> object:
    """Return the code in a refusal's body, for clients whose errors only hold the body."""
    error = body.get("error") if isinstance(body, dict) else None
    return error.get("code") if isinstance(error, dict) else None
