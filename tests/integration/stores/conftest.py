"""Each of the servers of object stores in turn."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.object_stores import (
    AzureServer,
    GoogleServer,
    ObjectStoreServer,
    serve_azure,
    serve_google,
)
from tests.s3 import KINDS, S3Server, clean_clients


@pytest.fixture(scope="session")
def google(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoogleServer]:
    with serve_google(tmp_path_factory.mktemp("google") / "server") as server:
        yield server


@pytest.fixture(scope="session")
def azure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AzureServer]:
    with serve_azure(tmp_path_factory.mktemp("azure") / "server") as server:
        yield server


@pytest.fixture(params=[*KINDS, "google", pytest.param("azure", marks=pytest.mark.long)])
def any_store(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStoreServer]:
    """A server, of which the environment tells."""
    yield from _found(request, monkeypatch)


@pytest.fixture(params=["moto", "google", pytest.param("azure", marks=pytest.mark.long)])
def store_with_conditions(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[ObjectStoreServer]:
    """A server that has conditional writes, of which the environment tells."""
    yield from _found(request, monkeypatch)


@pytest.fixture(params=KINDS)
def any_s3(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3Server]:
    """A server of S3, of which the environment tells."""
    yield from _found(request, monkeypatch)


def _found(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    server = request.getfixturevalue(request.param)
    with clean_clients(server.scheme):
        for name, value in server.environment.items():
            monkeypatch.setenv(name, value)
        yield server
