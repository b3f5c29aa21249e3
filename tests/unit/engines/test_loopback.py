"""The plugin's store for the processes of an engine, which only the loopback reaches."""

from __future__ import annotations

from datetime import timedelta
from types import ModuleType

import psutil
import pytest
from torch._C._distributed_c10d import TCPStore

from sluice.runtime.pod_env import free_port
from tests.unit.engines.conftest import Plugin


@pytest.fixture
def loopback(plugin: Plugin) -> ModuleType:
    return plugin("loopback")


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        pytest.param("127.0.0.1", "127.0.0.1", id="a laptop"),
        pytest.param("0.0.0.0", "127.0.0.1", id="a pod"),
        pytest.param("localhost", "127.0.0.1", id="a name of the loopback"),
        pytest.param("::", "::1", id="a pod of IPv6"),
        pytest.param("10.1.2.3", None, id="an address that others reach"),
        pytest.param("job-rollout-0-1-0.job-engines", None, id="the first of several pods"),
    ],
)
def test_an_engine_of_one_pod_meets_on_the_loopback(
    loopback: ModuleType, host: str, expected: str | None
) -> None:
    assert loopback.loopback_of(host) == expected


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_store_serves_the_loopback_alone_and_its_ranks_meet_there(
    loopback: ModuleType, host: str
) -> None:
    from torch.distributed.rendezvous import _create_c10d_store

    port, minute = free_port(), timedelta(seconds=60)
    served = loopback.create_store(_create_c10d_store, host, port, 0, None, minute, use_libuv=True)
    joined = loopback.create_store(_create_c10d_store, host, port, 1, None, minute, use_libuv=True)
    assert isinstance(joined, TCPStore)
    joined.set("key", "value")
    assert served.get("key") == b"value"
    sockets = psutil.Process().net_connections(kind="tcp")
    listening = [
        connection.laddr.ip
        for connection in sockets
        if connection.laddr.port == port and connection.status == "LISTEN"
    ]
    assert listening == ["127.0.0.1"]
