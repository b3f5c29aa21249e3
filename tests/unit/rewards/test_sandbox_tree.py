"""Directories left by hostile programs are counted and removed safely."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice.rewards.sandbox import tree

LIMITS = {"entries": 10, "size": 1 << 20}


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "tree"
    path.mkdir()
    yield path
    if path.exists():
        tree.remove(str(path))


def nest(directory: Path, depth: int) -> None:
    """Create nested directories, too deep for a path to name the last one."""
    parent = os.open(directory, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=parent)
        child = os.open("d", os.O_RDONLY, dir_fd=parent)
        os.close(parent)
        parent = child
    os.close(parent)


def test_a_tree_within_its_limits(directory: Path) -> None:
    (directory / "d").mkdir()
    (directory / "d" / "f").write_bytes(bytes(1000))
    (directory / "loop").symlink_to(".")
    assert tree.excess(str(directory), **LIMITS) == ""


def test_too_many_files_are_counted_over_all_directories(directory: Path) -> None:
    for number in range(6):
        (directory / str(number)).mkdir()
        (directory / str(number) / "f").touch()
    assert tree.excess(str(directory), **LIMITS) == "more than 10 files"


def test_too_many_bytes(directory: Path) -> None:
    (directory / "f").write_bytes(os.urandom(2 << 20))
    assert tree.excess(str(directory), **LIMITS) == "more than 1 MiB in files"


def test_what_is_too_deep_for_a_path_is_too_much(directory: Path) -> None:
    nest(directory, 3000)
    excess = tree.excess(str(directory), entries=10_000, size=1 << 30)
    assert excess == "a directory that cannot be looked into (File name too long)"


def test_a_directory_that_is_gone_holds_nothing(directory: Path) -> None:
    assert tree.excess(str(directory / "gone"), **LIMITS) == ""


def test_removal_of_directories_too_deep_for_a_path_and_for_recursion(directory: Path) -> None:
    nest(directory, 5000)
    tree.remove(str(directory))
    assert not directory.exists()


def test_removal_of_many_branches_holds_few_descriptors(directory: Path) -> None:
    for first in range(40):
        for second in range(40):
            (directory / str(first) / str(second)).mkdir(parents=True)
    open_before = len(os.listdir("/proc/self/fd"))
    tree.remove(str(directory))
    assert (directory.exists(), len(os.listdir("/proc/self/fd"))) == (False, open_before)


@pytest.mark.parametrize("mode", [0o000, 0o100, 0o200, 0o300, 0o400])
def test_removal_of_directories_that_their_owner_closed(directory: Path, mode: int) -> None:
    inner = directory / "closed" / "inner"
    inner.mkdir(parents=True)
    (inner / "f").touch()
    inner.chmod(mode)
    inner.parent.chmod(mode)
    _remove_as_a_user_whom_modes_bind(directory)
    assert not directory.exists()


def _remove_as_a_user_whom_modes_bind(directory: Path) -> None:
    if os.geteuid() != 0:
        return tree.remove(str(directory))
    for path in (directory.parent, *directory.parent.rglob("*")):
        os.chown(path, 65532, 65532)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.chdir(directory.parent)
            os.setresuid(65532, 65532, 65532)
            tree.remove(directory.name)
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_removal_follows_no_link(directory: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o500)
    (outside / "f").write_text("kept")
    (directory / "sub").mkdir()
    for place in (directory, directory / "sub"):
        (place / "link").symlink_to(outside)
        (place / "loop").symlink_to("loop")
        os.mkfifo(place / "pipe")
        os.link(outside / "f", place / "hard")
    tree.remove(str(directory))
    assert not directory.exists()
    assert (outside / "f").read_text() == "kept"
    assert outside.stat().st_mode & 0o777 == 0o500


def test_a_link_in_the_directorys_place_is_refused(directory: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(directory)
    with pytest.raises(OSError, match="link"):
        tree.remove(str(link))
    assert directory.exists()
