"""What checkpoints, models and data need of a store, on real servers of S3, Google and Azure; and
every failure of a store in one sentence."""

from __future__ import annotations

import base64
import uuid

import pytest

from sluice.stores import StoreError, Uri, filesystem, parse_uri, store_errors
from tests.fault_proxy import Cut, Fault, FaultProxy, ProxiedRequest, Silence, Status
from tests.object_stores import AzureServer, GoogleServer, ObjectStoreServer, connection_string
from tests.s3 import SECRET_KEY, S3Server, clean_clients


def place(server: ObjectStoreServer, key: str = "a/b") -> Uri:
    """A URI in a bucket of its own."""
    bucket = f"bucket-{uuid.uuid4().hex[:8]}"
    server.make_bucket(bucket)
    uri = parse_uri(f"{server.scheme}://{bucket}/{key}")
    assert uri is not None
    return uri


def failure(uri: Uri, *, write: bool = False) -> StoreError:
    fs = filesystem(uri)
    arguments = (b"x",) if write else ()
    with pytest.raises(StoreError) as raised, store_errors(uri):
        (fs.pipe_file if write else fs.cat_file)(uri.path, *arguments)
    assert SECRET_KEY not in str(raised.value)
    assert "\n" not in str(raised.value)
    return raised.value


def test_objects_are_written_listed_and_read_in_parts(any_store: ObjectStoreServer) -> None:
    uri = place(any_store)
    fs = filesystem(uri)
    fs.pipe_file((uri / "one").path, b"0123456789")
    fs.pipe_file((uri / "deep/two").path, b"22")
    assert fs.cat_file((uri / "one").path, start=3, end=6) == b"345"
    sizes = {path: entry["size"] for path, entry in fs.find(uri.path, detail=True).items()}
    assert sizes == {(uri / "one").path: 10, (uri / "deep/two").path: 2}


def test_an_object_of_several_parts_arrives_whole(any_store: ObjectStoreServer) -> None:
    uri, content = place(any_store), bytes(range(256)) * 4096 * 11
    with filesystem(uri).open(uri.path, "wb", block_size=5 << 20) as file:
        for at in range(0, len(content), 1 << 20):
            file.write(content[at : at + (1 << 20)])
    assert any_store.get(uri.bucket, uri.key) == content


def test_changes_by_others_are_seen(any_store: ObjectStoreServer) -> None:
    uri = place(any_store)
    assert not filesystem(uri).exists(uri.path)
    any_store.put(uri.bucket, uri.key, b"now")
    assert filesystem(uri).cat_file(uri.path) == b"now"


def test_an_unknown_bucket_is_named(any_store: ObjectStoreServer) -> None:
    error = failure(Uri(any_store.scheme, "no-such-bucket", "x"), write=True)
    assert error.kind == "missing"
    kind = "container" if any_store.scheme == "az" else "bucket"
    assert str(error).endswith(f"has no {kind} no-such-bucket")


def test_an_unknown_object_is_named(any_store: ObjectStoreServer) -> None:
    uri = place(any_store)
    assert str(failure(uri)).startswith(f"{uri}: there is nothing of this name at ")


def test_no_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    error = failure(Uri("s3", "x", "y"))
    assert error.kind == "credential"
    assert "found no credentials" in str(error)
    assert "AWS_ACCESS_KEY_ID" in str(error)


def test_refused_credentials(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = place(s3)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    error = failure(uri, write=True)
    assert error.kind == "credential"
    assert "(SignatureDoesNotMatch)" in str(error)


CODE = b"<Error><Code>%b</Code><Message>no</Message></Error>"


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        pytest.param(Status(503, CODE % b"SlowDown"), "busy", "overloaded", id="503"),
        pytest.param(Silence(20), "slow", "did not answer in time", id="silent"),
        pytest.param(Cut(), "cut", "no connection to 127.0.0.1:", id="cut"),
        pytest.param(
            Status(403, CODE % b"RequestTimeTooSkewed"),
            "clock",
            "clock of this machine",
            id="clock",
        ),
        pytest.param(Status(403, CODE % b"QuotaExceeded"), "full", "no space left", id="full"),
        pytest.param(Status(403, CODE % b"ExpiredToken"), "credential", "(ExpiredToken)", id="old"),
    ],
)
def test_a_store_that_fails(
    s3: S3Server, monkeypatch: pytest.MonkeyPatch, fault: Fault, kind: str, words: str
) -> None:
    uri = place(s3)
    monkeypatch.setenv("SLUICE_STORE_TIMEOUT_SECONDS", "0.2")
    with FaultProxy(s3.url, [lambda _: fault]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        error = failure(uri, write=True)
    assert (error.kind, error.transient) == (kind, kind in ("busy", "slow", "cut"))
    assert words in str(error)
    # An upload that waits for `100 Continue` has no time limit after it.
    assert not any("Expect" in request.headers for request in proxy.requests)


def test_a_short_failure_goes_unnoticed(s3: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = place(s3)
    s3.put(uri.bucket, uri.key, b"content" * 1000)

    def twice(request: ProxiedRequest) -> Fault | None:
        faults: dict[int, Fault] = {1: Status(503), 2: Cut(10)}
        return faults.get(request.number) if request.method == "GET" else None

    with FaultProxy(s3.url, [twice]) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        assert filesystem(uri).cat_file(uri.path) == b"content" * 1000


@pytest.mark.parametrize("status", [401, 403])
def test_google_refuses_credentials(
    google: GoogleServer, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    with FaultProxy(google.url, [lambda _: Status(status)]) as proxy, clean_clients("gs"):
        for name, value in google.environment_at(proxy.url).items():
            monkeypatch.setenv(name, value)
        error = failure(Uri("gs", "bucket", "x"), write=True)
    assert error.kind == "credential"
    assert "refuses the credentials" in str(error)
    assert ": check GOOGLE_APPLICATION_CREDENTIALS" in str(error)


def test_a_key_file_of_google_that_is_not_there(
    google: GoogleServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", "/nowhere/key.json")
    with clean_clients("gs"), pytest.raises(StoreError) as raised:
        filesystem(Uri("gs", "bucket", "x"))
    assert raised.value.kind == "credential"
    assert "GOOGLE_APPLICATION_CREDENTIALS: there is no file /nowhere/key.json" in str(raised.value)


@pytest.mark.long
def test_azure_refuses_a_key(azure: AzureServer, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = connection_string(azure.url, base64.b64encode(b"wrong").decode())
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", wrong)
    with clean_clients("az"):
        error = failure(Uri("az", "bucket", "x"), write=True)
    assert error.kind == "credential"
    assert "refuses the credentials" in str(error)
    assert "AZURE_STORAGE_ACCOUNT_KEY" in str(error)


def test_azure_without_an_account(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_CONNECTION_STRING", "AZURE_STORAGE_ACCOUNT_NAME"):
        monkeypatch.delenv(name, raising=False)
    with clean_clients("az"), pytest.raises(StoreError) as raised:
        filesystem(Uri("az", "bucket", "x"))
    assert raised.value.kind == "credential"
    assert "found no credentials for Azure; set AZURE_STORAGE_ACCOUNT_NAME" in str(raised.value)
