"""The directory of checkpoints: complete, pruned and damaged ones, and its owner."""

from __future__ import annotations

import json
import threading
import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sluice_trainer.checkpoint import checkpoint_directory
from sluice_trainer.checkpoint.checkpoint_directory import (
    MANIFEST,
    Author,
    DamagedError,
    SupersededError,
    claim,
    commit,
    delete_directory,
    latest_step,
    manifest_files,
    path_of,
    prune,
    record_of,
    steps,
    temporary_of,
    verify,
)

FIRST, SECOND = Author(1, "run"), Author(2, "run")


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "metadata.json").touch()


def uncommitted(directory: Path, step: int, author: Author) -> Path:
    """Write a checkpoint with its files, without committing it."""
    temporary = temporary_of(path_of(directory, step), author)
    (temporary / "critic").mkdir(parents=True)
    (temporary / "weights").write_bytes(b"weights")
    (temporary / "critic" / "weights").write_bytes(b"of the critic")
    return temporary


def test_no_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert latest_step(tmp_path / "absent") is None


def test_names_are_those_of_megatron() -> None:
    assert path_of(Path("x"), 20).name == "iter_0000020"


def test_unfinished_and_foreign_entries_do_not_count(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000003", "iter_0000010", ".iter_0000020.attempt1.tmp", "hf", "iter_x")
    assert steps(tmp_path) == [3, 10]
    assert latest_step(tmp_path) == 10


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000001", "iter_0000002", "iter_0000010", "hf")
    claim(tmp_path, FIRST)
    assert prune(tmp_path, 2, FIRST) == [1]
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == [
        "hf",
        "iter_0000002",
        "iter_0000010",
    ]


def test_prune_deletes_no_checkpoint_if_there_are_few(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000001")
    claim(tmp_path, FIRST)
    assert prune(tmp_path, 3, FIRST) == []


def test_a_pruned_checkpoint_is_renamed_before_its_files_are_deleted(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000001", "iter_0000002")
    claim(tmp_path, FIRST)
    renamed: list[Path] = []
    prune(tmp_path, 1, FIRST, renamed.append)
    assert steps(tmp_path) == [2]
    assert [directory.is_dir() for directory in renamed] == [True]
    claim(tmp_path, FIRST)  # deletes what an earlier process has left
    assert not renamed[0].exists()


def test_two_attempts_may_delete_the_same_checkpoint(tmp_path: Path) -> None:
    """A replaced attempt may still be deleting when its successor claims the directory."""
    for number in range(500):
        (tmp_path / f"old/{number}").mkdir(parents=True)
    barrier = threading.Barrier(2)

    def delete() -> None:
        barrier.wait(60)
        delete_directory(tmp_path / "old")

    with ThreadPoolExecutor(2) as pool:
        for deletion in [pool.submit(delete), pool.submit(delete)]:
            deletion.result(60)
    assert list(tmp_path.iterdir()) == []


def test_a_committed_checkpoint_matches_its_manifest(tmp_path: Path) -> None:
    claim(tmp_path, FIRST)
    temporary, final = uncommitted(tmp_path, 5, FIRST), path_of(tmp_path, 5)
    commit(temporary, final, FIRST, {"weights": record_of(temporary / "weights")})
    assert manifest_files(final) == ["critic/weights", "weights"]
    verify(final, manifest_files(final))
    assert latest_step(tmp_path) == 5
    assert (tmp_path / checkpoint_directory.TRACKER).read_text() == "5"


def test_a_checkpoint_with_crc_checksums_is_still_verified(tmp_path: Path) -> None:
    claim(tmp_path, FIRST)
    final = path_of(tmp_path, 5)
    commit(uncommitted(tmp_path, 5, FIRST), final, FIRST)
    old = {"weights": [7, zlib.crc32(b"weights")], "critic/weights": [13, 0x3F0C]}
    (final / MANIFEST).write_text(json.dumps({"files": old}))
    verify(final, ["weights"])
    with pytest.raises(DamagedError, match="does not have the content that was written"):
        verify(final, ["critic/weights"])


def truncate(final: Path) -> None:
    (final / "weights").write_bytes(b"weigh")


def change(final: Path) -> None:
    (final / "weights").write_bytes(b"height!")


def remove(final: Path) -> None:
    (final / "critic" / "weights").unlink()


def remove_manifest(final: Path) -> None:
    (final / MANIFEST).unlink()


def cut_manifest(final: Path) -> None:
    (final / MANIFEST).write_text(json.dumps({"files": {}})[:5])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(truncate, "weights has 5 bytes, expected 7", id="truncated"),
        pytest.param(change, "weights does not have the content that was written", id="changed"),
        pytest.param(remove, "critic/weights is missing", id="missing"),
        pytest.param(remove_manifest, "has no files.json", id="no manifest"),
        pytest.param(cut_manifest, "files.json cannot be read", id="half a manifest"),
    ],
)
def test_an_error_names_the_damaged_file(tmp_path: Path, damage: object, message: str) -> None:
    assert callable(damage)
    claim(tmp_path, FIRST)
    final = path_of(tmp_path, 5)
    commit(uncommitted(tmp_path, 5, FIRST), final, FIRST)
    damage(final)
    with pytest.raises(DamagedError, match=message):
        verify(final, manifest_files(final))


def test_a_checkpoint_with_a_file_shorter_than_its_writer_reports_is_not_committed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_directory, "_VISIBLE_SECONDS", 0.0)
    claim(tmp_path, FIRST)
    with pytest.raises(DamagedError, match="weights has 7 bytes here, its writer says 8"):
        commit(uncommitted(tmp_path, 5, FIRST), path_of(tmp_path, 5), FIRST, {"weights": (8, "0")})
    assert latest_step(tmp_path) is None


def test_a_newer_attempt_takes_the_directory_and_removes_unfinished_ones(tmp_path: Path) -> None:
    claim(tmp_path, FIRST)
    temporary = uncommitted(tmp_path, 5, FIRST)
    claim(tmp_path, SECOND)
    assert not temporary.exists()
    for action in (
        lambda: commit(uncommitted(tmp_path, 5, FIRST), path_of(tmp_path, 5), FIRST),
        lambda: prune(tmp_path, 1, FIRST),
        lambda: claim(tmp_path, FIRST),
    ):
        with pytest.raises(SupersededError, match=r"attempt 1 .*replaced"):
            action()
    assert steps(tmp_path) == []
    commit(uncommitted(tmp_path, 5, SECOND), path_of(tmp_path, 5), SECOND)
    assert steps(tmp_path) == [5]


def test_an_attempt_that_stalls_after_its_last_check_cannot_publish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    claim(tmp_path, FIRST)
    temporary = uncommitted(tmp_path, 5, FIRST)
    check = checkpoint_directory.check_claim

    def check_and_stall(directory: Path, author: Author) -> None:
        check(directory, author)
        monkeypatch.setattr(checkpoint_directory, "check_claim", check)
        claim(directory, SECOND)

    monkeypatch.setattr(checkpoint_directory, "check_claim", check_and_stall)
    with pytest.raises(FileNotFoundError):
        commit(temporary, path_of(tmp_path, 5), FIRST)
    assert steps(tmp_path) == []


def test_a_recreated_job_takes_over_the_directory_of_the_old_one(tmp_path: Path) -> None:
    old, new = Author(7, "old"), Author(1, "new")
    claim(tmp_path, old)
    claim(tmp_path, new)
    with pytest.raises(SupersededError, match="attempt 7 has been replaced"):
        prune(tmp_path, 1, old)
