"""targets.json of a run directory: a Prometheus finds the pods that run, and no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sluice_operator.cluster import LocalCluster
from sluice_operator.cluster.local.services import TARGETS_FILE
from sluice_operator.reconcile import run_job
from tests.integration.local_cluster.local_jobs import make_job

# Targets of the job: four pods, and the engine behind one of them.
ALL = 5
COPY = f"""
    import json, os, shutil, time
    run = os.environ["SLUICE_RUN_DIR"]
    targets, end = os.path.join(run, "../..", "{TARGETS_FILE}"), time.monotonic() + 60
    while time.monotonic() < end and len(json.load(open(targets))) < {ALL}:
        time.sleep(0.05)
    shutil.copy(targets, os.path.join(run, "seen.json"))
    with open(os.path.join(run, "port"), "w") as file: file.write(os.environ["SLUICE_PORT_METRICS"])
"""


async def test_pods_are_targets_while_they_run(tmp_path: Path) -> None:
    """The trainer looks at the file once all run, and ends the job."""
    async with LocalCluster(tmp_path) as cluster:
        assert (await run_job(cluster, make_job(COPY))).state == "Succeeded"
    seen: list[dict[str, Any]] = json.loads((tmp_path / "volumes/run/seen.json").read_text())
    by_role = [(item["labels"]["role"], item["labels"].get("metrics_path", "")) for item in seen]
    assert by_role == [
        ("buffer", ""),
        ("rendezvous", ""),
        ("rollout", ""),
        ("rollout", "/engine/metrics"),
        ("trainer", ""),
    ]
    trainer = seen[-1]
    assert trainer["targets"] == [f"127.0.0.1:{(tmp_path / 'volumes/run/port').read_text()}"]
    assert trainer["labels"] == {
        "job": "demo",
        "namespace": "default",
        "role": "trainer",
        "replica": "0",
        "pod": "demo-trainer-0-1-0",
    }
    assert json.loads((tmp_path / TARGETS_FILE).read_text()) == []
