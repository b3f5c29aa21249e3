"""Reads the commands of a script, or has bash run it (`--exact`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sluice_migrate.bash.script import Argument, Script, read_script

# Files that mark the root of a project.
_MARKS = (".git", "pyproject.toml", "setup.py")
_SCRIPT_BYTES = 1 << 20


def read(
    text: str, path: Path | None, environment: Mapping[str, str], *, exact: bool = False
) -> Script:
    """Read the commands of a script.

    Parameters
    ----------
    text
        The script.
    path
        Its file; None for a command line.
    environment
        Variables that win over those of the script.
    exact
        Run it with bash in a sandbox.

    Raises
    ------
    ScriptError
        If the script is not valid bash.
    ImportFailedError
        If bash cannot be confined on this machine.

    """
    if exact:
        from sluice_migrate.bash.sandboxed import run_script

        return run_script(text, path, environment)
    if path is None:
        return read_script(text, environment)
    absolute = path.resolve()
    project = project_of(absolute)
    folder = Argument(str(project), 0) if project else None
    return read_script(text, environment, str(absolute), folder, _text_of)


def project_of(path: Path) -> Path | None:
    """Find the root of a script's project, in which it is started.

    It is the nearest folder above the script with `.git`, `pyproject.toml` or `setup.py`.
    """
    folders = path.resolve().parents
    marked = (folder for folder in folders if any((folder / mark).exists() for mark in _MARKS))
    return next(marked, None)


def _text_of(path: str) -> str | None:
    """Read a file that a script sources; None if it cannot be read."""
    file = Path(path)
    if not file.is_absolute() or not file.is_file() or file.stat().st_size > _SCRIPT_BYTES:
        return None
    return file.read_text(errors="replace")
