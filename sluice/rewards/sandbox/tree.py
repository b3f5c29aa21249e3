"""Size and removal of a program's directory, whatever the program left there.

Standard library only.

A program may leave directories thousands of levels deep, unreadable directories, and links to any
place. Therefore this module does not recurse, does not hold a descriptor per level, and does not
follow links when it changes something.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def excess(directory: str, *, entries: int, size: int) -> str:
    """Describe which limit the tree under `directory` exceeds; "" if it keeps to them.

    A directory that cannot be read, or is too deep to have a path, counts as excess, because its
    content is unknown. The function only reads and stops at a limit, so it can run while the
    program changes the tree.

    Parameters
    ----------
    directory
        Root of the tree.
    entries
        Maximum number of files, directories and links.
    size
        Maximum bytes on disk.

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
                    with contextlib.suppress(FileNotFoundError):  # removed meanwhile
                        used += item.stat(follow_symlinks=False).st_blocks * 512
                        if item.is_dir(follow_symlinks=False):
                            waiting.append(item.path)
        except (FileNotFoundError, NotADirectoryError):
            pass  # removed or replaced meanwhile
        except OSError as error:
            return f"a directory that cannot be looked into ({error.strerror})"
        if used > size:
            return f"more than {size >> 20} MiB in files"
    return ""


def remove(directory: str) -> None:
    """Remove `directory` with its content. Raises OSError if something cannot be removed.

    Nested directories are moved to the top before their parent is removed, so any depth is fine.
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
    """Unlink everything but directories, and return the names of those."""
    subdirectories = []
    with os.scandir(descriptor) as items:
        for item in items:
            if item.is_dir(follow_symlinks=False):
                subdirectories.append(item.name)
            else:
                os.unlink(item.name, dir_fd=descriptor)
    return subdirectories


def _open_within(parent: int, name: str) -> int:
    """Open a subdirectory after giving its owner read and write permission."""
    handle = os.open(name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=parent)
    try:
        path = (
            f"/proc/self/fd/{handle}"  # refers to this directory even if its name has been reused
        )
        os.chmod(path, 0o700)
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    finally:
        os.close(handle)
