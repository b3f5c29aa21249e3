"""The end of a rank that lost another one, told apart from the end that has the reason."""

from __future__ import annotations

from sluice import causes

EXIT_PEER_LOST = 3
"""docs/contracts.md"""


def words(error: BaseException) -> str:
    """One line for people where a collective failed for want of another rank; empty: it failed
    otherwise.

    torch's own words are those of a C++ file, and send people to other logs.
    """
    sign = causes.lost_peer(str(error)) if isinstance(error, RuntimeError) else ""
    return f"another rank of the trainer is gone ({sign}); its own pod says why" if sign else ""
