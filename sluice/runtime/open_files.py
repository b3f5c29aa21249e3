"""Files that a process may have open, connections among them.

Many container runtimes and logins begin with 1,024, which a worker with a thousand requests under
way, or a rendezvous with a thousand members, has soon used up. A process may raise that itself, up
to a limit that only its starter sets.

Engines' plugins have this file too: it imports the standard library alone.
"""

from __future__ import annotations

import resource

WANTED = 1 << 16
"""Enough for every role. Not all that may be had, which can be a billion: there are programs that
close each possible one."""


def raise_limit(wanted: int = WANTED) -> int:
    """Let this process, and those that it starts, open so many files, or as many as it may. The
    limit that it has from then on, which is never lower than before.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft >= most:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    except (OSError, ValueError):  # a sandboxed kernel refuses, or one with a limit of its own
        return soft
    return most
