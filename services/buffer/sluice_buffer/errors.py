"""Errors that a call of the buffer is answered with.

service.py turns each into one gRPC status. The text is for people.
"""

from __future__ import annotations


class CallError(Exception):
    """The call is refused, and has changed no state."""


class StaleAttemptError(CallError):
    """The caller belongs to an attempt that a newer one has replaced."""


class PreconditionError(CallError):
    """The call does not fit the state of the buffer."""


class InvalidCallError(CallError):
    """The call is invalid in any state."""


class SilentSenderError(CallError):
    """The caller began a message and does not continue it."""
