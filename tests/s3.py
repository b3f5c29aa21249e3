"""Real S3 servers on this machine: `rclone serve s3`, and moto.

    with serve_s3("rclone", directory) as server:
        os.environ.update(server.environment)
        server.make_bucket("models")

rclone keeps objects as files of a directory, streams multipart uploads and checks signatures. moto
has what rclone lacks: versions, conditional writes, and an error for every code of S3.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

from sluice.runtime.pod_env import free_port
from sluice.uri import Scheme

Kind = Literal["rclone", "moto"]
KINDS: tuple[Kind, ...] = ("rclone", "moto")
ACCESS_KEY, SECRET_KEY = "sluice-tests", "sluice-tests-secret"


@dataclass(frozen=True)
class S3Server:
    """A running server."""

    kind: Kind
    url: str
    # Of rclone: a bucket is a directory here, an object a file.
    directory: Path
    scheme: Scheme = "s3"

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which clients find the server."""
        return self.environment_at(self.url)

    def environment_at(self, url: str) -> dict[str, str]:
        """Variables with which clients find the server at another address, such as a proxy's."""
        return {
            "AWS_ENDPOINT_URL": url,
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            # No request leaves this machine in search of credentials.
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self) -> Any:
        """A client of boto3, which shares no code with s3fs's."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.url,
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            region_name="us-east-1",
        )

    def make_bucket(self, name: str) -> None:
        self.client().create_bucket(Bucket=name)

    def put(self, bucket: str, key: str, content: bytes) -> None:
        self.client().put_object(Bucket=bucket, Key=key, Body=content)

    def get(self, bucket: str, key: str) -> bytes:
        content: bytes = self.client().get_object(Bucket=bucket, Key=key)["Body"].read()
        return content

    def delete(self, bucket: str, key: str) -> None:
        self.client().delete_object(Bucket=bucket, Key=key)

    def keys(self, bucket: str) -> list[str]:
        listed = self.client().list_objects_v2(Bucket=bucket)
        return [entry["Key"] for entry in listed.get("Contents", [])]

    def put_directory(self, bucket: str, prefix: str, directory: Path) -> None:
        for file in sorted(directory.rglob("*")):
            if file.is_file():
                self.put(bucket, f"{prefix}/{file.relative_to(directory)}", file.read_bytes())


@contextmanager
def clean_clients(scheme: Scheme = "s3") -> Iterator[None]:
    """Forget clients of fsspec, which keep the credentials that they were made with."""
    import fsspec

    clients = fsspec.get_filesystem_class(scheme)
    clients.clear_instance_cache()
    yield
    clients.clear_instance_cache()


@contextmanager
def serve_s3(kind: Kind, directory: Path) -> Iterator[S3Server]:
    """Run a server. directory: for its files and its log."""
    data = directory / "buckets"
    data.mkdir(parents=True)
    port = free_port()
    bin_directory = Path(sys.prefix) / "bin"
    command = {
        "rclone": [
            str(bin_directory / "rclone"),
            *("serve", "s3", "--addr", f"127.0.0.1:{port}", "--config", "/dev/null"),
            *("--auth-key", f"{ACCESS_KEY},{SECRET_KEY}", "--vfs-cache-mode", "off", str(data)),
        ],
        "moto": [str(bin_directory / "moto_server"), "-H", "127.0.0.1", "-p", str(port)],
    }[kind]
    server = S3Server(kind, f"http://127.0.0.1:{port}", data)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=directory)
    try:
        wait_for_server(server.url, process, directory / "log")
        yield server
    finally:
        process.kill()
        process.wait()


def wait_for_server(
    url: str, process: subprocess.Popen[bytes], log: Path, seconds: float = 60.0
) -> None:
    """Wait until a server answers a request, whatever it says."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            urlopen(url, timeout=5).close()  # rclone refuses a request without a signature
        except HTTPError:
            return
        except URLError:
            time.sleep(0.05)
        else:
            return
    raise TimeoutError(log.read_text())
