"""The limit of files, including connections, that a process may have open.

Many container runtimes and logins start with 1,024, which a worker with a thousand requests, or a
rendezvous with a thousand members, soon exceeds. A process may raise the limit itself, up to a hard
limit that only its starter sets.

Engines' plugins contain this file too, so it imports the standard library only.
"""

from __future__ import annotations

import resource

# Enough for every role. Not the maximum, which can be a billion: some programs close every possible
# descriptor.
DEFAULT_LIMIT = 1 << 16


def raise_limit(limit: int = DEFAULT_LIMIT) -> int:
    """Raise the limit of open files for this process and its children, and return it.

    It becomes `limit`, or the hard limit if that is lower, and is never lower than before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return limit
    most = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if soft >= most:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # a sandboxed kernel refuses, or has another limit
        return soft
    return most
