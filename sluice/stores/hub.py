"""Fetch repositories of the Hugging Face hub into the hub's own cache (HF_HOME)."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sluice.stores.errors import StoreError, offline, store_errors
from sluice.stores.objects import Progress
from sluice.uri import Uri

# Seconds between two looks at what has arrived.
_LOOK_SECONDS = 5.0

# Copies of weights in other formats. They are left out if a repository has safetensors.
_OTHER_FORMATS = (
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.onnx", "*.gguf", "*.tflite"),
    *("original/*", "onnx/*", "openvino/*", "coreml/*"),
)


def fetch_repository(
    uri: Uri, revision: str | None, progress: Progress | None = None
) -> tuple[Path, str]:
    """Fetch a repository, or files of it, and return its directory or file, and the commit.

    With HF_HUB_OFFLINE the cache alone is read.

    Parameters
    ----------
    uri
        Of the repository, of a directory or file in it, or with wildcards in its path.
    revision
        Branch, tag or commit, in place of that of the URI.
    progress
        Called with the bytes that have arrived. On a terminal the hub's client shows them itself.

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
        sizes: dict[str, int] = {}
        if not offline():
            api = HfApi(endpoint=endpoint)
            info = api.repo_info(**place, timeout=30, files_metadata=progress is not None)
            sizes = {file.rfilename: file.size or 0 for file in info.siblings or []}
            ignored = ignored_files(list(sizes)) if uri.repo_type == "model" else None
        # By the name of the revision, which the hub's cache then knows without a network.
        with _watched(uri, _total(uri, sizes, ignored), progress):
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


def _total(uri: Uri, sizes: dict[str, int], ignored: list[str] | None) -> int:
    """Return the bytes of the files that are fetched."""
    from huggingface_hub.utils import filter_repo_objects

    names = filter_repo_objects(sizes, allow_patterns=_patterns(uri.key), ignore_patterns=ignored)
    return sum(sizes[name] for name in names)


@contextlib.contextmanager
def _watched(uri: Uri, total: int, progress: Progress | None) -> Iterator[None]:
    """Report the bytes of a repository that arrive in the hub's cache while the block runs."""
    if progress is None or sys.stderr.isatty():
        yield
        return
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    name = repo_folder_name(repo_id=uri.bucket, repo_type=uri.repo_type)
    blobs = Path(_cache() or constants.HF_HUB_CACHE, name, "blobs")
    before, ended = _bytes_below(blobs, whole=True), threading.Event()

    def watch() -> None:
        while not ended.wait(_LOOK_SECONDS):
            # Other revisions of the repository are there as well.
            progress(min(max(_bytes_below(blobs) - before, 0), total), total)

    thread = threading.Thread(target=watch, name="hub-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
    if _bytes_below(blobs) > before:
        progress(total, total)


def _bytes_below(directory: Path, *, whole: bool = False) -> int:
    """Return the bytes of a directory's files; `whole`: without those that are incomplete."""
    size = 0
    for file in directory.glob("*"):
        if whole and file.name.endswith(".incomplete"):
            continue
        with contextlib.suppress(OSError):  # renamed or removed meanwhile
            size += file.stat().st_blocks * 512
    return size
