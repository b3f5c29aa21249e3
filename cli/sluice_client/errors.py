"""Errors of the client. Each says what was expected and what to do."""

from __future__ import annotations


class ClientError(RuntimeError):
    """A call that cannot be done."""


class JobFailedError(ClientError):
    """A job that was waited for has failed. The message is its reason."""
