"""`sluice run` with its checkpoints in a bucket: the trainer is killed while it uploads one."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fault_proxy import Fault, FaultProxy, ProxiedRequest
from tests.integration.run.laptop import ROOT, Laptop, values
from tests.s3 import S3Server

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]


def test_a_trainer_that_is_killed_amid_an_upload_resumes_to_the_bit(
    s3: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    example = tmp_path / "sft"
    ignored = shutil.ignore_patterns("*.jsonl", "model", "__pycache__")
    shutil.copytree(ROOT / "examples/sft", example, ignore=ignored)
    command = [sys.executable, str(example / "make_data.py"), str(example)]
    subprocess.run(command, check=True, timeout=60)
    s3.make_bucket("runs")

    def run(name: str) -> Laptop:
        return Laptop(
            example,
            tmp_path / name,
            "evaluation=null",
            "data.prompts[0].path=train.jsonl@[0:400]",
            "rollout.batchSize=50",
            "trainer.epochs=1",
            "checkpoint.everySteps=2",
            f"checkpoint.to=s3://runs/{name}",
        )

    through = run("through")
    assert through.run() == 0, through.text()[-3000:]
    killed, pids = run("killed"), list[int]()

    def kill(request: ProxiedRequest) -> Fault | None:
        if request.method in ("PUT", "POST") and "iter_0000006" in request.path and not pids:
            pids.append(killed.find("trainer"))
            os.kill(pids[0], signal.SIGKILL)
        return None

    with FaultProxy(s3.url, [kill]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert killed.run() == 0, killed.text()[-3000:]
    assert pids
    summary = killed.summary()
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    assert values(killed.steps().values(), "train/loss") == values(
        through.steps().values(), "train/loss"
    )
    listed = s3.client().list_objects_v2(Bucket="runs", Prefix="killed/")["Contents"]
    names = {entry["Key"].removeprefix("killed/") for entry in listed}
    assert {"hf/config.json", "hf/model.safetensors"} <= names
    manifests = {name for name in names if name.endswith("files.json")}
    assert manifests == {"iter_0000006/files.json", "iter_0000008/files.json"}
    first, second = (
        (tmp_path / name / "checkpoints/hf/model.safetensors") for name in ("through", "killed")
    )
    assert first.read_bytes() == second.read_bytes()
