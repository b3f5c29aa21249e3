"""Make the paths of a manifest absolute, as a run of this machine needs them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sluice.api import KIND, Model, RLEnginePool, RLEnginePoolSpec, RLJob, RLJobSpec, manifest
from sluice.api.schema.paths import (
    REMOTE,
    MarkedPath,
    command_word,
    rewritten,
    split_slice,
    volume_of,
)
from sluice.uri import hub_id, local_path, parse_uri


def resolve(job: RLJob, base: Path) -> RLJob:
    """Return the job with paths relative to `base`, the manifest's directory, made absolute.

    Paths inside volumes, and functions named by their package, stay as they are.
    """
    document = manifest(job)
    document["spec"] = _absolute(RLJobSpec, document["spec"], base)
    document["kind"] = KIND
    return RLJob.model_validate(document)


def resolve_pool(pool: RLEnginePool, base: Path) -> RLEnginePool:
    """Return the pool with paths relative to `base`, the manifest's directory, made absolute."""
    document = manifest(pool)
    document["spec"] = _absolute(RLEnginePoolSpec, document["spec"], base)
    return RLEnginePool.model_validate(document)


def _absolute(model: type[Model], spec: dict[str, Any], base: Path) -> dict[str, Any]:
    def absolute(path: MarkedPath) -> str:
        if path.kind in REMOTE and volume_of(path, spec) is None:
            return _place(path, base)
        if path.kind == "word":
            return command_word(path.value, base)
        in_pod = volume_of(path, spec) is not None or (
            path.kind == "function" and ".py:" not in path.value
        )
        return path.value if in_pod else str((base / Path(path.value).expanduser()).resolve())

    return rewritten(model, spec, absolute)


def _place(path: MarkedPath, base: Path) -> str:
    """Return the absolute path, or the URI, of a model or of data.

    `org/name` is a repository of the hub if there is no such path.
    """
    text, part = split_slice(path.value)
    if uri := parse_uri(text):
        return f"{uri}{part}"
    file = (base / Path(local_path(text)).expanduser()).resolve()
    on_hub = None if path.kind == "data" or file.exists() else hub_id(text)
    return f"{on_hub or file}{part}"
