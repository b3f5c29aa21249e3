"""Layers and archives of images, written with Python alone."""

from __future__ import annotations

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Iterator
from pathlib import Path

# Path in the image -> file of this machine.
Files = dict[str, Path]


def walk(entries: Iterable[Path]) -> Iterator[Path]:
    """All files of these, and below them, in an order that is always the same."""
    for entry in sorted(entries):
        if entry.is_dir():
            yield from walk(entry.iterdir())
        elif entry.is_file():
            yield entry


def add_file(tar: tarfile.TarFile, source: Path, target: str) -> None:
    """Owned by root and readable by all, whatever this machine thinks of the file."""
    with source.open("rb") as file:
        status = os.fstat(file.fileno())
        info = tarfile.TarInfo(target)
        info.size, info.mtime = status.st_size, int(status.st_mtime)
        info.mode = 0o755 if status.st_mode & 0o111 else 0o644
        tar.addfile(info, file)


def add_text(tar: tarfile.TarFile, target: str, text: str, mode: int = 0o644) -> None:
    info = tarfile.TarInfo(target)
    info.size, info.mode = len(text.encode()), mode
    tar.addfile(info, io.BytesIO(text.encode()))


def add_special(
    tar: tarfile.TarFile, target: str, kind: bytes, mode: int, link: str = "", owner: int = 0
) -> None:
    info = tarfile.TarInfo(target)
    info.type, info.mode, info.linkname, info.uid, info.gid = kind, mode, link, owner, owner
    tar.addfile(info)


def write_archive(
    archive: Path, image: str, layers: list[Path], command: list[str], user: str
) -> None:
    """Write the layers as `docker save` does. user: empty for root."""
    digests = [file_digest(layer) for layer in layers]
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {
            "Env": ["PATH=/usr/local/bin:/usr/bin:/bin"],
            "Cmd": command,
            "WorkingDir": "/tmp",
            "User": user,
        },
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}" for digest in digests]},
        "history": [{"created_by": layer.stem} for layer in layers],
    }
    text = json.dumps(config)
    config_name = f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    names = [f"{digest}/layer.tar" for digest in digests]
    manifest = [{"Config": config_name, "RepoTags": [image], "Layers": names}]
    with tarfile.open(archive, "w") as tar:
        add_text(tar, config_name, text)
        add_text(tar, "manifest.json", json.dumps(manifest))
        for layer, layer_name in zip(layers, names, strict=True):
            add_file(tar, layer, layer_name)


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def digest(parts: Iterable[str]) -> str:
    """A short name of these texts, in this order."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
