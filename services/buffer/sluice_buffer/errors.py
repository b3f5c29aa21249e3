"""Answers that are not an answer.

Each becomes one gRPC status in service.py; the text is for people.
"""

from __future__ import annotations


class CallError(Exception):
    """A call that is refused. Nothing was changed."""


class StaleAttemptError(CallError):
    """The caller belongs to an attempt that a newer one has replaced."""


class PreconditionError(CallError):
    """The call does not fit what has happened so far."""


class InvalidCallError(CallError):
    """The call could never be right."""


class SilentSenderError(CallError):
    """The caller began a message and does not go on with it."""
