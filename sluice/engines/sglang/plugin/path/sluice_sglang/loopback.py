"""The processes of an engine in one pod meet on the loopback, in a private store.

torch's store listens on all addresses of the machine, whatever address it is given, and asks for no
password.
"""

import ipaddress
import socket
from typing import Any

STORE = "torch.distributed.rendezvous._create_c10d_store"


def register() -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(STORE, create_store, HookType.AROUND)


def create_store(
    original: Any,
    host: str,
    port: int,
    rank: int,
    size: int,
    timeout: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Wrap torch's function: the rank that serves the store binds it to the loopback.

    All other ranks just connect.
    """
    loopback = loopback_of(host)
    if rank != 0 or loopback is None:
        return original(host, port, rank, size, timeout, *args, **kwargs)
    from torch._C._distributed_c10d import TCPStore

    family = socket.AF_INET6 if ":" in loopback else socket.AF_INET
    listening = socket.create_server((loopback, port), family=family)
    return TCPStore(
        loopback, port, size, True, timeout, multi_tenant=True, master_listen_fd=listening.detach()
    )


def loopback_of(host: str) -> str | None:
    """Return the loopback address to use for `host`; None if other pods of the engine meet there.

    SGLang's processes meet at the address of its HTTP server, which is 0.0.0.0 in a pod.
    """
    try:
        address = ipaddress.ip_address("127.0.0.1" if host == "localhost" else host)
    except ValueError:  # an engine of several pods meets at the name of its first
        return None
    if address.is_unspecified:
        return "127.0.0.1" if address.version == 4 else "::1"
    return str(address) if address.is_loopback else None
