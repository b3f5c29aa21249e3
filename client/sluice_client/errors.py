"""Errors of the client. Each message says what was expected and what to do."""

from __future__ import annotations


class ClientError(RuntimeError):
    """A call that cannot be done."""


class JobFailedError(ClientError):
    """The job that a caller waited for has failed. The message holds the reason."""
