"""A program's directory: how much is in it, and its removal, whatever the program made there.
Standard library only.

A program may leave directories thousands of levels deep, unreadable ones, links to
anywhere. So nothing here recurses, holds a descriptor for each level, or follows a link
when it changes something.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def excess(directory: str, *, entries: int, size: int) -> str:
    """Words for what the tree under `directory` has too much of; "" where it keeps to the limits.

    entries: files, directories and links at most. size: bytes on disk at most. A directory
    that cannot be read, or lies too deep to have a path, counts as too much: nobody can say
    what is in it. It only reads, and stops at the limit, so it may look at a tree that a
    running program changes.
    """
    count = used = 0
    waiting = [directory]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as items:
                for item in items:
                    count += 1
                    if count > entries:
                        return f"more than {entries} files"
                    with contextlib.suppress(FileNotFoundError):  # gone again
                        used += item.stat(follow_symlinks=False).st_blocks * 512
                        if item.is_dir(follow_symlinks=False):
                            waiting.append(item.path)
        except (FileNotFoundError, NotADirectoryError):
            pass  # gone again, or another thing by now
        except OSError as error:
            return f"a directory that cannot be looked into ({error.strerror})"
        if used > size:
            return f"more than {size >> 20} MiB in files"
    return ""


def remove(directory: str) -> None:
    """Remove `directory` and all that is in it. Raises OSError where something cannot be removed.

    Directories within directories are moved up to the top before their parent is removed, so depth
    costs nothing.
    """
    top = os.open(directory, _DIRECTORY)
    try:
        os.fchmod(top, 0o700)
        prefix, numbers = secrets.token_hex(8), itertools.count()
        while subdirectories := _unlink_files(top):
            for name in subdirectories:
                child = _open_within(top, name)
                try:
                    for grandchild in _unlink_files(child):
                        os.close(
                            _open_within(child, grandchild)
                        )  # only a writable directory can be moved
                        os.rename(
                            grandchild,
                            f"{prefix}-{next(numbers)}",
                            src_dir_fd=child,
                            dst_dir_fd=top,
                        )
                finally:
                    os.close(child)
                os.rmdir(name, dir_fd=top)
    finally:
        os.close(top)
    os.rmdir(directory)


def _unlink_files(descriptor: int) -> list[str]:
    """Unlink all but directories; returns the directories' names."""
    subdirectories = []
    with os.scandir(descriptor) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                subdirectories.append(item.name)
            else:
                os.unlink(item.name, dir_fd=descriptor)
    return subdirectories


def _open_within(parent: int, name: str) -> int:
    """A descriptor of a subdirectory that its owner may read and write from now on."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        path = (
            f"/proc/self/fd/{handle}"  # the directory itself, even if the name is another's by now
        )
        os.chmod(path, 0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
