"""torch's key-value store on one address; by default its server listens on all addresses."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore


def listener(host: str, port: int = 0) -> socket.socket:
    """Return a socket that listens on `host`'s address only.

    Parameters
    ----------
    host
        Name or address of this machine.
    port
        Port; 0: a free port.

    Raises
    ------
    OSError
        The address is not this machine's, or the port is taken.

    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listening = socket.socket(family, kind, protocol)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen()
    except OSError as error:
        listening.close()
        raise OSError(error.errno, f"{host}:{port}: cannot listen here: {error.strerror}") from None
    return listening


def serve(
    host: str, listening: socket.socket, size: int, timeout: timedelta, *, wait_for_workers: bool
) -> TCPStore:
    """Serve the store of `size` processes, including this one, on a listening socket.

    The store takes ownership of the socket.
    """
    port = listening.getsockname()[1]
    return TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait_for_workers,
        master_listen_fd=listening.detach(),
    )
