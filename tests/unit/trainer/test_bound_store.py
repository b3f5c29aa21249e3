"""torch's store listens on one address."""

from __future__ import annotations

from datetime import timedelta

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from sluice_trainer.distributed import store


def test_a_store_serves_only_the_given_address() -> None:
    listening = store.listener("127.0.0.1")
    port = listening.getsockname()[1]
    minute = timedelta(seconds=60)
    served = store.serve("127.0.0.1", listening, 2, minute, wait_for_workers=False)
    joined = TCPStore("127.0.0.1", port, 2, False, minute, wait_for_workers=False)
    joined.set("key", "value")
    assert served.get("key") == b"value"
    sockets = psutil.Process().net_connections(kind="tcp")
    addresses = [
        item.laddr.ip for item in sockets if item.laddr.port == port and item.status == "LISTEN"
    ]
    assert addresses == ["127.0.0.1"]


def test_a_port_that_is_taken_is_reported() -> None:
    with store.listener("127.0.0.1") as first:
        port = first.getsockname()[1]
        with pytest.raises(
            OSError, match=rf"127\.0\.0\.1:{port}: cannot listen here: Address already in use"
        ):
            store.listener("127.0.0.1", port)
