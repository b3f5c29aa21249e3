"""Free ports of this machine.

They are chosen below the range from which the kernel takes the ports of outgoing connections: a
port from that range may be gone again before the container that was promised it binds it.
"""

from __future__ import annotations

import random
import socket

from sluice_operator.cluster.local.translate import LOOPBACK, PodError

_FIRST, _LAST, _TRIES = 20000, 32000, 400


def is_free(port: int) -> bool:
    """True where a server could bind the port now; connections of a former server in TIME_WAIT are
    no obstacle.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((LOOPBACK, port))
        except OSError:
            return False
        return True


def free_port(taken: set[int]) -> int:
    """A free port that is not promised to somebody else already."""
    for _ in range(_TRIES):
        port = random.randrange(_FIRST, _LAST)
        if port not in taken and is_free(port):
            return port
    raise PodError(f"no free port between {_FIRST} and {_LAST} on {LOOPBACK}")
