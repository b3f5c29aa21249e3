"""Progress, asked of real gRPC services; and whom to ask."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from sluice.wire import protocol, rpc
from sluice.wire.tls import PLAIN, Tls
from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc
from sluice_operator.cluster.keys import JobKeys
from sluice_operator.plan import Progress
from sluice_operator.progress import Prober, ProbeTarget, ask, target_of

KEYS = JobKeys(bytes(32))
TOKEN = KEYS.token("u")


class Rendezvous(rendezvous_pb2_grpc.RendezvousServicer):
    buffer = ""

    async def GetLedger(self, request: Any, context: Any) -> rendezvous_pb2.Ledger:
        def entry(role: str, version: int, address: str = "") -> rendezvous_pb2.LedgerEntry:
            member = rendezvous_pb2.Member(role=role, version=version, address=address)
            return rendezvous_pb2.LedgerEntry(member=member, admitted=True)

        entries = [entry("rollout", 7), entry("rollout", 6), entry("rollout", 6)]
        for number, late in enumerate(entries[1:]):
            late.member.name = f"rollout-{number + 1}"
            late.generation, late.last_error = 9 - number, f"pause: {number}"
        if self.buffer:
            entries.append(entry("buffer", 0, self.buffer))
        return rendezvous_pb2.Ledger(version=7, entries=entries)


class Buffer(buffer_pb2_grpc.BufferServicer):
    delay = 0.0

    async def Stats(self, request: Any, context: Any) -> buffer_pb2.BufferStats:
        await asyncio.sleep(self.delay)
        return buffer_pb2.BufferStats(
            step=7, total_steps=10, version=7, policy_lag=0.5, metrics={"rollout/raw_reward": 0.25}
        )


@contextlib.asynccontextmanager
async def serving(served: Tls = PLAIN) -> AsyncIterator[tuple[ProbeTarget, Rendezvous, Buffer]]:
    """A server for both services, which requires the job's token."""
    rendezvous, buffer = Rendezvous(), Buffer()
    server = rpc.server(TOKEN)
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(rendezvous, server)
    buffer_pb2_grpc.add_BufferServicer_to_server(buffer, server)
    address = f"127.0.0.1:{rpc.bind(server, '127.0.0.1:0', served)}"
    await server.start()
    rendezvous.buffer = address
    yield ProbeTarget(address, TOKEN), rendezvous, buffer
    await server.stop(None)


@pytest.fixture
async def services() -> AsyncIterator[tuple[ProbeTarget, Rendezvous, Buffer]]:
    async with serving() as served:
        yield served


async def test_progress_is_what_buffer_and_rendezvous_say(services: Any) -> None:
    expected = Progress(
        7,
        total_steps=10,
        reward=0.25,
        version=7,
        lag=0.5,
        engines=3,
        engines_in_sync=1,
        dropped="rollout-1: pause: 0",
    )
    assert await ask(services[0]) == expected


async def test_a_buffer_that_hangs_costs_no_more_than_the_deadline(services: Any) -> None:
    target, _, buffer = services
    buffer.delay = 30
    async with asyncio.timeout(buffer.delay / 2):
        assert await ask(target, 0.3) is None


async def test_before_the_buffer_has_joined_nothing_is_known(services: Any) -> None:
    target, rendezvous, _ = services
    rendezvous.buffer = ""
    assert await ask(target) is None


async def test_a_foreign_token_is_refused_and_that_is_no_progress_but_told(services: Any) -> None:
    with capture_logs() as logs:
        assert await ask(ProbeTarget(services[0].rendezvous, "other")) is None
    assert logs[0]["log_level"] == "warning"
    assert "was its key replaced?" in logs[0]["event"]


async def test_pods_of_another_release_are_no_progress_but_told(
    services: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        protocol, "call_metadata", lambda: (("sluice-protocol", "1"), ("sluice-release", "0.0.9"))
    )
    with capture_logs() as logs:
        assert await ask(services[0]) is None
    assert logs[0]["log_level"] == "warning"
    assert logs[0]["event"] == "the job's pods are of another release, so its progress is unknown"
    assert logs[0]["cause"].startswith(
        "the caller speaks protocol 1 (sluice 0.0.9), the server protocol 3"
    )


