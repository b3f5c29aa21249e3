"""`sluice render`: the objects that a job starts with, as YAML."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sluice.api import RLJob, RLJobSpec, load_job, manifest
from sluice.api.groups.data import parse_path
from sluice.api.schema.paths import MarkedPath, PathKind, marked, volume_of

_OF_MODEL = "put it into a volume (spec.model.volume) or into the images"
_OF_DATA = "put it into a volume (spec.data.volume) or into the images"
_OF_CODE = "put it into the images, or mount it by a template"
_CURES: Mapping[PathKind, str] = {
    "model": _OF_MODEL,
    "tokenizer": _OF_MODEL,
    "data": _OF_DATA,
    "rollouts": _OF_DATA,
    "function": _OF_CODE,
    "word": _OF_CODE,
}


def render_file(path: Path, overrides: list[str]) -> tuple[str, list[str]]:
    """The objects of a job; and warnings about files that its pods will not have."""
    from sluice_operator.plan.manifests.render import render_all

    job = load_job(path, overrides)
    objects = render_all(job)
    return to_yaml(objects), list(local_paths(job, path.resolve().parent, objects))


def local_paths(job: RLJob, base: Path, objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Warnings about paths that lead to files of this machine, in no volume of the pods.

    An absolute path that is not here may be one of the images.
    """
    spec = manifest(job)["spec"]
    mounts = [
        Path(mount["mountPath"])
        for each in objects
        if each["kind"] == "Pod"
        for container in each["spec"]["containers"]
        for mount in container.get("volumeMounts", [])
    ]
    for path in marked(RLJobSpec, spec):
        file = _file_of(path)
        if file is None or volume_of(path, spec) is not None:
            continue
        here = (base / file.expanduser()).exists()
        # A word that is no file here is a program or an argument.
        local = here or (path.kind != "word" and not file.is_absolute())
        if local and not any(file.is_relative_to(mount) for mount in mounts):
            yield f"{path.field}: pods will not have {path.value}: {_CURES[path.kind]}"


def _file_of(path: MarkedPath) -> Path | None:
    """The file or directory that a path names; None: a function of a package."""
    if path.kind == "function":
        return Path(path.value.rpartition(":")[0]) if ".py:" in path.value else None
    return parse_path(path.value)[0] if path.kind == "data" else Path(path.value)


def to_yaml(documents: list[dict[str, Any]]) -> str:
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    text = io.StringIO()
    yaml.dump_all(documents, text)
    return text.getvalue()
