"""The number of the protocol that a job's processes speak, and what is said where two of them speak
different ones.

Every call carries the number, and a server refuses a caller with another one, or with none. A
server of before there were numbers refuses nobody: so a member tells its own when it joins the
rendezvous, which answers with its own. docs/contracts.md says what makes the number grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata
from typing import Any

from sluice.runtime.pod_env import ConfigurationError

PROTOCOL = 3
KEY, RELEASE_KEY = "sluice-protocol", "sluice-release"
"""Names in a call's metadata. An answer with KEY in its trailing metadata is a refusal for the
number's sake."""
_ADVICE = "use images of one release for the operator and for all roles of a job"
Metadata = tuple[tuple[str, str], ...]


class MixedReleasesError(ConfigurationError):
    """The peer is of a release that does not understand ours. The message names both and says what
    to do.
    """


@cache
def release() -> str:
    """This process's release; "unknown" where it runs from a directory that nobody
    has installed.
    """
    try:
        return metadata.version("sluice")
    except metadata.PackageNotFoundError:
        return "unknown"


def call_metadata() -> Metadata:
    """The word of a call about its caller."""
    return ((KEY, str(PROTOCOL)), (RELEASE_KEY, release()))


def refusal(call: Iterable[tuple[str, Any]]) -> str:
    """Why a server does not take a call with this metadata, in one sentence; empty: it does."""
    told = {key: str(value) for key, value in call}
    if told.get(KEY) == str(PROTOCOL):
        return ""
    return _sentence("the caller", told.get(KEY, ""), told.get(RELEASE_KEY, ""), "the server")


def check_peer(peer: str, protocol: int, release: str = "") -> None:
    """MixedReleasesError where a peer that has told its number (0: none) speaks another protocol
    than we.
    """
    if protocol != PROTOCOL:
        raise MixedReleasesError(_sentence(peer, str(protocol or ""), release, "this process"))


def is_refusal(trailing: Iterable[tuple[str, Any]] | None) -> bool:
    """True for the trailing metadata of a call that a server refused for its protocol."""
    return any(key == KEY for key, _ in trailing or ())


def _sentence(peer: str, number: str, of_release: str, self: str) -> str:
    theirs = f"protocol {number}" if number else "a protocol without a number"
    theirs += (
        f" (sluice {of_release})" if of_release else " (an older sluice)" if not number else ""
    )
    return f"{peer} speaks {theirs}, {self} protocol {PROTOCOL} (sluice {release()}): {_ADVICE}"
