"""Errors of an API server as types. Only cluster/kube/api.py creates them."""

from __future__ import annotations


class ApiError(Exception):
    """The API server refused a request; the text is the server's.

    status: the HTTP code, or 0 if the server could not be reached. retry_after: seconds to wait, if
    the server says so.
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
    """409 on a write: another client wrote first. Read the object again."""


class AlreadyExistsError(ApiError):
    """409 on a creation."""


class GoneError(ApiError):
    """410: a version, or a page of a list, that the server no longer keeps."""


class ThrottledError(ApiError):
    """429: wait for `retry_after` seconds."""


class ForbiddenError(ApiError):
    """401 and 403: missing rights, an exceeded quota, a namespace that is being deleted."""


class InvalidError(ApiError):
    """400 and 422: the object breaks a rule of the server, so a retry does not help."""


class NamespaceEndingError(ForbiddenError):
    """403, because the namespace is being deleted and does not accept new objects."""


class UnavailableError(ApiError):
    """5xx, or no answer."""


class ServerFailedError(UnavailableError):
    """5xx with a Status: an admission webhook or an aggregated API does not answer."""


class StaleError(Exception):
    """The job has changed since this pass began, so its plan would be out of date."""


class ForeignObjectError(Exception):
    """An object that a job needs exists, but belongs to another owner or to a deleted namesake."""
