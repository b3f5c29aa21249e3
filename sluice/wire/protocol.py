"""The number of the protocol that a job's processes speak, and the error if two differ.

Every call carries the number, and a server refuses a caller with another number or without one.
Servers of releases before the number accept any caller, so a member sends its number when it joins
the rendezvous, which answers with its own. docs/contracts.md says which changes need a new number.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib import metadata
from typing import Any

from sluice.runtime.pod_env import ConfigurationError

PROTOCOL = 3
# Keys of a call's metadata. An answer with KEY in its trailing metadata is a refusal because of the
# number.
KEY, RELEASE_KEY = "sluice-protocol", "sluice-release"
_ADVICE = "use images of one release for the operator and for all roles of a job"
Metadata = tuple[tuple[str, str], ...]


class MixedReleasesError(ConfigurationError):
    """The peer is of a release that speaks another protocol.

    The message names both releases and says what to do.
    """


@cache
def release() -> str:
    """Return this process's release; "unknown" if sluice runs without being installed."""
    try:
        return metadata.version("sluice")
    except metadata.PackageNotFoundError:
        return "unknown"


def call_metadata() -> Metadata:
    """Return a call's metadata about its caller."""
    return ((KEY, str(PROTOCOL)), (RELEASE_KEY, release()))


def refusal(call: Iterable[tuple[str, Any]]) -> str:
    """Return why a server refuses a call with this metadata; empty if it does not."""
    reported = {key: str(value) for key, value in call}
    if reported.get(KEY) == str(PROTOCOL):
        return ""
    return _sentence(
        "the caller", reported.get(KEY, ""), reported.get(RELEASE_KEY, ""), "the server"
    )


def check_peer(peer: str, protocol: int, release: str = "") -> None:
    """Raise MixedReleasesError if a peer reports another protocol; 0 if it reports none."""
    if protocol != PROTOCOL:
        raise MixedReleasesError(_sentence(peer, str(protocol or ""), release, "this process"))


def is_refusal(trailing: Iterable[tuple[str, Any]] | None) -> bool:
    """True for the trailing metadata of a call that a server refused for its protocol."""
    return any(key == KEY for key, _ in trailing or ())


def _sentence(peer: str, number: str, peer_release: str, self: str) -> str:
    theirs = f"protocol {number}" if number else "a protocol without a number"
    theirs += (
        f" (sluice {peer_release})" if peer_release else "" if number else " (an older sluice)"
    )
    return f"{peer} speaks {theirs}, {self} protocol {PROTOCOL} (sluice {release()}): {_ADVICE}"