async def test_progress_is_asked_for_over_tls() -> None:
    files = {name: text.encode() for name, text in KEYS.certificates("u", "demo.n.sluice").items()}
    served = Tls(files["ca.crt"], "demo.n.sluice", files["tls.crt"], files["tls.key"])
    async with serving(served) as (target, _, _):
        assert (
            await ask(replace(target, tls=Tls(KEYS.authority("u").encode(), "demo.n.sluice")))
            is not None
        )
        with capture_logs() as logs:
            assert (
                await ask(
                    replace(target, tls=Tls(KEYS.authority("other").encode(), "demo.n.sluice"))
                )
                is None
            )
    assert "belongs to another job" in logs[0]["cause"]


def pod(role: str, phase: str = "Running", code: int | None = None) -> dict[str, Any]:
    states = [] if code is None else [{"name": role, "state": {"terminated": {"exitCode": code}}}]
    labels = {"sluice.dev/role": role}
    return {
        "metadata": {"name": role, "labels": labels},
        "status": {"phase": phase, "containerStatuses": states},
    }


def config(**spec: Any) -> dict[str, Any]:
    return {"data": {"rljob.json": json.dumps({"spec": spec})}}


class Seen:
    def __init__(self) -> None:
        self.pods = [pod("rendezvous"), pod("buffer"), pod("trainer")]
        self.objects = {
            ("Service", "demo-rendezvous"): {
                "spec": {"clusterIP": "10.0.0.9", "ports": [{"port": 7700}]}
            },
            ("ConfigMap", "demo-config"): config(),
        }

    def pods_of(self, stored: Any) -> Any:
        return self.pods

    def owned(self, stored: Any) -> Any:
        return self.objects


def stored(state: str = "Running") -> dict[str, Any]:
    return {"metadata": {"namespace": "n", "name": "demo", "uid": "u"}, "status": {"state": state}}


def test_a_running_job_is_asked_at_its_service_with_its_token() -> None:
    assert target_of(Seen(), stored(), KEYS) == ProbeTarget("10.0.0.9:7700", TOKEN, PLAIN)


def test_a_job_that_was_started_with_tls_is_asked_with_tls_whatever_its_spec_says_now() -> None:
    seen = Seen()
    seen.objects["ConfigMap", "demo-config"] = config(tls={"enabled": True})
    target = target_of(seen, stored(), KEYS)
    assert target is not None
    assert target.tls == Tls(KEYS.authority("u").encode(), "demo.n.sluice")


@pytest.mark.parametrize("state", ["", "Suspended", "Succeeded", "Failed"])
def test_a_job_that_does_not_run_is_not_asked(state: str) -> None:
    assert target_of(Seen(), stored(state), KEYS) is None


def test_without_a_running_buffer_nobody_is_asked() -> None:
    seen = Seen()
    seen.pods[1] = pod("buffer", "Pending")
    assert target_of(seen, stored(), KEYS) is None


async def test_only_new_answers_are_news() -> None:
    answers = iter([Progress(1), Progress(1), Progress(2), None])

    async def answer(target: ProbeTarget, deadline: float) -> Progress | None:
        return next(answers)

    prober = Prober(KEYS, answer)
    news = [await prober.ask_all(Seen(), [stored()]) for _ in range(4)]
    assert news == [[("n", "demo")], [], [("n", "demo")], [("n", "demo")]]


async def test_a_trainer_that_has_ended_is_asked_for_its_last_step() -> None:
    deadlines = []

    async def answer(target: ProbeTarget, deadline: float) -> Progress | None:
        deadlines.append(deadline)
        return Progress(len(deadlines))

    prober, seen = Prober(KEYS, answer), Seen()
    await prober.ask_all(seen, [stored()])
    assert await prober.latest(seen, stored()) == Progress(1)
    seen.pods[2] = pod("trainer", "Succeeded", 0)
    assert await prober.latest(seen, stored()) == Progress(2)
