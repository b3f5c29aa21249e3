"""Refusals of an API server, as types. Made in cluster/kube/api.py only."""

from __future__ import annotations


class ApiError(Exception):
    """The API server refused. status: the HTTP code; 0: it could not be reached. The text is the
    server's own.
    """

    def __init__(self, message: str, status: int = 0, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after


class NotFoundError(ApiError):
    """404."""


class MissingApiError(NotFoundError):
    """404, because the API server does not know the kind at all."""


class ConflictError(ApiError):
    """409 on a write: somebody else wrote first. The cure is to read again."""


class AlreadyExistsError(ApiError):
    """409 on a creation."""


class GoneError(ApiError):
    """410: a version, or a page of a list, that the server keeps no more."""


class ThrottledError(ApiError):
    """429: `retry_after` seconds of peace are wanted."""


class ForbiddenError(ApiError):
    """401 and 403: missing rights, an exceeded quota, a namespace that is being deleted."""


class InvalidError(ApiError):
    """400 and 422: the object breaks a rule of the server. No retry cures it."""


class NamespaceEndingError(ForbiddenError):
    """403, because the namespace is being deleted: nothing can be created in it any more."""


class UnavailableError(ApiError):
    """5xx, or no answer."""


class ServerFailedError(UnavailableError):
    """5xx with a Status: the API server runs, but something that it asks does not answer, such as
    an admission webhook or an aggregated API.
    """


class StaleError(Exception):
    """The job has changed since this pass began: its plan would be about the past."""


class ForeignObjectError(Exception):
    """An object of the name that a job needs belongs to somebody else, or to a deleted job of the
    same name.
    """
