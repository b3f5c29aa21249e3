"""Weight versions on real S3 servers, and through a server that fails between the two ends."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import uuid
from pathlib import Path

import numpy as np
import pytest

from sluice.stores import StoreError
from sluice.weight_store.local_copy import LocalCopy
from sluice.weight_store.manifest import VersionId
from sluice.weight_store.objects import MissingObjectError, ObjectStore, open_store
from sluice.weight_store.publisher import BASE, Publisher
from tests.fault_proxy import Cut, Fault, FaultProxy, ProxiedRequest, Status
from tests.integration.stores import publish_and_die
from tests.object_stores import ObjectStoreServer
from tests.s3 import S3Server, clean_clients

SIZE = 300_000


def opened(server: ObjectStoreServer) -> tuple[ObjectStore, str]:
    """Return a store in a new bucket, and its URI."""
    bucket = f"weights-{uuid.uuid4().hex[:8]}"
    server.make_bucket(bucket)
    uri = f"{server.scheme}://{bucket}/runs"
    return open_store(uri, "default/job/1"), uri


class Trainer:
    def __init__(self, store: ObjectStore, root: Path) -> None:
        self.root = root / "trainer"
        self.root.mkdir()
        self.publisher = Publisher(store, 1, self.root / BASE, snapshot_every=3, keep=1)
        self.random = np.random.default_rng(0)
        self.data = self.random.integers(0, 256, SIZE, np.uint8)

    def publish(self, version: int, seconds: float = 60.0) -> None:
        self.data[self.random.integers(0, SIZE, 500)] += np.uint8(1)
        files = self.root / f"version{version}"
        files.mkdir(exist_ok=True)
        (files / "model.safetensors").write_bytes(self.data.tobytes())
        (files / "config.json").write_text("{}")
        self.publisher.publish(files, version, seconds=seconds)


def copy_of(store: ObjectStore, root: Path) -> LocalCopy:
    directory = root / "copy"
    directory.mkdir()
    return LocalCopy(store, directory)


def test_versions_travel_through_a_bucket(any_store: ObjectStoreServer, tmp_path: Path) -> None:
    store, _ = opened(any_store)
    assert store.directories() == []
    trainer, copy = Trainer(store, tmp_path), copy_of(store, tmp_path)
    for version in range(4):
        trainer.publish(version)
        before = copy.fetched_bytes
        assert copy.update(VersionId(version, 1)) == (version, 1)
        assert (copy.directory / "model.safetensors").read_bytes() == trainer.data.tobytes()
        assert version == 0 or copy.fetched_bytes - before < SIZE / 20
    # Version 3 is a snapshot, before which nothing is kept.
    assert store.directories() == [VersionId(3, 1).directory]
    with pytest.raises(MissingObjectError):
        copy.update(VersionId(2, 1))


def test_a_store_that_fails_for_a_while_costs_nothing_else(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store, uri = opened(s3)
    trainer, copy = Trainer(store, tmp_path), copy_of(store, tmp_path)
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    failing: list[Fault | None] = [None]

    def fault(request: ProxiedRequest) -> Fault | None:
        return failing[0] if request.path.find(VersionId(1, 1).directory) >= 0 else None

    monkeypatch.setenv("SLUICE_STORE_TIMEOUT_SECONDS", "1")
    with FaultProxy(s3.url, [fault]) as proxy, clean_clients():
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        far = open_store(uri, "default/job/1")
        trainer.publisher._store = copy.store = far
        failing[0] = Status(503)
        with pytest.raises(StoreError, match="overloaded"):
            trainer.publish(1, seconds=0.0)
        with pytest.raises(StoreError, match="overloaded"):
            copy.update(VersionId(1, 1))
        failing[0] = None
        trainer.publish(1)
        failing[0] = Cut(40)
        with pytest.raises(StoreError):
            copy.update(VersionId(1, 1))
        assert copy.held == (0, 1)
        failing[0] = None
        assert copy.update(VersionId(1, 1)) == (1, 1)
    assert (copy.directory / "model.safetensors").read_bytes() == trainer.data.tobytes()


@pytest.mark.parametrize("moment", publish_and_die.MOMENTS)
def test_a_trainer_that_is_killed_amid_a_version_leaves_none_that_is_incomplete(
    s3: S3Server, tmp_path: Path, moment: str
) -> None:
    store, uri = opened(s3)
    command = [sys.executable, publish_and_die.__file__, f"{uri}/default/job/1", str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    died = subprocess.run([*command, moment], env=environment, check=False)
    assert died.returncode == -9
    # What engines had heard of: the version before, as long as its files are there.
    copy = copy_of(store, tmp_path)
    if moment == "amid the removal":
        with contextlib.suppress(MissingObjectError):
            copy.update(VersionId(1, 1))
        assert copy.held is None
    else:
        assert copy.update(VersionId(1, 1)) == (1, 1)
    if moment in ("before an object", "after an object", "before the manifest"):
        with pytest.raises(MissingObjectError):
            copy.update(VersionId(2, 1))
    successor = tmp_path / "attempt2"
    publisher = Publisher(store, 2, successor / BASE, snapshot_every=2, keep=1)
    publisher.publish(publish_and_die.write(successor, 2), 2)
    assert copy.update(VersionId(2, 2)) == (2, 2)
    model = (copy.directory / "model.safetensors").read_bytes()
    assert model == (successor / BASE / "model.safetensors").read_bytes()
    assert store.directories() == [VersionId(2, 2).directory]


def test_an_engine_that_lost_the_store_for_long_takes_the_newest_snapshot_and_deltas(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    near, uri = opened(s3)
    trainer = Trainer(near, tmp_path)
    lost = False

    def outage(request: ProxiedRequest) -> Fault | None:
        return Status(503) if lost else None

    with FaultProxy(s3.url, [outage]) as proxy, clean_clients():
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        copy = copy_of(open_store(uri, "default/job/1"), tmp_path)
        trainer.publish(0)
        copy.update(VersionId(0, 1))
        before = (copy.directory / "model.safetensors").read_bytes()
        lost = True
        for version in range(1, 8):
            trainer.publish(version)
        with pytest.raises(StoreError, match="overloaded"):
            copy.update(VersionId(7, 1))
        # What the engine has loaded stays as it was, and nothing counts as damaged.
        assert (copy.held, copy.damaged) == ((0, 1), frozenset())
        assert (copy.directory / "model.safetensors").read_bytes() == before
        lost = False
        proxy.requests.clear()
        assert copy.update(VersionId(7, 1)) == (7, 1)
    read = {VersionId(version, 1).directory for version in range(8)}
    read = {name for name in read if any(name in request.path for request in proxy.requests)}
    assert read == {VersionId(6, 1).directory, VersionId(7, 1).directory}
    assert (copy.directory / "model.safetensors").read_bytes() == trainer.data.tobytes()
