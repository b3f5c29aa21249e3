"""Which strings are URIs, and what they name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice.stores import Uri, UriError, hub_id, parse_uri
from sluice.uri import is_uri, local_path


@pytest.mark.parametrize(
    ("text", "uri"),
    [
        ("hf://Qwen/Qwen3-0.6B", Uri("hf", "Qwen/Qwen3-0.6B")),
        ("hf://models/Qwen/Qwen3-0.6B", Uri("hf", "Qwen/Qwen3-0.6B")),
        ("hf://Qwen/Qwen3-0.6B@main", Uri("hf", "Qwen/Qwen3-0.6B", revision="main")),
        ("hf://o/n@refs%2Fpr%2F1", Uri("hf", "o/n", revision="refs/pr/1")),
        ("hf://o/n@v1/sub/dir", Uri("hf", "o/n", "sub/dir", "v1")),
        (
            "hf://datasets/openai/gsm8k/main/train.parquet",
            Uri("hf", "openai/gsm8k", "main/train.parquet", repo_type="dataset"),
        ),
        ("s3://bucket", Uri("s3", "bucket")),
        ("s3://bucket/", Uri("s3", "bucket")),
        ("s3://bucket/a/b/", Uri("s3", "bucket", "a/b")),
        ("S3://bucket/a", Uri("s3", "bucket", "a")),
        ("gs://bucket/rows-*.jsonl", Uri("gs", "bucket", "rows-*.jsonl")),
        ("az://container/x", Uri("az", "container", "x")),
        ("https://host:8443/x/rows.jsonl", Uri("https", "host:8443", "x/rows.jsonl")),
        ("file:///models/x", None),
        ("/models/x", None),
        ("Qwen/Qwen3-0.6B", None),
        ("C:/models", None),
        ("", None),
    ],
)
def test_strings(text: str, uri: Uri | None) -> None:
    assert parse_uri(text) == uri


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("s3a://bucket/x", "s3a:// is not a scheme that sluice reads: write s3://, or a path"),
        ("ftp://host/x", "ftp:// is not a scheme that sluice reads: expected hf://, s3://"),
        ("s3://", "expected s3://bucket/path"),
        ("s3:///x", "expected s3://bucket/path"),
        ("az:///x", "expected az://container/path"),
        ("s3://bucket/a/../b", "the path has an empty part, `.` or `..`"),
        ("s3://bucket/a//b", "the path has an empty part"),
        ("s3://b\\x", "no backslashes"),
        ("s3://bucket/\x00", "no control characters"),
        ("hf://gpt2", "expected hf://org/name"),
        ("hf://o/n@", "expected a branch, tag or commit after @"),
        ("hf://o/..", "expected hf://org/name"),
        ("https://host", "expected the address of a file"),
        ("https://[", "not a valid address"),
        ("file://host/x", "expected an absolute path after file://"),
        ("file://", "expected an absolute path"),
        ("file://[", "expected an absolute path"),
    ],
)  # fmt: skip
def test_errors(text: str, message: str) -> None:
    with pytest.raises(UriError) as raised:
        parse_uri(text)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "s3://key:hunter2@bucket/x",
        "https://user:hunter2@host/x",
        "https://host/x?sig=hunter2",
        "https://host/x#hunter2",
    ],
)
def test_credentials_in_a_uri_are_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(UriError) as raised:
        parse_uri(text)
    assert "credential" in str(raised.value)
    assert "hunter2" not in str(raised.value)


@given(st.text(max_size=60) | st.from_regex(r"(hf|s3|gs|az|https|file)://[ -~]{0,40}"))
def test_any_text_is_a_uri_a_path_or_a_uri_error(text: str) -> None:
    try:
        uri = parse_uri(text)
    except UriError:
        assert is_uri(text)
        return
    if uri is not None:
        assert parse_uri(str(uri)) == uri


def test_files() -> None:
    assert local_path("file:///models/a%20b") == "/models/a b"
    assert local_path("models/a%20b") == "models/a%20b"


@pytest.mark.parametrize("text", ["Qwen/Qwen3-0.6B", "a/b"])
def test_names_on_the_hub(text: str) -> None:
    assert hub_id(text) == Uri("hf", text)


@pytest.mark.parametrize("text", ["/models/x", "./x", "x", "a/b/c", "a/..", "~/x", "a b/c", "x/"])
def test_paths_are_no_names_on_the_hub(text: str) -> None:
    assert hub_id(text) is None


def test_what_a_filesystem_takes() -> None:
    assert Uri("s3", "bucket", "a/b").path == "bucket/a/b"
    assert Uri("s3", "bucket").path == "bucket"
    assert Uri("hf", "o/n", "x", "v1").path == "o/n@v1/x"
    assert (Uri("s3", "bucket", "a") / "b/c").path == "bucket/a/b/c"
    assert Uri("https", "host", "x").path == "https://host/x"
