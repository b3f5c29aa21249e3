"""Pools of engines as the client lists them, and waits for them."""

from __future__ import annotations

import fcntl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from sluice import Client, ClientError
from sluice.api import RLEnginePool
from sluice_client import client as client_module
from sluice_client.pool_list import PoolSummary, cluster_pool
from sluice_operator.cluster.local import pools, run_state
from tests.unit.operator.pool_world import (
    after,
    changed,
    engine_pod,
    make_pool,
    planned,
    with_status,
)

CREATED = "2026-01-31T12:00:00Z"


def stored(pool: RLEnginePool) -> dict[str, Any]:
    """Return a pool as the API server does."""
    document = pool.model_dump(mode="json", by_alias=True, exclude_none=True)
    document["metadata"] |= {"namespace": "team", "creationTimestamp": CREATED}
    return document


def test_a_pool_of_a_cluster_reads_as_kubectl_shows_it() -> None:
    pool = make_pool()
    engines = engine_pod(0), engine_pod(1)
    observed = after(pool, *engines, jobs=("math", "code"), tokens_per_second=1234.4)
    assert cluster_pool(stored(with_status(pool, planned(pool, observed)))) == PoolSummary(
        name="shared",
        where="team/shared",
        model="/models/tiny",
        engines="2/2",
        ready=True,
        message="2 of 2 engines answer",
        jobs=2,
        tokens_per_second=1234.0,
        created=CREATED,
    )


def test_a_pool_whose_engines_do_not_all_answer_says_why() -> None:
    pool = make_pool()
    observed = after(pool, engine_pod(0), engine_pod(1, ready=False))
    summary = cluster_pool(stored(with_status(pool, planned(pool, observed))))
    assert (summary.ready, summary.engines, summary.tokens_per_second) == (False, "1/2", None)
    assert summary.message.startswith("1 of 2 engines answer")


@pytest.mark.parametrize("seen", [True, False], ids=["changed", "created"])
def test_a_pool_that_the_operator_has_not_seen_is_not_ready(seen: bool) -> None:
    """Also one that was ready before its spec changed."""
    pool = make_pool()
    if seen:
        ready = with_status(pool, planned(pool, after(pool, engine_pod(0), engine_pod(1))))
        pool = changed(ready, replicas=3)
    summary = cluster_pool(stored(pool))
    assert not summary.ready
    assert "the operator has not seen the newest spec" in summary.message


class Health(BaseHTTPRequestHandler):
    """Answers as an engine that is ready."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing to the test's output."""


@contextmanager
def engine(port: int = 0) -> Iterator[int]:
    """Serve an engine's health, and yield the port."""
    with ThreadingHTTPServer(("127.0.0.1", port), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Client]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(client_module, "POLL_SECONDS", 0.05)
    with Client.local(tmp_path / "runs") as client:
        yield client


@contextmanager
def running(*ports: int) -> Iterator[None]:
    """Announce a pool with engines on these ports, as `sluice pool up` does."""
    directory = pools.directory("shared")
    directory.mkdir(parents=True)
    with (directory / run_state.LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        pools.write(make_pool(), "ab" * 32, tuple(f"127.0.0.1:{port}" for port in ports))
        yield


def test_a_pool_of_this_machine_is_listed_with_the_engines_that_answer(client: Client) -> None:
    assert list(client.list_pools()) == []
    with engine() as free:
        pass
    with engine() as first, running(first, free):
        (summary,) = client.list_pools()
        assert (summary.name, summary.model, summary.engines) == ("shared", "/models/tiny", "1/2")
        assert f"1 of 2 engines answer; see the logs in {summary.where}" == summary.message
        with pytest.raises(TimeoutError, match=r"shared after 0.3 s: 1 of 2 engines answer"):
            client.get_pool("shared").wait(0.3)


def test_a_pool_is_waited_for_until_its_last_engine_answers(client: Client) -> None:
    with engine() as second:
        pass
    with engine() as first, running(first, second):
        pool = client.get_pool("shared")
        assert not pool.summary.ready
        waited: list[PoolSummary] = []
        waiting = threading.Thread(target=lambda: waited.append(pool.wait(30.0)))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive()
        with engine(second):
            waiting.join(30.0)
        assert [summary.engines for summary in waited] == ["2/2"]


def test_a_pool_that_is_not_there_is_named_with_those_that_are(client: Client) -> None:
    with pytest.raises(ClientError, match="there is no pool other: none runs on this machine"):
        client.get_pool("other")
    with running(1), pytest.raises(ClientError, match="expected one of shared"):
        client.get_pool("other")
