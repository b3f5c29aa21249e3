"""What the agent and the verifier of Harbor tasks have in common: places, variables, changes.

The agent hands on what it has changed below the task's working directory, as an archive, and the
verifier puts it into a fresh copy.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
import tarfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

CHANGES, REMOVED = "changes.tar.gz", "removed.json"
TASKS = Path(__file__).parent / "tasks"
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")


def read_row() -> dict[str, Any]:
    """Return the row of the episode."""
    row: dict[str, Any] = json.loads(Path(os.environ["SLUICE_EPISODE"], "row.json").read_text())
    return row


def working_directory(row: Mapping[str, Any], in_image: bool) -> Path:
    """Return the task's directory: that of the image, or next to a worker a fresh copy."""
    if in_image:
        return Path(row["metadata"].get("workdir") or Path.cwd())
    work = Path(os.environ["SLUICE_EPISODE"], "work")
    shutil.copytree(TASKS / row["metadata"]["instance_id"] / "environment/app", work)
    return work


def resolved(variables: Mapping[str, str]) -> dict[str, str]:
    """Replace values `${NAME}` and `${NAME:-default}` by variables of this process."""
    found = {}
    for name, value in variables.items():
        if reference := _VARIABLE.fullmatch(value):
            value = os.environ.get(reference[1], reference[2])
            if value is None:
                raise SystemExit(
                    f"{name}: the variable {reference[1]} of task.toml is not set here"
                )
        found[name] = value
    return found


# --- changes

State = dict[str, tuple[int, ...]]


def state_of(directory: Path) -> State:
    """Return what tells a changed file from an unchanged one, by path."""
    found: State = {}
    for at, folders, names in os.walk(directory):
        for name in (*folders, *names):
            path = Path(at, name)
            with contextlib.suppress(FileNotFoundError):  # a process that still runs removed it
                about = path.lstat()
                what: tuple[int, ...] = (about.st_mode, about.st_uid, about.st_gid)
                if not stat.S_ISDIR(about.st_mode):  # that of a directory changes with its files
                    what += (about.st_ino, about.st_size, about.st_ctime_ns)
                found[str(path.relative_to(directory))] = what
    return found


def leave_changes(directory: Path, before: State, artifacts: Path) -> None:
    """Write what has changed since `before` into the artifacts."""
    after = state_of(directory)
    with tarfile.open(artifacts / CHANGES, "w:gz") as archive:
        for name in sorted(after):
            if after[name] != before.get(name):
                # A file that the agent may not read, or that is gone by now, stays as it was.
                with contextlib.suppress(FileNotFoundError, PermissionError):
                    _add(archive, directory / name, name)
    removed = sorted(before.keys() - after.keys(), reverse=True)  # a directory after its files
    (artifacts / REMOVED).write_text(json.dumps(removed))


def _add(archive: tarfile.TarFile, path: Path, name: str) -> None:
    """Add a file, a directory or a link to an archive, and nothing else, such as a pipe."""
    member = archive.gettarinfo(path, name)
    if member is None:
        return
    if member.islnk():  # the second name of a file: stored as another file
        member.type, member.linkname, member.size = tarfile.REGTYPE, "", path.lstat().st_size
    if member.isreg():
        with path.open("rb") as file:
            archive.addfile(member, file)
    elif member.isdir() or member.issym():
        archive.addfile(member)


def apply_changes(artifacts: Path, directory: Path) -> bool:
    """Repeat the changes of an agent in a fresh copy. Returns False if they are not usable.

    The archive is the agent's: a path that leaves the directory, also by a link, is refused.
    """
    if not (artifacts / CHANGES).exists():
        return True
    try:
        for name in json.loads((artifacts / REMOVED).read_text()):
            _remove(directory, Path(name))
        with tarfile.open(artifacts / CHANGES) as archive:
            for member in archive:
                if not (member.isreg() or member.isdir() or member.issym()):
                    return False
                place = directory / member.name
                if not (member.isdir() and place.is_dir() and not place.is_symlink()):
                    _remove(directory, Path(member.name))
                archive.extract(member, directory, filter="tar")
    except (OSError, ValueError, TypeError, EOFError, tarfile.TarError):
        return False
    return True


def _remove(directory: Path, name: Path) -> None:
    path = directory / name
    if not path.parent.resolve().is_relative_to(directory.resolve()) or ".." in name.parts:
        raise ValueError(f"{name} is outside of {directory}")
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
