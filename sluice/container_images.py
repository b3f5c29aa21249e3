"""Names of container images: those that rows give, and those that a job allows.

A row is input from outside, so its image has to be on the job's list. Names are compared in their
full form, in which `python:3.12` is `docker.io/library/python:3.12`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

# An image of an RLJob: a name that may refer to a row's metadata.
PATTERN = r"^([^{}\s]|\{metadata\.[A-Za-z0-9_-]+\})+$"
# An entry of the list of allowed images.
ALLOWED_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:@/-]*$"
_REFERENCE = re.compile(r"\{metadata\.([A-Za-z0-9_-]+)\}")
_COMPONENT = r"[a-z0-9]+(?:(?:\.|__?|-+)[a-z0-9]+)*"
_NAME = re.compile(
    rf"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?{_COMPONENT}(?:/{_COMPONENT})*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(?:@sha256:[0-9a-f]{64})?"
)
_LONGEST = 512
_SHOWN = 100
_NO_KEY = (
    "no such key; build the row's image and name it there, or name images by a key that rows have, "
    "such as ghcr.io/me/tasks/{metadata.instance_id}:1"
)


class RowImageError(Exception):
    """A row gives no image that the job may use. The message says what was expected."""


def is_from_row(image: str | None) -> bool:
    """Return True if an image refers to the row (`{metadata.KEY}`)."""
    return image is not None and _REFERENCE.search(image) is not None


def image_of_row(image: str, metadata: Mapping[str, Any], allowed: Collection[str]) -> str:
    """Return the image of a row.

    Parameters
    ----------
    image
        The image with references to the row's metadata.
    metadata
        The row's metadata.
    allowed
        `rollout.environment.allowedImages`.

    Raises
    ------
    RowImageError
        If the row lacks a key, its value is no text, or the job does not allow the image.

    """

    def value(reference: re.Match[str]) -> str:
        key = reference[1]
        found = metadata.get(key)
        if not isinstance(found, str) or not found:
            what = f"{found!r:.{_SHOWN}}" if key in metadata else _NO_KEY
            raise RowImageError(f"metadata.{key}: expected the name of an image, found {what}")
        return found

    name = _REFERENCE.sub(value, image)
    if len(name) > _LONGEST or not _NAME.fullmatch(name):
        raise RowImageError(f"{name!r:.{_SHOWN}} is not the name of an image (registry/name:tag)")
    if not is_allowed(name, allowed):
        raise RowImageError(
            f"the image {name:.{_SHOWN}} is not on the list rollout.environment.allowedImages "
            f"({', '.join(allowed)})"
        )
    return name


def is_allowed(image: str, allowed: Collection[str]) -> bool:
    """Return True if a list allows an image.

    An entry that ends with `/` allows all images below it. Another entry allows its image: with any
    tag and digest, unless the entry has one.
    """
    full = full_name(image)
    repository = _repository(full)
    for entry in map(full_name, allowed):
        if entry.endswith("/"):
            if repository.startswith(entry):
                return True
        elif entry in (full, repository) or full.startswith(f"{entry}@"):
            return True
    return False


def full_name(image: str) -> str:
    """Return an image's name with its registry. Names without one are of Docker Hub."""
    first, slash, _ = image.partition("/")
    if slash and (first == "localhost" or {".", ":"} & {*first}):
        return image
    return f"docker.io/{image}" if slash else f"docker.io/library/{image}"


def _repository(full: str) -> str:
    """Return a full name without tag and digest."""
    name = full.partition("@")[0]
    directory, slash, last = name.rpartition("/")
    return f"{directory}{slash}{last.partition(':')[0]}"
