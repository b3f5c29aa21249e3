"""What the init container of a pod does: files of a bucket and of a hub, by links of the job."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path

import pytest

from sluice.stores import StoreError, Uri, cache, fetch, hub, parse_uri
from sluice.stores.progress import last_progress
from sluice.stores.sources import Source
from sluice.uri import link_of
from tests.hub import Hub, Repository
from tests.object_stores import ObjectStoreServer

MODEL = {"config.json": b"{}", "model.safetensors": os.urandom(300_000)}


@pytest.fixture(autouse=True)
def _volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_TOKEN", raising=False)


def source(text: str) -> Source:
    uri = parse_uri(text)
    assert uri is not None
    return Source("spec.model.path", uri)


def files(directory: Path) -> Mapping[str, bytes]:
    return {file.name: file.read_bytes() for file in directory.iterdir()}


def init_container(links: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "sluice.stores.fetch", *words],
        env={**os.environ, "SLUICE_LINKS": str(links), "SLUICE_ROLE": "trainer"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_container_fetches_from_a_bucket(any_store: ObjectStoreServer, tmp_path: Path) -> None:
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    any_store.make_bucket(bucket)
    any_store.put(bucket, "data/rows.jsonl", b'{"prompt": "a"}\n')
    uri = f"{any_store.scheme}://{bucket}/data/rows.jsonl"
    ended = init_container(tmp_path / "links", f"spec.data.prompts[0].path={uri}")
    assert ended.returncode == 0, ended.stderr
    link = Path(link_of(Uri(any_store.scheme, bucket, "data/rows.jsonl"), str(tmp_path / "links")))
    assert (link.name, link.read_bytes()) == ("rows.jsonl", b'{"prompt": "a"}\n')
    assert link.is_symlink()
    assert last_progress(ended.stderr).startswith(f"{uri}: 16 of 16 B")


def test_a_container_that_cannot_fetch_says_why_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub({}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        ended = init_container(tmp_path, "spec.model.path=hf://org/none")
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: spec.model.path: hf://org/none: ")
    assert "has no such repository" in last
    # The job fails at once: no restart cures it.
    assert ended.returncode == 2


def test_a_volume_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    ended = init_container(tmp_path / "file" / "links", "spec.model.path=hf://org/none")
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (
        2,
        f"error: {tmp_path}/file/links: cannot make this directory: Not a directory",
    )


def test_all_pods_of_a_job_use_the_version_of_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Hub({"org/tiny": Repository({"main": MODEL})}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        first = fetch.fetch_and_link(source("hf://org/tiny"), tmp_path / "job")
        assert (first.name, files(first)) == ("tiny", MODEL)
        server.repositories["org/tiny"].revisions["main"] = {"config.json": b"new"}
        server.requests.clear()
        again = fetch.fetch_and_link(source("hf://org/tiny"), tmp_path / "job")
        assert (again, files(again), server.requests) == (first, MODEL, [])
        # Another job takes what the branch is now, and changes nothing for this one.
        other = fetch.fetch_and_link(source("hf://org/tiny"), tmp_path / "other")
        assert files(other) == {"config.json": b"new"}
        assert files(first) == MODEL


def test_a_pod_that_loses_the_race_takes_the_version_of_the_winner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    repository = Repository({"main": MODEL, "later": {"config.json": b"new"}})
    with Hub({"org/tiny": repository}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        later = repository.commit("later")
        write_once = fetch._write_once

        def lose(file: Path, text: str) -> str:
            file.write_text(str(later))
            return write_once(file, text)

        monkeypatch.setattr(fetch, "_write_once", lose)
        link = fetch.fetch_and_link(source("hf://org/tiny"), tmp_path / "job")
        assert files(link) == {"config.json": b"new"}


def test_a_store_that_fails_for_a_while_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "_PAUSE_SECONDS", 0.0)
    failures = [StoreError("busy", "busy"), StoreError("cut", "cut")]
    whole = cache.fetch

    def failing(uri: Uri, **arguments: object) -> object:
        if failures:
            raise failures.pop()
        return whole(uri, **arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(fetch, "fetch", failing)
    with Hub({"org/tiny": Repository({"main": MODEL})}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        link = fetch.fetch_and_link(source("hf://org/tiny"), tmp_path / "job")
    assert (failures, files(link)) == ([], MODEL)


def test_files_of_the_hub_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "_LOOK_SECONDS", 0.001)
    seen: list[tuple[int, int]] = []
    with Hub({"org/tiny": Repository({"main": MODEL})}) as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        hub.fetch_repository(
            source("hf://org/tiny").uri, None, lambda done, total: seen.append((done, total))
        )
    total = sum(map(len, MODEL.values()))
    assert {entry[1] for entry in seen} == {total}
    assert all(0 <= done <= total for done, _ in seen)
    assert seen[-1] == (total, total)
