"""Repositories of the hub, fetched by its own client from a server on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.stores import StoreError, parse_uri
from sluice.stores.cache import Fetched, fetch
from tests.hub import TOKEN, Hub, Repository

WEIGHTS = os.urandom(300_000)
MODEL = {"config.json": b"{}", "model.safetensors": WEIGHTS, "pytorch_model.bin": b"again"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    repositories = {
        "org/tiny": Repository({"main": MODEL, "v1": {"config.json": b"[]"}}),
        "org/gated": Repository({"main": MODEL}, access="gated"),
        "org/private": Repository({"main": MODEL}, access="private"),
        "org/rows": Repository(
            {"main": {"main/a.jsonl": b"1", "main/b.jsonl": b"2", "c.jsonl": b"3"}}, kind="datasets"
        ),
    }
    monkeypatch.setenv("SLUICE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with Hub(repositories) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def pull(text: str, version: str | None = None) -> Fetched:
    uri = parse_uri(text)
    assert uri is not None
    return fetch(uri, version=version)


def names(fetched: Fetched) -> list[str]:
    return sorted(os.listdir(fetched.path))


def test_a_model_is_in_the_cache_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    fetched = pull("hf://org/tiny")
    assert fetched.path.name == "tiny"
    assert fetched.path.resolve().is_relative_to(tmp_path / "hf" / "hub" / "models--org--tiny")
    assert names(fetched) == ["config.json", "model.safetensors"]
    assert fetched.version == hub.repositories["org/tiny"].commit("main")


def test_a_revision(hub: Hub) -> None:
    assert (pull("hf://org/tiny@v1").path / "config.json").read_bytes() == b"[]"
    with pytest.raises(StoreError, match="the repository has no revision v9"):
        pull("hf://org/tiny@v9")


def test_a_version_stays_when_the_branch_moves(hub: Hub) -> None:
    before = pull("hf://org/tiny")
    hub.repositories["org/tiny"].revisions["main"] = {"config.json": b"new"}
    hub.requests.clear()
    assert pull("hf://org/tiny", before.version) == before
    assert hub.requests == []
    assert pull("hf://org/tiny").version != before.version


def test_files_of_a_data_set(hub: Hub) -> None:
    assert pull("hf://datasets/org/rows/main/a.jsonl").path.read_bytes() == b"1"
    assert names(pull("hf://datasets/org/rows/main/*.jsonl")) == ["a.jsonl", "b.jsonl"]
    with pytest.raises(StoreError, match="no file or directory d"):
        pull("hf://datasets/org/rows/d.jsonl")


def test_a_connection_that_is_cut_goes_on_where_it_was(hub: Hub) -> None:
    large, size = os.urandom(13 << 20), 10 << 20  # the client writes 10 MiB at a time
    hub.repositories["org/tiny"].revisions["main"] = {"model.safetensors": large}
    hub.cuts = [12 << 20]
    assert (pull("hf://org/tiny").path / "model.safetensors").read_bytes() == large
    assert [r for r in hub.requests if f"model.safetensors bytes={size}-" in r]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("org/gated", "accept its terms at {hub}/org/gated, and set HF_TOKEN"),
        ("org/private", "no such repository, or it is private: check the name, or set HF_TOKEN"),
        ("org/none", "has no such repository"),
    ],
)  # fmt: skip
def test_what_a_user_without_a_token_reads(hub: Hub, name: str, words: str) -> None:
    with pytest.raises(StoreError) as raised:
        pull(f"hf://{name}")
    assert words.format(hub=hub.url) in str(raised.value)


@pytest.mark.parametrize("name", ["org/gated", "org/private"])
def test_a_token_opens_what_is_closed(hub: Hub, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert names(pull(f"hf://{name}")) == ["config.json", "model.safetensors"]


def test_offline(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched = pull("hf://org/tiny")
    hub.requests.clear()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert pull("hf://org/tiny").path == fetched.path
    with pytest.raises(StoreError, match="not in the hub's cache of this machine"):
        pull("hf://org/gated")
    assert hub.requests == []
