"""The promises of a checkpoint in an object store, on real S3 servers: a resume is exact, a kill at
any moment does no harm, and each failure of a store is one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sluice.runtime.pod_env import ConfigurationError
from sluice_trainer import convert
from sluice_trainer.checkpoint.checkpoint_directory import Author
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore
from sluice_trainer.checkpoint.checkpoint_writer import CheckpointError
from sluice_trainer.fsdp.policy import ShardedPolicy
from sluice_trainer.megatron.policy import MegatronPolicy
from sluice_trainer.policy.learning_policy import LearningPolicy
from tests.fault_proxy import Fault, FaultProxy, ProxiedRequest, Status
from tests.integration.trainer import tiny
from tests.s3 import S3Server, clean_clients

pytestmark = pytest.mark.usefixtures("process_group")
POLICIES: dict[str, Any] = {"megatron": MegatronPolicy, "fsdp": ShardedPolicy}


@pytest.fixture
def bucket(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An empty bucket of moto, which has conditional writes."""
    with clean_clients():
        for name, value in moto.environment.items():
            monkeypatch.setenv(name, value)
        name = f"bucket-{uuid.uuid4().hex[:8]}"
        moto.make_bucket(name)
        yield name


def make(
    model: Path, bucket: str, attempt: int = 1, backend: str = "megatron", **changes: Any
) -> LearningPolicy:
    checkpoint = {"to": f"s3://{bucket}/run", "keep": 2} | changes.pop("checkpoint", {})
    trainer = {"backend": backend} | changes.pop("trainer", {})
    spec = tiny.spec(model, checkpoint=checkpoint, trainer=trainer, **changes)
    timeout = timedelta(seconds=tiny.TIMEOUT)
    return POLICIES[backend](spec, model_dir=model, timeout=timeout, author=Author(attempt))


def train(policy: LearningPolicy, steps: int = 1) -> list[dict[str, float]]:
    result = []
    for _ in range(steps):
        shard = tiny.batch(8, seed=policy.step)
        result.append(policy.train([shard], [tiny.totals(shard)]))
    return result


def keys(server: S3Server, bucket: str) -> list[str]:
    listed = server.client().list_objects_v2(Bucket=bucket)
    return [entry["Key"] for entry in listed.get("Contents", [])]


@pytest.mark.parametrize(
    ("backend", "in_background"),
    [("megatron", True), ("fsdp", False)],
    ids=["megatron, background", "fsdp, foreground"],
)
def test_a_resumed_run_equals_an_uninterrupted_one_to_the_bit(
    qwen3: Path, tmp_path: Path, moto: S3Server, bucket: str, backend: str, in_background: bool
) -> None:
    policy = make(qwen3, bucket, backend=backend)
    assert policy.load_latest(tmp_path / "a") is None
    train(policy, 2)
    policy.begin_save(tmp_path / "a", 2, background=in_background)
    after = train(policy, 2)
    assert policy.finish_save(tmp_path / "a", wait=True) == 2
    assert not list((tmp_path / "a").rglob("*.distcp"))
    resumed = make(qwen3, bucket, attempt=2, backend=backend)
    assert resumed.load_latest(tmp_path / "b") == 2  # another node, with an empty disk
    assert train(resumed, 2) == after
    for step in (3, 4):
        resumed.begin_save(tmp_path / "b", step)
        resumed.finish_save(tmp_path / "b", wait=True)
    store = CheckpointStore.of(f"s3://{bucket}/run")
    assert store is not None
    assert store.steps() == [3, 4]  # `keep`


