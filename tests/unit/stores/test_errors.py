"""Errors of clients in one sentence: the kinds that no real server of the tests gives."""

from __future__ import annotations

import errno
import sys
from typing import Any

import pytest
from fsspec.registry import _registry

from sluice.stores import StoreError, Uri, filesystem, store_errors
from sluice.stores.errors import explained

S3 = Uri("s3", "bucket", "x")
HUB = Uri("hf", "org/name", revision="v1")


class _Named(Exception):
    def __init__(self, **attributes: Any) -> None:
        super().__init__("secret detail")
        self.__dict__.update(attributes)


def named(name: str, **attributes: Any) -> Exception:
    return type(name, (_Named,), {})(**attributes)


@pytest.mark.parametrize(
    ("uri", "error", "kind", "words"),
    [
        (Uri("gs", "b"), named("HttpError", code=401), "credential",
         "Google Cloud Storage refuses the credentials (401): check GOOGLE_APPLICATION"),
        (Uri("gs", "b"), named("DefaultCredentialsError"), "credential", "found no credentials"),
        (Uri("az", "c"), named("HttpResponseError", status_code=503), "busy", "Azure is over"),
        (Uri("az", "c"), ValueError("Must provide either account_name or ..."), "credential",
         "AZURE_STORAGE_ACCOUNT_NAME"),
        (Uri("az", "c"), named("ResourceNotFoundError", error_code="ContainerNotFound"), "missing",
         "Azure has no container c"),
        (Uri("az", "c"), named("ClientAuthenticationError"), "credential",
         "found no credentials for Azure"),
        (Uri("az", "c"), named("ClientAuthenticationError", status_code=403), "credential",
         "Azure refuses the credentials (403)"),
        (Uri("gs", "b"), OSError("Forbidden: https://x"), "credential", "refuses the credentials"),
        (Uri("gs", "b"), FileNotFoundError("https://x/upload/storage/v1/b/b/o"), "missing",
         "Google Cloud Storage has no bucket b"),
        (Uri("https", "h", "x"), named("ClientResponseError", status=404), "missing", "at h"),
        (S3, named("XError"), "other", "S3: XError"),
        (HUB, named("GatedRepoError"), "credential",
         "accept its terms at https://huggingface.co/org/name, and set HF_TOKEN"),
        (HUB, named("RevisionNotFoundError"), "missing", "no revision v1"),
        (HUB, named("RepositoryNotFoundError"), "missing", "or it is private"),
    ],
)  # fmt: skip
def test_sentences(uri: Uri, error: Exception, kind: str, words: str) -> None:
    result = explained(error, uri)
    assert result.kind == kind
    assert words in str(result)
    assert str(result).startswith(f"{uri}: ")
    assert "secret" not in str(result)


def test_the_server_is_named_without_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://user:hunter2@minio:9000")
    assert "no connection to minio:9000," in str(explained(ConnectionError(), S3))


def test_a_package_that_is_missing_is_named_with_its_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(_registry, "gs", raising=False)
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(StoreError) as raised:
        filesystem(Uri("gs", "bucket"))
    assert raised.value.kind == "package"
    assert "needs gcsfs: pip install " in str(raised.value)
    assert "[gcs]" in str(raised.value)


def test_a_full_disk_is_no_error_of_the_store() -> None:
    with pytest.raises(OSError, match="No space left"), store_errors(S3):
        raise OSError(errno.ENOSPC, "No space left on device", "/cache/x")


def test_a_mistake_of_a_program_is_no_error_of_the_store() -> None:
    with pytest.raises(TypeError), store_errors(S3):
        len(1)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["0", "-1", "nan", "soon", ""])
def test_a_time_limit_that_is_no_number(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("SLUICE_STORE_TIMEOUT_SECONDS", text)
    with pytest.raises(StoreError, match="SLUICE_STORE_TIMEOUT_SECONDS: expected seconds"):
        filesystem(S3)
