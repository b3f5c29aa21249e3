"""`sluice migrate-manifest`: rewrite a manifest of an earlier version."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from ruamel.yaml.error import YAMLError

from sluice.api import ManifestError
from sluice.api.schema import yaml_text
from sluice.api.schema.load import read_text
from sluice.api.schema.renamed_fields import migrate_text


def migrate_file(path: Path, *, in_place: bool) -> str:
    """Rewrite the RLJobs of a file with the present names of fields.

    Parameters
    ----------
    path
        A file of YAML documents. Documents that are no RLJob stay as they are.
    in_place
        Replace the file.

    Returns
    -------
    What to print: the new text, or with `in_place` what was done.

    Raises
    ------
    ManifestError
        The file cannot be read or written, or is not YAML.

    """
    text = read_text(path)
    try:
        migrated = migrate_text(text)
    except YAMLError as error:
        raise ManifestError(yaml_text.explain(error, str(path))) from error
    if not in_place:
        return migrated
    if migrated == text:
        return f"{path}: has no old fields\n"
    try:
        _replace(path, migrated)
    except OSError as error:
        raise ManifestError(f"{path}: {error.strerror or error}") from error
    return f"{path}: rewritten\n"


def _replace(path: Path, text: str) -> None:
    """Replace a file as a whole, so that a crash leaves the old or the new one."""
    target = path.resolve()  # A link stays a link.
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.chmod(temporary, target.stat().st_mode)
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise
