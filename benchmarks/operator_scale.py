"""Many RLJobs at once: how long until all run, and what that costs the operator and the API server.

    python benchmarks/operator_scale.py [--jobs 1000] [--rest 60] [--out FILE]

Real: etcd, kube-apiserver, the operator as a process of its own with its defaults. Imitated, in
this process: kubelets (one status write a pod: scheduled, started, ready) and what the operator
asks jobs for, one gRPC server that answers for every job's rendezvous and buffer. Each job has 10
pods: rendezvous, buffer, four engines, a trainer of four.

The peer: KubeRay's published 258 s until 1,000 RayClusters are ready (v1.1.1 on GKE, with real
nodes). Needs etcd and kube-apiserver, as tests/cluster does (KUBEBUILDER_ASSETS).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc.aio
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))

from sluice.wire.v1 import buffer_pb2, buffer_pb2_grpc, rendezvous_pb2, rendezvous_pb2_grpc
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.plan.facts.names import PORTS
from tests.cluster.conftest import install_crds
from tests.cluster.control_plane import control_plane
from tests.cluster.operators import Operator
from tests.cluster.world import SPEC

NAMESPACE = "scale"
PODS = 10
ENGINES = 4
SPEC_10_PODS = SPEC | {
    "rollout": {"gpusPerReplica": 0, "replicas": ENGINES},
    "trainer": {"steps": 10, "gpusPerNode": 0, "nodes": 4},
}
CONTAINERS = {"rollout": ("engine", "worker")}
WRITES = ("POST", "PUT", "PATCH", "APPLY", "DELETE")
# Writes of this process: the jobs, and what kubelets would write.
OURS = (("rljobs", "", "POST"), ("pods", "status", "PATCH"))


# -- what is imitated
# -------------------------------------------------------------------------------------------------


class Rendezvous(rendezvous_pb2_grpc.RendezvousServicer):
    """Of a job whose engines all hold the newest weights."""

    async def GetLedger(self, request: Any, context: Any) -> rendezvous_pb2.Ledger:
        member = rendezvous_pb2.Member
        address = f"127.0.0.1:{PORTS['rendezvous']}"
        entries = [
            rendezvous_pb2.LedgerEntry(member=member(role="buffer", address=address), admitted=True)
        ]
        entries += [
            rendezvous_pb2.LedgerEntry(member=member(role="rollout"), admitted=True)
        ] * ENGINES
        return rendezvous_pb2.Ledger(entries=entries)


class Buffer(buffer_pb2_grpc.BufferServicer):
    async def Stats(self, request: Any, context: Any) -> buffer_pb2.BufferStats:
        return buffer_pb2.BufferStats(step=1, total_steps=10, version=1)


async def serve_jobs() -> grpc.aio.Server:
    """On all addresses: cluster IPs of the control plane are loopback addresses."""
    server = grpc.aio.server()
    rendezvous_pb2_grpc.add_RendezvousServicer_to_server(Rendezvous(), server)
    buffer_pb2_grpc.add_BufferServicer_to_server(Buffer(), server)
    server.add_insecure_port(f"0.0.0.0:{PORTS['rendezvous']}")
    await server.start()
    return server


async def events(api: Api, kind: str, at: str, **query: str) -> AsyncIterator[str]:
    """A watch's lines, from version `at` on; the server ends it after some minutes, with nothing
    lost."""
    while True:
        following = {"watch": "1", "resourceVersion": at, "allowWatchBookmarks": "true", **query}
        async for line in api.lines(collection(kind, NAMESPACE), following):
            yield line
            at = re.findall(r'"resourceVersion":"(\d+)"', line)[0]


async def kubelets(api: Api, at: str) -> None:
    """Every pod runs as soon as it is there."""
    pods: asyncio.Queue[str] = asyncio.Queue()

    async def write() -> None:
        while True:
            name = await pods.get()
            role = name.split("-")[-4]
            await api.merge(path("Pod", NAMESPACE, name, "status"), {"status": running(role)})

    async with asyncio.TaskGroup() as group:
        for _ in range(8):
            group.create_task(write())
        async for line in events(api, "Pod", at, fieldSelector="status.phase=Pending"):
            if line.startswith('{"type":"ADDED"'):
                pods.put_nowait(re.findall(r'"name":"([^"]+)"', line)[0])


def running(role: str) -> dict[str, Any]:
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    common = {
        "image": "x",
        "imageID": "",
        "restartCount": 0,
        "ready": True,
        "state": {"running": {"startedAt": now}},
    }
    return {
        "phase": "Running",
        "startTime": now,
        "conditions": [{"type": kind, "status": "True"} for kind in ("PodScheduled", "Ready")],
        "containerStatuses": [{"name": name} | common for name in CONTAINERS.get(role, (role,))],
    }


# -- what is measured
# -------------------------------------------------------------------------------------------------


@dataclass
class Sample:
    """One moment. writes: by (resource, subresource, verb), as the API server counts them."""

    operator: str
    writes: Counter[tuple[str, str, str]]
    cpu: float
    time: float = field(default_factory=time.monotonic)

    def metric(self, name: str, **labels: str) -> float:
        lines = [
            line
            for line in self.operator.splitlines()
            if line.startswith((f"{name} ", f"{name}{{"))
        ]
        label_texts = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            float(line.rpartition(" ")[2])
            for line in lines
            if all(label in line for label in label_texts)
        )


async def sample(api: Api, operator: Operator) -> Sample:
    lines = [
        line
        async for line in api.lines("/metrics", {})
        if line.startswith("apiserver_request_total")
    ]
    writes: Counter[tuple[str, str, str]] = Counter()
    for line in lines:
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line))
        if labels["verb"] in WRITES and labels["code"].startswith("2"):
            what = (
                labels["resource"],
                labels["subresource"],
                labels["verb"].replace("APPLY", "PATCH"),
            )
            writes[what] += int(float(line.rpartition(" ")[2]))
    times = psutil.Process(operator.process.pid).cpu_times()
    text = (await asyncio.to_thread(operator.get, "/metrics"))[1]
    return Sample(text, writes, times.user + times.system)


def written(before: Sample, after: Sample) -> Counter[tuple[str, str, str]]:
    """By whom else than this process: there is nobody but the operator."""
    writes = after.writes - before.writes
    return Counter({what: count for what, count in writes.items() if what not in OURS})


def quantile(q: float, before: Sample, after: Sample, name: str) -> float:
    """Seconds, interpolated in the histogram's bucket, as Prometheus' histogram_quantile does."""
    buckets: dict[float, float] = {}
    for text, sign in ((before.operator, -1), (after.operator, 1)):
        for labels, value in re.findall(rf"{name}_bucket{{([^}}]*)}} (\S+)", text):
            limit = float(re.findall(r'le="([^"]+)"', labels)[0])
            buckets[limit] = buckets.get(limit, 0.0) + sign * float(value)
    rank, lower, below = q * max(buckets.values()), 0.0, 0.0
    for limit, count in sorted(buckets.items()):
        if count >= rank:
            return (
                lower
                if limit == float("inf")
                else lower + (limit - lower) * (rank - below) / (count - below)
            )
        lower, below = limit, count
    raise AssertionError("a histogram's last bucket holds everything")


def memory(operator: Operator, name: str) -> float:
    """MB of the process, by the kernel: VmRSS now, VmHWM at most."""
    text = Path(f"/proc/{operator.process.pid}/status").read_text()
    return int(re.findall(rf"{name}:\s+(\d+) kB", text)[0]) * 1024 / 1e6


# -- the run
# --------------------------------------------------------------------------------------------------


async def create_jobs(api: Api, count: int) -> None:
    names = iter(range(count))

    async def some() -> None:
        for number in names:
            metadata = {"name": f"job-{number:05d}"}
            body = {
                "apiVersion": "sluice.dev/v1alpha1",
                "kind": "RLJob",
                "metadata": metadata,
                "spec": SPEC_10_PODS,
            }
            await api.create(collection("RLJob", NAMESPACE), body)

    await asyncio.gather(*(some() for _ in range(8)))


async def all_running(api: Api, count: int, at: str) -> list[float]:
    """Moments at which jobs became Running, in order."""
    moments: dict[str, float] = {}
    async for line in events(api, "RLJob", at):
        if '"state":"Running"' in line:
            name = json.loads(line)["object"]["metadata"]["name"]
            moments.setdefault(name, time.monotonic())
            if len(moments) == count:
                break
    return sorted(moments.values())


async def measure(
    plane_kubeconfig: str, count: int, rest: float, directory: Path
) -> dict[str, Any]:
    os.environ["KUBECONFIG"] = plane_kubeconfig
    async with await Api.connect() as api:
        await install_crds(api)
        await api.create("/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        server = await serve_jobs()
        operator = await start_operator(plane_kubeconfig, directory)
        try:
            return await run(api, operator, count, rest, plane_kubeconfig, directory)
        finally:
            operator.kill()
            await server.stop(0)


async def start_operator(kubeconfig: str, directory: Path) -> Operator:
    """With its default settings, but for the addresses."""
    defaults = {"SLUICE_LEASE_SECONDS": "15", "SLUICE_PROBE_SECONDS": "10"}
    operator = await Operator(kubeconfig, NAMESPACE, directory / "operator.log", **defaults).ready()
    while operator.metric("leader_election_master_status") != 1:
        await asyncio.sleep(0.2)
    return operator


async def run(
    api: Api, operator: Operator, count: int, rest: float, kubeconfig: str, directory: Path
) -> dict[str, Any]:
    empty = memory(operator, "VmRSS")
    load = os.getloadavg()[0]
    at = (await api.get(collection("RLJob", NAMESPACE)))["metadata"]["resourceVersion"]
    imitation = asyncio.create_task(kubelets(api, at))
    before = await sample(api, operator)
    watching = asyncio.create_task(all_running(api, count, at))
    await create_jobs(api, count)
    created = time.monotonic()
    moments = await watching
    after = await sample(api, operator)
    peak, full = memory(operator, "VmHWM"), memory(operator, "VmRSS")
    await asyncio.sleep(min(rest, 15))  # what the last passes leave to do
    first = await sample(api, operator)
    await asyncio.sleep(rest)
    second = await sample(api, operator)
    imitation.cancel()
    settled = memory(operator, "VmRSS")
    operator.kill()
    again, again_seconds = await restart(kubeconfig, directory, count)
    again.kill()
    writes = written(before, after)
    passes = "controller_runtime_reconcile_time_seconds"
    return {
        "jobs": count,
        "load": (load, os.getloadavg()[0]),
        "created": created - before.time,
        "half": moments[count // 2] - before.time,
        "seconds": moments[-1] - before.time,
        "passes": after.metric(f"{passes}_count") - before.metric(f"{passes}_count"),
        "errors": after.metric("controller_runtime_reconcile_errors_total"),
        "p50": quantile(0.5, before, after, passes),
        "p99": quantile(0.99, before, after, passes),
        "wait99": quantile(0.99, before, after, "workqueue_queue_duration_seconds"),
        "writes": writes,
        "reads": after.metric("rest_client_requests_total", method="GET")
        - before.metric("rest_client_requests_total", method="GET"),
        "cpu": after.cpu - before.cpu,
        "rss": (empty, full, peak, settled),
        "rest_cpu": (second.cpu - first.cpu) / (second.time - first.time) if rest else 0.0,
        "rest_writes": written(first, second).total(),
        "restart": again_seconds,
    }


async def restart(kubeconfig: str, directory: Path, count: int) -> tuple[Operator, float]:
    """Seconds from the start of a process to a pass over each job, the wait for the killed one's
    lease taken off."""
    begin = time.monotonic()
    operator = await Operator(
        kubeconfig, NAMESPACE, directory / "again.log", SLUICE_LEASE_SECONDS="15"
    ).ready()
    ready = time.monotonic() - begin
    while operator.metric("leader_election_master_status") != 1:
        await asyncio.sleep(0.2)
    begin = time.monotonic()
    while operator.metric("controller_runtime_reconcile_total") < count:
        await asyncio.sleep(0.5)
    return operator, ready + time.monotonic() - begin


def table(figures: dict[str, Any], rest: float) -> str:
    pods = figures["jobs"] * PODS
    per_pod = figures["writes"].total() / pods
    sizes = ", ".join(f"{size:.0f}" for size in figures["rss"])
    by_kind = ", ".join(
        f"{resource}{'/' + sub if sub else ''} {verb} {count / figures['jobs']:.2f}"
        for (resource, sub, verb), count in figures["writes"].most_common()
    )
    rows = [
        ("until all jobs run", f"{figures['seconds']:.0f} s", "< 200 s for 1,000; KubeRay 258 s"),
        (
            "until half of them run; all created",
            f"{figures['half']:.0f} s; {figures['created']:.0f} s",
            "",
        ),
        ("passes", f"{figures['passes']:.0f} ({figures['errors']:.0f} errors)", ""),
        ("a pass, p50 / p99", f"{figures['p50'] * 1000:.0f} / {figures['p99'] * 1000:.0f} ms", ""),
        ("in the queue, p99 (the histogram ends at 60 s)", f"{figures['wait99']:.1f} s", ""),
        ("writes for each pod", f"{per_pod:.2f}", "<= 4"),
        ("reads for each pod", f"{figures['reads'] / pods:.2f}", ""),
        ("RSS: empty, all running, peak, settled", f"{sizes} MB", "< 250 MB"),
        (
            "CPU of the operator",
            f"{figures['cpu']:.0f} s ({figures['cpu'] / pods * 1000:.1f} ms a pod)",
            "",
        ),
        ("at rest: CPU", f"{figures['rest_cpu'] * 100:.0f} % of a core", ""),
        (f"at rest: writes in {rest:.0f} s", f"{figures['rest_writes']}", "the lease's only"),
        ("a new process, until it has looked at all jobs", f"{figures['restart']:.0f} s", ""),
    ]
    lines = [
        f"## {figures['jobs']:,} jobs of {PODS} pods",
        "",
        f"{datetime.now(UTC):%Y-%m-%d}, {os.cpu_count()} cores, shared with other work; load "
        f"average {figures['load'][0]:.1f} at the start, {figures['load'][1]:.1f} at the end; "
        f"Python {platform.python_version()}.",
        "",
        "| | measured | goal, peer |",
        "|---|---:|---|",
        *(f"| {what} | {value} | {goal} |" for what, value, goal in rows),
        "",
        f"Writes for each job: {by_kind}.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument(
        "--rest", type=float, default=60.0, help="seconds to look at the operator when all run"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with control_plane(controllers=False) as plane, tempfile.TemporaryDirectory() as directory:
        figures = asyncio.run(
            measure(plane.kubeconfig, options.jobs, options.rest, Path(directory))
        )
    text = table(figures, options.rest)
    print(text)
    if options.out:
        options.out.write_text(text + "\n")


if __name__ == "__main__":
    main()
