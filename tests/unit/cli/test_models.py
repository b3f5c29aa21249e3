"""`sluice models`, and what other commands do with URIs, with files of a web server of this machine
and of the hub's cache alone."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sluice.api import ManifestError, load_job
from sluice_cli.models.fetching import local, write_versions
from sluice_client.resolve import resolve
from tests.hub import Hub, Repository
from tests.unit.cli.conftest import Sluice


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def web(tmp_path: Path) -> Iterator[str]:
    (tmp_path / "served").mkdir()
    (tmp_path / "served/rows.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path / "served"))
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/rows.jsonl"
    server.shutdown()
    server.server_close()


@pytest.fixture
def hub(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    files = {file.name: file.read_bytes() for file in (job_file.parent / "model").iterdir()}
    with Hub({"org/tiny": Repository({"main": files})}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_files_are_pulled_listed_and_removed(web: str, tmp_path: Path, sluice: Sluice) -> None:
    uri, _, path = sluice("models", "pull", web).stdout.split()
    assert uri == web
    assert Path(path).read_text().startswith('{"prompt": "a"}')
    (row,) = json.loads(sluice("models", "list", "-o", "json").stdout)
    assert (row["uri"], row["path"], row["inHubCache"]) == (web, path, False)
    assert web in sluice("models", "list").stdout
    assert sluice("models", "rm", web).exit_code == 0
    assert not Path(path).exists()
    assert sluice("models", "rm", web).exit_code == 1


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("s3a://b/x", "write s3://"),
        ("http://127.0.0.1:1/rows.jsonl", "no connection to 127.0.0.1:1"),
        ("./model", "expected a URI, such as hf://org/name"),
    ],
)
def test_what_cannot_be_pulled(sluice: Sluice, uri: str, words: str) -> None:
    result = sluice("models", "pull", uri)
    assert result.exit_code == 1
    assert words in result.stderr


def test_validate_says_what_a_run_would_fetch(job_file: Path, hub: Hub, sluice: Sluice) -> None:
    result = sluice("validate", str(job_file), "--set", "model.path=org/tiny")
    assert result.exit_code == 0
    assert "note: spec.model.path: not checked: sluice run fetches hf://org/tiny" in result.stdout
    assert hub.requests == []


def test_validate_reads_what_is_in_the_cache(job_file: Path, hub: Hub, sluice: Sluice) -> None:
    assert sluice("models", "pull", "org/tiny").exit_code == 0
    hub.requests.clear()
    changes = ("--set", "model.path=org/tiny")
    result = sluice("validate", str(job_file), *changes)
    assert (result.exit_code, hub.requests) == (0, [])
    assert "spec.model.path: checked as the cache has hf://org/tiny; its store" in result.stdout
    rows = job_file.parent / "rows.jsonl"
    rows.write_text("no JSON\n")
    result = sluice("validate", str(job_file), *changes, "--set", f"data.prompts[0].path={rows}")
    assert result.exit_code == 2
    assert "rows.jsonl" in result.stderr


def test_a_directory_comes_before_a_repository_of_the_hub(
    job_file: Path, hub: Hub, sluice: Sluice
) -> None:
    (job_file.parent / "org").mkdir()
    (job_file.parent / "model").rename(job_file.parent / "org/tiny")
    result = sluice("validate", str(job_file), "--set", "model.path=org/tiny")
    assert "hf://" not in result.stdout


def test_validate_deep_fetches_and_checks(
    job_file: Path, hub: Hub, web: str, sluice: Sluice
) -> None:
    changes = ("--set", "model.path=org/tiny", "--set", f"data.prompts[0].path={web}@[1:2]")
    result = sluice("validate", "--deep", str(job_file), *changes)
    assert result.exit_code == 0, result.stderr
    assert "rows.jsonl:2: 1 tokens\nb" in result.stdout


def test_a_run_that_goes_on_uses_the_versions_that_it_began_with(
    job_file: Path, hub: Hub, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    job = resolve(load_job(job_file, ["model.path=org/tiny"]), job_file.parent)
    first = local(job, run)
    write_versions(run, first.fetched)
    hub.repositories["org/tiny"].revisions["main"] = {"config.json": b"new"}
    hub.requests.clear()
    assert local(job, run).job == first.job
    assert hub.requests == []
    assert local(job).job != first.job


def test_a_uri_that_cannot_be_fetched_is_named_with_its_field(job_file: Path) -> None:
    uri = "http://127.0.0.1:1/rows.jsonl"
    job = resolve(load_job(job_file, [f"data.prompts[0].path={uri}"]), job_file.parent)
    with pytest.raises(ManifestError) as raised:
        local(job)
    assert str(raised.value).startswith(f"spec.data.prompts[0].path: {uri}: ")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("model.path=s3a://bucket/x", "s3a:// is not a scheme that sluice reads: write s3://"),
        ("data.prompts[0].path=https://h/x?sig=1", "may hold a credential"),
        ("trainer.lora={from: s3://}", "expected s3://bucket/path"),
    ],
)
def test_a_wrong_uri_is_found_when_the_manifest_is_read(
    job_file: Path, change: str, message: str
) -> None:
    with pytest.raises(ManifestError) as raised:
        load_job(job_file, [change])
    assert message in str(raised.value)
