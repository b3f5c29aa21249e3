"""A script's file or text -> its commands: read here, or run by the real bash."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from sluice_migrate.bash.script import Argument, Script, read_script

_MARKS = (".git", "pyproject.toml", "setup.py")
_SCRIPT_BYTES = 1 << 20


def read(
    text: str, path: Path | None, environment: Mapping[str, str], *, exact: bool = False
) -> Script:
    """The commands of a script. path: its file, where it has one.

    Raises ScriptError, and with `exact` ImportFailedError where bash cannot be confined here.
    """
    if exact:
        from sluice_migrate.bash.sandboxed import run_script

        return run_script(text, path, environment)
    if path is None:
        return read_script(text, environment)
    absolute = path.resolve()
    project = project_of(absolute)
    here = Argument(str(project), 0) if project else None
    return read_script(text, environment, str(absolute), here, _text_of)


def project_of(path: Path) -> Path | None:
    """The folder that a script of a project is started in: the nearest one above it with the
    project's marks; None if there is none, so that nobody knows where the script is started.
    """
    folders = path.resolve().parents
    marked = (folder for folder in folders if any((folder / mark).exists() for mark in _MARKS))
    return next(marked, None)


def _text_of(path: str) -> str | None:
    """The text of a file that a script sources; None where there is none to read."""
    file = Path(path)
    if not file.is_absolute() or not file.is_file() or file.stat().st_size > _SCRIPT_BYTES:
        return None
    return file.read_text(errors="replace")
