"""Files of a bucket in the cache of this machine: whole, resumed, shared and removed."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from sluice.stores import StoreError, Uri, objects
from sluice.stores.cache import entries, fetch, hold, remove
from tests.fault_proxy import Cut, Fault, FaultProxy, ProxiedRequest
from tests.object_stores import ObjectStoreServer
from tests.s3 import S3Server, clean_clients


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))


def model(server: ObjectStoreServer, content: bytes = b"weights") -> Uri:
    """A model in a bucket of its own."""
    uri = Uri(server.scheme, f"bucket-{uuid.uuid4().hex[:8]}", "models/tiny")
    server.make_bucket(uri.bucket)
    for name, data in {"config.json": b"{}", "sub/model.safetensors": content}.items():
        server.put(uri.bucket, f"{uri.key}/{name}", data)
    return uri


def files(directory: Path) -> dict[str, bytes]:
    return {
        str(file.relative_to(directory)): file.read_bytes()
        for file in directory.rglob("*")
        if file.is_file()
    }


def test_a_directory_is_fetched_once(
    any_store: ObjectStoreServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = model(any_store)
    first = fetch(uri)
    assert first.path.name == "tiny"
    assert files(first.path) == {"config.json": b"{}", "sub/model.safetensors": b"weights"}
    with FaultProxy("http://127.0.0.1:1") as nothing:
        for name, value in any_store.environment_at(nothing.url).items():
            monkeypatch.setenv(name, value)
        assert fetch(uri, version=first.version) == first
        assert nothing.requests == []


def test_a_file_and_files_by_wildcards(any_store: ObjectStoreServer) -> None:
    uri = model(any_store)
    for name in ("a-1.jsonl", "a-2.jsonl", "b.jsonl"):
        any_store.put(uri.bucket, f"data/{name}", name.encode())
    file = fetch(Uri(any_store.scheme, uri.bucket, "data/b.jsonl")).path
    assert (file.name, file.read_bytes()) == ("b.jsonl", b"b.jsonl")
    several = fetch(Uri(any_store.scheme, uri.bucket, "data/a-*.jsonl")).path
    assert files(several) == {"a-1.jsonl": b"a-1.jsonl", "a-2.jsonl": b"a-2.jsonl"}


def test_a_changed_file_is_another_version(any_store: ObjectStoreServer) -> None:
    uri = model(any_store)
    before = fetch(uri)
    any_store.put(uri.bucket, f"{uri.key}/config.json", b"[]")
    after = fetch(uri)
    assert before.version != after.version
    assert (before.path / "config.json").read_bytes() == b"{}"
    assert (after.path / "config.json").read_bytes() == b"[]"
    assert remove(before)
    with pytest.raises(StoreError, match="the files have changed"):
        fetch(uri, version=before.version)


def test_what_arrived_before_a_cut_is_not_read_again(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(objects, "_PIECE", 1000)
    monkeypatch.setattr(objects, "_PAUSES", ())
    monkeypatch.setattr(objects, "_THREADS", 1)
    content = os.urandom(5500)
    uri, down = model(s3, content), True

    def cut(request: ProxiedRequest) -> Fault | None:
        third = request.headers.get("Range") == "bytes=2000-2999"
        return Cut() if down and third else None

    def ranges(proxy: FaultProxy) -> list[str]:
        return [r.headers["Range"] for r in proxy.requests if "Range" in r.headers]

    with clean_clients(), FaultProxy(s3.url, [cut]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        with pytest.raises(StoreError) as raised:
            fetch(uri)
        assert raised.value.kind == "cut"
        assert entries() == []
        down = False
        proxy.requests.clear()
        assert files(fetch(uri).path)["sub/model.safetensors"] == content
        assert "bytes=0-999" not in ranges(proxy)
        assert "bytes=2000-2999" in ranges(proxy)


PULL = [sys.executable, "-m", "sluice_cli", "models", "pull"]


def test_a_kill_amid_a_fetch_leaves_no_version_and_no_lock(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = model(s3)
    reached: list[ProxiedRequest] = []

    def hang(request: ProxiedRequest) -> Fault | None:
        if request.path.endswith("model.safetensors") and request.method == "GET" and not reached:
            reached.append(request)
            process.kill()
        return None

    with FaultProxy(s3.url, [hang]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        process = subprocess.Popen([*PULL, str(uri)], stderr=subprocess.DEVNULL)
        process.wait(120)
        assert reached
        assert entries() == []
        assert "sub/model.safetensors" in files(fetch(uri).path)


def test_processes_that_want_the_same_fetch_it_once(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = model(s3)
    with FaultProxy(s3.url) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        both = [subprocess.Popen([*PULL, str(uri)]) for _ in range(2)]
        assert [process.wait(120) for process in both] == [0, 0]
        reads = [r for r in proxy.requests if r.method == "GET" and "safetensors" in r.path]
    assert len(reads) == 1


def test_the_version_used_longest_ago_makes_room(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, old, newer, last = (model(s3, bytes(1000)) for _ in range(4))
    monkeypatch.setenv("SLUICE_CACHE_SIZE", "3200")
    with hold(fetch(held)):
        for seconds, entry in enumerate([fetch(old), fetch(newer)]):
            os.utime(entry.record, (1000 + seconds, 1000 + seconds))
        os.utime(fetch(held).record, (1, 1))
        fetch(last)
    assert {entry.uri for entry in entries()} == {str(held), str(newer), str(last)}


def test_a_model_that_does_not_fit(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE_SIZE", "100")
    with pytest.raises(StoreError, match="is more than SLUICE_CACHE_SIZE"):
        fetch(model(s3, bytes(1000)))


def test_a_name_that_leaves_the_directory_is_refused(moto: S3Server) -> None:
    uri = model(moto)
    moto.put(uri.bucket, f"{uri.key}/../../outside", b"x")
    with clean_clients(), pytest.MonkeyPatch.context() as patch:
        for name, value in moto.environment.items():
            patch.setenv(name, value)
        with pytest.raises(StoreError, match="is no path below it"):
            fetch(uri)
