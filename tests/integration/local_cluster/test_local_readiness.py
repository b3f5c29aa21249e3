"""A laptop's pods are ready when their probes say so."""

from __future__ import annotations

import asyncio
from pathlib import Path

from sluice_operator.cluster import LocalCluster
from sluice_operator.plan import KubeObject
from sluice_operator.plan.facts import podstate
from sluice_operator.reconcile import run_job
from tests.integration.local_cluster.local_jobs import make_job, until

SERVER = """
    import os, time
    from http.server import BaseHTTPRequestHandler, HTTPServer

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            ready = os.path.exists(os.environ["SLUICE_RUN_DIR"] + "/ready")
            good = self.path == "/readyz" and ready
            self.send_response(200 if good else 503)
            self.end_headers()

    HTTPServer(("127.0.0.1", int(os.environ["SLUICE_PORT_METRICS"])), Handler).serve_forever()
"""


async def trainer(cluster: LocalCluster, job: object) -> KubeObject | None:
    observed = await cluster.observe(job)  # type: ignore[arg-type]
    return next((pod for pod in observed.pods if podstate.role(pod) == "trainer"), None)


async def test_a_pod_is_ready_while_its_probe_succeeds(tmp_path: Path) -> None:
    job = make_job(SERVER)
    flag = tmp_path / "volumes/run/ready"
    async with LocalCluster(tmp_path) as cluster:
        running = asyncio.create_task(run_job(cluster, job))
        try:
            ready: list[bool] = []

            async def look(expected: bool) -> bool:
                pod = await trainer(cluster, job)
                ready.append(pod is not None and podstate.is_ready(pod))
                return ready[-1] is expected and pod is not None and podstate.is_running(pod)

            async def reach(expected: bool) -> None:
                async with asyncio.timeout(30):
                    while not await look(expected):
                        await asyncio.sleep(0.05)

            await until(flag.parent.exists, "the trainer started")
            await reach(False)
            assert not any(ready)
            flag.touch()
            await reach(True)
            flag.unlink()
            await reach(False)
        finally:
            running.cancel()
            await asyncio.wait({running})
