"""Records of a run, as plain data and as a data frame."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from sluice import Client
from sluice.runtime.extras import install_command

METRICS = [
    {"step": 1, "rollout/raw_reward": 0.25},
    {"step": 2, "rollout/raw_reward": 0.5},
    {"step": 2, "rollout/raw_reward": 0.75},  # trained again after a crash
]


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run = tmp_path / "runs/first"
    (run / "samples").mkdir(parents=True)
    job = {"apiVersion": "sluice.dev/v1alpha1", "kind": "RLJob", "metadata": {"name": "first"}}
    (run / "job.json").write_text(json.dumps(job | {"spec": {}}))
    (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in METRICS))
    (run / "samples/step_0000002.jsonl").write_text('{"prompt": "a", "reward": 1.0}\n')
    return tmp_path / "runs"


def test_metrics_has_a_record_for_each_step(runs: Path) -> None:
    with Client.local(runs) as client:
        job = client.get("first")
        assert job.metrics() == [METRICS[0], METRICS[2]]
        assert job.samples() == [{"prompt": "a", "reward": 1.0}]
        assert job.evaluations() == []


def test_records_become_a_data_frame(runs: Path) -> None:
    pytest.importorskip("pandas")
    with Client.local(runs) as client:
        frame = client.get("first").metrics().to_pandas()
    assert list(frame["rollout/raw_reward"]) == [0.25, 0.75]


def test_records_need_no_pandas(runs: Path) -> None:
    """The test runs in a separate process, in which pandas cannot be imported."""
    text = f"""
import sys
sys.modules["pandas"] = None
from sluice import Client
from sluice_client.errors import ClientError
metrics = Client.local({str(runs)!r}).get("first").metrics()
print(metrics[-1]["rollout/raw_reward"])
try:
    metrics.to_pandas()
except ClientError as error:
    print(error)
"""
    command = [sys.executable, "-c", text]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "0.75",
        f"a data frame needs pandas: {install_command('client')}",
    ]
