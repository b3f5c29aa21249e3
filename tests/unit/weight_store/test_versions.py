"""Versions go through a store into another directory: publisher, store and copy together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from sluice.stores import StoreError
from sluice.weight_store.local_copy import LocalCopy
from sluice.weight_store.manifest import VersionError, VersionId
from sluice.weight_store.objects import DirectoryStore, MissingObjectError
from sluice.weight_store.publisher import Published, Publisher

SIZE = 10_001


class Trainer:
    """Publishes files that change a little from version to version."""

    def __init__(self, root: Path, attempt: int = 1) -> None:
        self.root, self.attempt = root, attempt
        self.store = CutStore(root / "store")
        self.base = root / f"attempt{attempt}"
        self.publisher = Publisher(self.store, attempt, self.base, snapshot_every=4, keep=2)
        self.random = np.random.default_rng(attempt)
        self.data = {
            name: self.random.integers(0, 256, SIZE, np.uint8) for name in ("one.bin", "two.bin")
        }

    def publish(
        self, version: int, read: tuple[VersionId, ...] = (), **options: object
    ) -> Published:
        for data in self.data.values():
            data[self.random.integers(0, SIZE, 20)] += np.uint8(1)
        files = self.root / f"version{version}"
        files.mkdir(exist_ok=True)
        for name, data in self.data.items():
            (files / name).write_bytes(data.tobytes())
        return self.publisher.publish(files, version, read=read, seconds=0, **options)  # type: ignore[arg-type]

    def path(self, version: int, name: str) -> Path:
        return self.root / "store" / VersionId(version, self.attempt).directory / name


class CutStore(DirectoryStore):
    """A directory that fails once it has taken or given some objects."""

    left = 1 << 30

    def put(self, name: str, data: bytes) -> None:
        self._count()
        super().put(name, data)

    def put_file(self, name: str, source: Path) -> None:
        self._count()
        super().put_file(name, source)

    def get(self, name: str) -> bytes:
        self._count()
        return super().get(name)

    def get_file(self, name: str, target: Path) -> None:
        self._count()
        super().get_file(name, target)

    def _count(self) -> None:
        if not self.left:
            raise StoreError("the store is cut off")
        self.left -= 1


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


@pytest.fixture
def copy(tmp_path: Path) -> LocalCopy:
    directory = tmp_path / "copy"
    directory.mkdir()
    return LocalCopy(CutStore(tmp_path / "store"), directory)


def has(copy: LocalCopy, trainer: Trainer) -> bool:
    files = {path.name: path.read_bytes() for path in copy.directory.iterdir() if path.is_file()}
    return files == {name: data.tobytes() for name, data in trainer.data.items()}


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_copy_follows_version_by_version(trainer: Trainer, copy: LocalCopy) -> None:
    for version in range(9):
        published = trainer.publish(version)
        before = copy.fetched_bytes
        assert copy.update(VersionId(version, 1)) == (version, 1)
        assert has(copy, trainer)
        if version:
            assert copy.fetched_bytes - before < 1000 + published.full_bytes // 10
            assert published.delta_bytes is not None


def test_a_joiner_takes_a_snapshot_and_the_deltas_since(trainer: Trainer, copy: LocalCopy) -> None:
    for version in range(7):
        trainer.publish(version)
    assert copy.update(VersionId(6, 1)) == (6, 1)
    assert has(copy, trainer)


@pytest.mark.parametrize("change", ["longer", "renamed", "empty"])
def test_a_file_that_changes_its_layout_goes_whole(
    trainer: Trainer, copy: LocalCopy, change: str
) -> None:
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    data = trainer.data.pop("two.bin")
    trainer.data |= {
        "longer": {"two.bin": np.append(data, np.uint8(1))},
        "renamed": {"three.bin": data},
        "empty": {"two.bin": np.empty(0, np.uint8)},
    }[change]
    if change == "empty":
        trainer.data = {"one.bin": trainer.data["one.bin"]}
        (trainer.root / "version1").mkdir()
        (trainer.root / "version1" / "two.bin").touch()
    trainer.publish(1)
    assert copy.update(VersionId(1, 1)) == (1, 1)
    expected = {name: data.tobytes() for name, data in trainer.data.items()}
    expected |= {"two.bin": b""} if change == "empty" else {}
    assert {p.name: p.read_bytes() for p in copy.directory.iterdir() if p.is_file()} == expected


def test_a_file_that_is_as_before_needs_no_object(trainer: Trainer, copy: LocalCopy) -> None:
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    for version, names in ((1, ["manifest.json"]), (4, ["one.bin.whole", "two.bin.whole"])):
        files = trainer.root / "again"
        files.mkdir()
        for name, data in trainer.data.items():
            (files / name).write_bytes(data.tobytes())
        before = copy.fetched_bytes
        for earlier in range(2, version):
            trainer.publish(earlier)
            copy.update(VersionId(earlier, 1))
            for name, data in trainer.data.items():
                (files / name).write_bytes(data.tobytes())
            before = copy.fetched_bytes
        trainer.publisher.publish(files, version)
        assert copy.update(VersionId(version, 1)) == (version, 1)
        assert copy.fetched_bytes == before
        assert has(copy, trainer)
        assert set(names) <= {p.name for p in trainer.path(version, "").iterdir()}


def test_old_versions_are_removed_at_a_snapshot(trainer: Trainer) -> None:
    for version in range(13):
        trainer.publish(version)
    assert sorted(trainer.store.directories()) == [VersionId(v, 1).directory for v in range(8, 13)]


def test_what_a_joiner_reads_is_not_removed(trainer: Trainer) -> None:
    for version in range(12):
        trainer.publish(version)
    trainer.publish(12, read=(VersionId(5, 1),))
    assert sorted(trainer.store.directories()) == [VersionId(v, 1).directory for v in range(5, 13)]


def test_a_damaged_delta_is_refused_and_a_snapshot_taken(trainer: Trainer, copy: LocalCopy) -> None:
    for version in range(4):
        trainer.publish(version)
    copy.update(VersionId(3, 1))
    trainer.publish(4)
    flip(trainer.path(4, "one.bin.delta"))
    assert copy.update(VersionId(4, 1)) == (4, 1)
    assert has(copy, trainer)
    assert [(step.of.version, step.whole) for step in copy.damaged] == [(4, False)]


def test_a_wrong_delta_with_the_right_hash_is_refused_by_the_result(
    trainer: Trainer, copy: LocalCopy
) -> None:
    for version in range(4):
        trainer.publish(version)
    copy.update(VersionId(3, 1))
    flip(copy.directory / "two.bin")  # the disk of the engine's machine has lost a bit
    trainer.publish(4)
    assert copy.update(VersionId(4, 1)) == (4, 1)
    assert has(copy, trainer)


def test_without_another_way_the_copy_stays_before_the_damage(
    trainer: Trainer, copy: LocalCopy
) -> None:
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    trainer.publish(1)
    flip(trainer.path(1, "one.bin.delta"))
    assert copy.update(VersionId(1, 1)) == (0, 1)
    # The trainer is told, and its next version is whole.
    trainer.publish(2, damaged={step.of for step in copy.damaged})
    assert copy.update(VersionId(2, 1)) == (2, 1)
    assert has(copy, trainer)


@pytest.mark.parametrize("objects", range(3))
def test_a_store_that_cuts_leaves_the_copy_as_it_was(
    trainer: Trainer, copy: LocalCopy, objects: int
) -> None:
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    before = {path.name: path.read_bytes() for path in copy.directory.iterdir() if path.is_file()}
    trainer.publish(1)
    assert isinstance(copy.store, CutStore)
    copy.store.left = objects
    with pytest.raises(StoreError, match="cut off"):
        copy.update(VersionId(1, 1))
    assert copy.held == (0, 1)
    after = {path.name: path.read_bytes() for path in copy.directory.iterdir() if path.is_file()}
    assert after == before
    copy.store.left = 100
    assert copy.update(VersionId(1, 1)) == (1, 1)
    assert has(copy, trainer)


@pytest.mark.parametrize("objects", range(5))
def test_a_version_counts_only_once_it_is_complete(
    trainer: Trainer, copy: LocalCopy, objects: int
) -> None:
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    trainer.store.left = objects
    if objects < 3:  # two deltas and the manifest
        with pytest.raises(StoreError, match="cut off"):
            trainer.publish(1)
        with pytest.raises(MissingObjectError):
            copy.update(VersionId(1, 1))
        assert copy.held == (0, 1)
        trainer.store.left = 100
    else:
        trainer.publish(1)
        trainer.store.left = 100
    # Later versions do not depend on one that was never published.
    trainer.publish(2)
    assert copy.update(VersionId(2, 1)) == (2, 1)
    assert has(copy, trainer)


def test_a_new_attempt_begins_with_a_snapshot_and_clears_up(
    trainer: Trainer, copy: LocalCopy, tmp_path: Path
) -> None:
    for version in range(3):
        trainer.publish(version)
    copy.update(VersionId(2, 1))
    successor = Trainer(tmp_path, attempt=2)
    successor.publish(2)
    assert copy.update(VersionId(2, 2)) == (2, 2)
    assert has(copy, successor)
    assert successor.store.directories() == [VersionId(2, 2).directory]
    # The attempt that was replaced may still run; it removes nothing of its successor's.
    for version in range(3, 9):
        trainer.publish(version)
    assert VersionId(2, 2).directory in successor.store.directories()


def test_a_damaged_manifest_changes_nothing(trainer: Trainer, copy: LocalCopy) -> None:
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    trainer.publish(1)
    trainer.path(1, "manifest.json").write_text("{")
    with pytest.raises(VersionError, match="version_0000001"):
        copy.update(VersionId(1, 1))
    assert copy.held == (0, 1)


def test_nothing_left_over_in_the_copy_survives_a_snapshot(
    trainer: Trainer, copy: LocalCopy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (copy.directory / "left over.safetensors").write_bytes(b"x")
    trainer.publish(0)
    copy.update(VersionId(0, 1))
    assert has(copy, trainer)