def test_two_ranks_write_and_one_resumes(
    qwen3: Path, tmp_path: Path, moto: S3Server, bucket: str
) -> None:
    """Each rank sends its own shards, and a checkpoint is read in another layout."""
    checkpoint = {"to": f"s3://{bucket}/run"}
    options = {
        "model": str(qwen3),
        "algorithm": {},
        "trainer": {},
        "checkpoint": checkpoint,
        "checkpoints": str(tmp_path),
    }
    saved = tiny.run("train_steps.py", json.dumps(options | {"steps": 2, "save_at": 2}), world=2)
    assert saved[0]["saved"] == 2
    shards = {key.rpartition("/")[2] for key in keys(moto, bucket) if key.endswith(".distcp")}
    assert {"__0_0.distcp", "__1_0.distcp"} <= shards
    resumed = make(qwen3, bucket, attempt=2)
    assert resumed.load_latest(tmp_path / "b") == 2


def test_a_checkpoint_in_a_bucket_becomes_a_hugging_face_checkpoint(
    qwen3: Path, tmp_path: Path, bucket: str
) -> None:
    policy = make(qwen3, bucket)
    train(policy)
    tiny.save(policy, tmp_path / "a", 1)
    policy.export_hf(tmp_path / "exported")
    paths = [f"s3://{bucket}/run", str(tmp_path / "converted"), "--like", str(qwen3)]
    command = [sys.executable, "-m", "sluice_cli", "convert", "dist-to-hf", *paths]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = ("exported", "converted")
    exported, converted = (load_file(tmp_path / name / "model.safetensors") for name in names)
    assert exported.keys() == converted.keys()
    assert all(torch.equal(converted[name], tensor) for name, tensor in exported.items())
    with (
        pytest.raises(ConfigurationError, match="neither is nor holds a complete checkpoint"),
        convert._on_disk(f"s3://{bucket}/other"),
    ):
        pass


def test_an_adapters_checkpoint(qwen3: Path, tmp_path: Path, bucket: str) -> None:
    trainer = {"lora": {"rank": 4}}
    policy = make(qwen3, bucket, backend="fsdp", trainer=trainer)
    train(policy)
    tiny.save(policy, tmp_path / "a", 1)
    after = train(policy)
    resumed = make(qwen3, bucket, attempt=2, backend="fsdp", trainer=trainer)
    assert resumed.load_latest(tmp_path / "b") == 1
    assert train(resumed) == after


@pytest.mark.parametrize(
    ("backend", "in_background"),
    [("megatron", False), ("fsdp", True)],
    ids=["megatron, foreground", "fsdp, background"],
)
def test_a_full_store_is_reported_and_does_no_harm(
    qwen3: Path,
    tmp_path: Path,
    moto: S3Server,
    bucket: str,
    monkeypatch: pytest.MonkeyPatch,
    backend: str,
    in_background: bool,
) -> None:
    policy = make(qwen3, bucket, backend=backend)
    train(policy)
    tiny.save(policy, tmp_path / "a", 1)

    def save() -> None:
        policy.begin_save(tmp_path / "a", 2, background=in_background)
        policy.finish_save(tmp_path / "a", wait=True)

    def full(request: ProxiedRequest) -> Fault | None:
        body = b"<Error><Code>QuotaExceeded</Code><Message>no</Message></Error>"
        return Status(403, body) if "distcp" in request.path else None

    with FaultProxy(moto.url, [full]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        policy.step = 2
        with pytest.raises(
            CheckpointError,
            match=rf"^checkpoint s3://{bucket}/run/iter_0000002 could not be written: "
            r"s3://\S+distcp: 127.0.0.1:\d+ has no space left: its quota is used up$",
        ):
            save()
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto.url)
    assert not [path for path in (tmp_path / "a").iterdir() if path.is_dir()]
    resumed = make(qwen3, bucket, attempt=2, backend=backend)
    assert resumed.load_latest(tmp_path / "b") == 1

    def refuse(request: ProxiedRequest) -> Fault | None:
        body = b"<Error><Code>ExpiredToken</Code><Message>no</Message></Error>"
        return Status(403, body) if "distcp" in request.path else None

    with FaultProxy(moto.url, [refuse]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(
            CheckpointError,
            match=rf"s3://{bucket}/run/iter_0000001 could not be read: .*\(ExpiredToken\)",
        ):
            resumed.load_latest(tmp_path / "b")
