"""Child process: attempt 1 of a trainer, which is killed (-9) while it publishes version 2."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import numpy as np

from sluice.stores import parse_uri
from sluice.weight_store.manifest import MANIFEST
from sluice.weight_store.objects import BucketStore
from sluice.weight_store.publisher import BASE, Publisher

VERSIONS = 3
MOMENTS = (
    "before an object",
    "after an object",
    "before the manifest",
    "after the manifest",
    "amid the removal",
)


class MortalStore(BucketStore):
    """A store whose process dies at a moment of a version that is a snapshot."""

    moment = ""

    def put(self, name: str, data: bytes) -> None:
        is_manifest = name.endswith(MANIFEST)
        self._die("before the manifest", now=is_manifest)
        super().put(name, data)
        self._die("after the manifest", now=is_manifest)

    def put_file(self, name: str, source: Path) -> None:
        self._die("before an object")
        super().put_file(name, source)
        self._die("after an object")

    def remove(self, directory: str) -> None:
        super().remove(directory)
        self._die("amid the removal")

    def _die(self, moment: str, *, now: bool = True) -> None:
        if now and moment == self.moment:
            os.kill(os.getpid(), signal.SIGKILL)


def write(directory: Path, version: int) -> Path:
    """Write the files of a version."""
    files = directory / f"version{version}"
    files.mkdir(parents=True)
    data = np.arange(100_000, dtype=np.uint8)
    data[: version + 1] += np.uint8(version)
    (files / "model.safetensors").write_bytes(data.tobytes())
    (files / "config.json").write_text("{}")
    return files


def main(uri: str, directory: Path, moment: str) -> None:
    place = parse_uri(uri)
    assert place is not None
    store = MortalStore(place)
    publisher = Publisher(store, 1, directory / BASE, snapshot_every=2, keep=1)
    for version in range(VERSIONS):
        if version == VERSIONS - 1:
            store.moment = moment
        publisher.publish(write(directory, version), version)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
