"""What a checkpoint in a store promises, on real S3 servers: one that is half written is never
loaded and is cleaned up, an older attempt changes nothing, and a failing store is one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sluice.api import ManifestError, RLJob
from sluice.stores import StoreError
from sluice_cli.run.checkpoint_store import check_store
from sluice_trainer.checkpoint import checkpoint_store
from sluice_trainer.checkpoint.checkpoint_directory import (
    MANIFEST,
    Author,
    DamagedError,
    SupersededError,
)
from sluice_trainer.checkpoint.checkpoint_store import CheckpointStore, read_range, shard_source
from tests.fault_proxy import Cut, Fault, FaultProxy, ProxiedRequest, Silence, Status
from tests.integration.stores import save_and_die
from tests.integration.stores.save_and_die import save
from tests.object_stores import ObjectStoreServer
from tests.s3 import S3Server, clean_clients


def store_in(server: ObjectStoreServer, attempt: int = 1, bucket: str = "") -> CheckpointStore:
    """The store of an attempt in a bucket, by default a new one."""
    if not bucket:
        bucket = f"bucket-{uuid.uuid4().hex[:8]}"
        server.make_bucket(bucket)
    store = CheckpointStore.of(f"{server.scheme}://{bucket}/runs/demo", Author(attempt, "run"))
    assert store is not None
    return store


def keys(server: ObjectStoreServer, store: CheckpointStore) -> list[str]:
    return [key.removeprefix("runs/demo/") for key in server.keys(store.uri.bucket)]


def write(store: CheckpointStore, step: int, **files: bytes) -> None:
    records = {}
    for name, content in files.items():
        with store.writing(step, f"{name}.distcp") as stream:
            stream.write(content)
        records[f"{name}.distcp"] = stream.record
    store.publish(step, records)


def test_a_checkpoint_is_read_in_ranges(any_store: ObjectStoreServer, tmp_path: Path) -> None:
    store = store_in(any_store)
    store.claim()
    assert store.latest() is None
    (tmp_path / "local").write_bytes(b"table of contents")
    with store.writing(3, "critic/__0_0.distcp") as stream:
        stream.write(b"0123456789")
    records = {"critic/__0_0.distcp": stream.record}
    records[".metadata"] = store.upload(3, ".metadata", tmp_path / "local")
    assert store.latest() is None  # without its manifest it is no checkpoint
    store.publish(3, records)
    assert (store.latest(), store.size(3)) == (3, 27)
    final = store.fetch(3, tmp_path)
    assert (final / ".metadata").read_bytes() == b"table of contents"
    source = shard_source(final / "critic")
    assert source is not None
    assert read_range(source / "__0_0.distcp", 3, 4) == b"3456"


@pytest.mark.parametrize(
    ("moment", "latest"),
    [
        ("before the first part", 1),
        ("amid the parts", 1),
        ("before the manifest", 1),
        ("after the manifest", 2),
    ],
)
def test_a_killed_writer_leaves_nothing_that_is_loaded_or_stays(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch, moment: str, latest: int
) -> None:
    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    successor = store_in(moto, attempt=2)
    command = [sys.executable, save_and_die.__file__, str(successor.uri), moment]
    # The name of its run is empty, as that of a process without the variable.
    died = subprocess.run(command, env=os.environ | {"PYTHONPATH": os.getcwd()}, check=False)
    assert died.returncode == -9
    assert successor.latest() == latest
    uploads = moto.client().list_multipart_uploads(Bucket=successor.uri.bucket).get("Uploads", [])
    assert len(uploads) == (moment in ("amid the parts",))
    successor.claim()
    assert successor.latest() == latest
    assert "Uploads" not in moto.client().list_multipart_uploads(Bucket=successor.uri.bucket)
    left = {name.partition("/")[0] for name in keys(moto, successor) if name.startswith("iter_")}
    assert left == {f"iter_{step:07d}" for step in range(1, latest + 1)}
    save(successor, 2 if latest == 1 else 3)
    assert successor.latest() == (2 if latest == 1 else 3)


FIRST_PAGE = b"""<ListMultipartUploadsResult><IsTruncated>true</IsTruncated>
<NextKeyMarker>runs/demo/iter_0000001/a</NextKeyMarker><NextUploadIdMarker>x</NextUploadIdMarker>
</ListMultipartUploadsResult>"""


def test_unfinished_uploads_are_aborted_on_every_page(
    moto: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first_page(request: ProxiedRequest) -> Fault | None:
        is_first = "uploads" in request.path and "key-marker" not in request.path
        return Status(200, FIRST_PAGE) if request.method == "GET" and is_first else None

    for name, value in moto.environment.items():
        monkeypatch.setenv(name, value)
    store = store_in(moto)
    bucket = store.uri.bucket
    moto.client().create_multipart_upload(Bucket=bucket, Key="runs/demo/iter_0000001/b")
    with FaultProxy(moto.url, [first_page]) as proxy, clean_clients():
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store.claim()
    assert "Uploads" not in moto.client().list_multipart_uploads(Bucket=bucket)


def test_a_failing_body_aborts_its_upload(any_store: ObjectStoreServer) -> None:
    store = store_in(any_store)

    def fail() -> None:
        with store.writing(1, "__0_0.distcp") as stream:
            stream.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert keys(any_store, store) == []


def test_a_newer_incomplete_checkpoint_is_passed_over(
    any_store: ObjectStoreServer, capfd: pytest.CaptureFixture[str]
) -> None:
    store = store_in(any_store)
    store.claim()
    for step in (1, 2, 3):
        write(store, step, a=b"aa", b=b"bb")
    any_store.delete(store.uri.bucket, f"runs/demo/iter_0000003/{MANIFEST}")
    any_store.put(store.uri.bucket, "runs/demo/iter_0000002/attempt1-run/a.distcp", b"a")
    assert store.latest() == 1
    err = capfd.readouterr()
    text = err.out + err.err
    assert f"{store.uri}/iter_0000003 is not complete: it has no manifest" in text
    assert f"{store.uri}/iter_0000002 is not complete: a.distcp has 1 bytes, expected 2" in text


def test_an_older_attempt_is_refused_and_overwrites_nothing(any_store: ObjectStoreServer) -> None:
    older = store_in(any_store)
    older.claim()
    newer = store_in(any_store, attempt=2, bucket=older.uri.bucket)
    newer.claim()
    write(newer, 1, a=b"newer")
    with pytest.raises(SupersededError, match="attempt 1 has been replaced"):
        write(older, 1, a=b"older")
    assert newer.latest() == 1
    with pytest.raises(SupersededError, match="attempt 1 was replaced by attempt 2"):
        older.claim()
    newer.check_claim()


def test_the_manifest_is_written_once(store_with_conditions: ObjectStoreServer) -> None:
    store = store_in(store_with_conditions)
    store.claim()
    write(store, 1, a=b"a")
    write(store, 1, a=b"a")  # the answer to the first may have been lost
    other = store_in(store_with_conditions, attempt=2, bucket=store.uri.bucket)
    other.claim()
    with pytest.raises(StoreError, match="exists already"):
        write(other, 1, a=b"b")


def test_old_checkpoints_are_deleted(any_store: ObjectStoreServer) -> None:
    store = store_in(any_store)
    store.claim()
    for step in (1, 2, 3):
        write(store, step, a=b"a")
    assert store.prune(2) == [1]
    assert store.steps() == [2, 3]
    store.delete(1)
    store.delete(1)
    assert not [name for name in keys(any_store, store) if name.startswith("iter_0000001")]


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", ""])
def test_a_manifest_leads_nowhere_else(
    any_store: ObjectStoreServer, tmp_path: Path, name: str
) -> None:
    store = store_in(any_store)
    content = b'{"directory": "attempt1-run", "files": {"%b": [1, "00"]}}' % name.encode()
    any_store.put(store.uri.bucket, f"runs/demo/iter_0000001/{MANIFEST}", content)
    with pytest.raises(DamagedError, match=r"files\.json cannot be read"):
        store.fetch(1, tmp_path)
    assert store.latest() is None


CODE = b"<Error><Code>%b</Code><Message>no</Message></Error>"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        pytest.param(Status(503, CODE % b"SlowDown"), "overloaded.*; given up after", id="503"),
        pytest.param(Silence(20), "did not answer in time.*; given up after", id="silent"),
        pytest.param(Cut(), "no connection to .*; given up after", id="cut"),
        pytest.param(Status(403, CODE % b"RequestTimeTooSkewed"), "clock of this", id="clock"),
        pytest.param(Status(403, CODE % b"QuotaExceeded"), "no space left", id="full"),
        pytest.param(Status(403, CODE % b"ExpiredToken"), r"\(ExpiredToken\)", id="old token"),
    ],
)
def test_a_store_that_fails_is_one_sentence(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, fault: Fault, words: str
) -> None:
    store = store_in(s3)
    monkeypatch.setattr(checkpoint_store, "RETRY_SECONDS", 0.0)
    monkeypatch.setenv("SLUICE_STORE_TIMEOUT_SECONDS", "0.2")
    with FaultProxy(s3.url, [lambda _: fault]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(StoreError, match=words) as raised:
            store.claim()
    assert "\n" not in str(raised.value)


def test_a_store_that_recovers_is_waited_for(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    store = store_in(s3)
    monkeypatch.setattr(checkpoint_store, "_FIRST_PAUSE", 0.01)
    failures = 0

    def fails(request: ProxiedRequest) -> Fault | None:
        nonlocal failures
        failures += request.method == "PUT"
        return Status(503) if request.method == "PUT" and failures <= 12 else None

    with FaultProxy(s3.url, [fails]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store.claim()
        write(store, 1, a=b"a")
    assert store.latest() == 1


def test_sluice_run_checks_the_store_before_it_starts(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = store_in(s3)
    check_store(job_with(str(store.uri)))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with (
        clean_clients(),
        pytest.raises(ManifestError, match=r"spec\.checkpoint\.to: .*SignatureDoesNotMatch"),
    ):
        check_store(job_with(str(store.uri)))
    with pytest.raises(ManifestError, match=r"spec\.checkpoint\.to: .* has an empty part"):
        check_store(job_with("s3://bucket/a/../b"))


def job_with(to: str) -> RLJob:
    spec = {
        "model": {"path": "m"},
        "data": {"prompts": [{"path": "p.jsonl"}]},
        "reward": {"type": "exact_match"},
        "trainer": {"steps": 1, "gpusPerNode": 0},
        "checkpoint": {"to": to},
    }
    return RLJob.model_validate({"metadata": {"name": "demo"}, "spec": spec})
