"""Errors as OpenAI's clients read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TOO_LONG = "context_length_exceeded"
"""The code of a request that does not fit: the episode is then truncated, not failed."""


@dataclass
class GatewayError(Exception):
    """A refusal. kind: OpenAI's type of error. retry: the same request may be answered later."""

    status: int
    message: str
    kind: str = "invalid_request_error"
    code: str | None = None
    param: str | None = None
    retry: bool = False

    def __str__(self) -> str:
        return self.message

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


def invalid(message: str, param: str | None = None, code: str | None = None) -> GatewayError:
    """A request that will never be answered as it is."""
    return GatewayError(400, message, param=param, code=code)


def too_long(message: str) -> GatewayError:
    return invalid(message, "messages", TOO_LONG)


def no_such_model(name: str, names: Sequence[str]) -> GatewayError:
    """A request for a seat that the job does not have."""
    message = (
        f"model: {name!r} is no seat of this job (rollout.seats): expected one of "
        f"{', '.join(names)}"
    )
    return GatewayError(404, message, code="model_not_found", param="model")


def refused_key(message: str) -> GatewayError:
    return GatewayError(401, message, code="invalid_api_key")


def unavailable(message: str) -> GatewayError:
    return GatewayError(503, message, "server_error", "unavailable")


def truncated(error: BaseException | None) -> bool:
    """True where a client has raised our refusal of a request that did not fit, or something that
    it caused.
    """
    while error is not None:
        if TOO_LONG in (getattr(error, "code", None), _code(getattr(error, "body", None))):
            return True
        error = error.__cause__ or error.__context__
    return False


def _code(body: object) -> object:
    """The code in the body of a refusal, where a client's error has nothing but that."""
    error = body.get("error") if isinstance(body, dict) else None
    return error.get("code") if isinstance(error, dict) else None
