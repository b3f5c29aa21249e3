"""Which checkpoints count, and which go."""

from __future__ import annotations

from pathlib import Path

from sluice_trainer.megatron.checkpoint_directory import latest, path_of, prune, steps


def make(directory: Path, *names: str) -> None:
    for name in names:
        (directory / name).mkdir(parents=True)
        (directory / name / "metadata.json").touch()


def test_no_directory_has_no_checkpoint(tmp_path: Path) -> None:
    assert latest(tmp_path / "absent") is None


def test_names_are_megatrons() -> None:
    assert path_of(Path("x"), 20).name == "iter_0000020"


def test_unfinished_and_foreign_entries_do_not_count(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000003", "iter_0000010", ".iter_0000020.tmp", ".iter_0000002.pruned.tmp", "hf", "iter_x")
    assert steps(tmp_path) == [3, 10]
    assert latest(tmp_path) == 10


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000001", "iter_0000002", "iter_0000010", "hf")
    assert prune(tmp_path, keep=2) == [1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hf", "iter_0000002", "iter_0000010"]


def test_prune_with_fewer_than_it_keeps(tmp_path: Path) -> None:
    make(tmp_path, "iter_0000001")
    assert prune(tmp_path, keep=3) == []
