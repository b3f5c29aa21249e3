"""Fetch repositories of the Hugging Face hub into the hub's own cache (HF_HOME)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice.stores.errors import StoreError, offline, store_errors
from sluice.stores.uri import Uri

# Copies of weights in other formats. They are left out if a repository has safetensors.
_OTHER_FORMATS = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.tflite"),
    *("original/*", "onnx/*", "openvino/*", "coreml/*"),
)


def fetch_repository(uri: Uri, revision: str | None) -> tuple[Path, str]:
    """Fetch a repository, or files of it, and return its directory or file, and the commit.

    With HF_HUB_OFFLINE the cache alone is read.

    Parameters
    ----------
    uri
        Of the repository, of a directory or file in it, or with wildcards in its path.
    revision
        Branch, tag or commit, in place of that of the URI.

    """
    from huggingface_hub import HfApi, snapshot_download

    place: dict[str, Any] = {
        "repo_id": uri.bucket,
        "repo_type": uri.repo_type,
        "revision": revision or uri.revision,
    }
    endpoint = os.environ.get("HF_ENDPOINT")
    with store_errors(uri):
        # Offline, the snapshot has what was fetched; the other formats of a model may be missing.
        ignored = list(_OTHER_FORMATS) if uri.repo_type == "model" else None
        if not offline():
            info = HfApi(endpoint=endpoint).repo_info(**place, timeout=30)
            names = [file.rfilename for file in info.siblings or []]
            ignored = ignored_files(names) if uri.repo_type == "model" else None
        # By the name of the revision, which the hub's cache then knows without a network.
        directory = Path(
            snapshot_download(
                **place,
                endpoint=endpoint,
                cache_dir=_cache(),
                allow_patterns=_patterns(uri.key),
                ignore_patterns=ignored,
                local_files_only=offline(),
            )
        )
    if "*" in uri.key:
        return directory / uri.key.partition("*")[0].rpartition("/")[0], directory.name
    if not (directory / uri.key).exists():
        raise StoreError(f"{uri}: the repository has no file or directory {uri.key}", "missing")
    return directory / uri.key, directory.name


def ignored_files(names: Sequence[str]) -> list[str] | None:
    """Return the patterns of files that a model does without."""
    has_safetensors = any(name.endswith(".safetensors") for name in names)
    return list(_OTHER_FORMATS) if has_safetensors else None


def _patterns(key: str) -> list[str] | None:
    if not key:
        return None
    return [key] if "*" in key else [key, f"{key}/*"]


def _cache() -> str | None:
    """Return the hub's cache if the environment names one: it may have changed since the import."""
    home = os.environ.get("HF_HOME")
    return os.environ.get("HF_HUB_CACHE") or (f"{home}/hub" if home else None)
