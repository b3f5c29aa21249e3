"""`sluice render`: the Kubernetes objects of a job or of a pool, as YAML."""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from sluice.api import RLJob, RLJobSpec, load_job, load_pool, manifest, pool, read_documents
from sluice.api.groups.data import parse_path
from sluice.api.schema.paths import MarkedPath, PathKind, marked, volume_of

_MODEL_REMEDY = "put it into a volume (spec.model.volume) or into the images"
_DATA_REMEDY = "put it into a volume (spec.data.volume) or into the images"
_CODE_REMEDY = "put it into the images, or mount it with spec.podTemplateOverrides"
_REMEDIES: Mapping[PathKind, str] = {
    "model": _MODEL_REMEDY,
    "draft": _MODEL_REMEDY,
    "adapter": _MODEL_REMEDY,
    "tokenizer": _MODEL_REMEDY,
    "data": _DATA_REMEDY,
    "rollouts": _DATA_REMEDY,
    "function": _CODE_REMEDY,
    "word": _CODE_REMEDY,
}


def render_file(path: Path, overrides: list[str]) -> tuple[str, list[str]]:
    """Return the objects of a job or a pool, and warnings about files that pods will not have."""
    from sluice_operator.plan.manifests.render import render_all, render_pool

    if any(document.get("kind") == pool.KIND for document in read_documents(path)):
        return to_yaml(render_pool(load_pool(path, overrides))), []
    job = load_job(path, overrides)
    objects = render_all(job)
    warnings = list(local_paths(job, path.resolve().parent, objects))
    return to_yaml(objects), _pool_warnings(job) + warnings


def _pool_warnings(job: RLJob) -> list[str]:
    if not job.spec.uses_pool:
        return []
    return [
        f"spec.rollout.pool: a cluster makes one worker for each engine of {job.spec.rollout.pool}"
        f"; here there are rollout.replicas ({job.spec.replicas})"
    ]


def local_paths(job: RLJob, base: Path, objects: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield warnings about files of this machine that are in no volume of the pods.

    Parameters
    ----------
    job
        The job, with paths as in the manifest.
    base
        Directory of the manifest.
    objects
        The rendered objects of the job.

    """
    spec = manifest(job)["spec"]
    mounts = [
        Path(mount["mountPath"])
        for document in objects
        if document["kind"] == "Pod"
        for container in document["spec"]["containers"]
        for mount in container.get("volumeMounts", [])
    ]
    for path in marked(RLJobSpec, spec):
        file = _file_of(path)
        if file is None or volume_of(path, spec) is not None:
            continue
        exists = (base / file.expanduser()).exists()
        # An absolute path that does not exist on this machine may exist in the images. A word of a
        # command that does not exist is a program or an argument.
        local = exists or (path.kind != "word" and not file.is_absolute())
        if local and not any(file.is_relative_to(mount) for mount in mounts):
            yield f"{path.field}: pods will not have {path.value}: {_REMEDIES[path.kind]}"


def _file_of(path: MarkedPath) -> Path | None:
    """Return the file or directory that a path names; None for a function of a package."""
    if path.kind == "function":
        return Path(path.value.rpartition(":")[0]) if ".py:" in path.value else None
    return parse_path(path.value)[0] if path.kind == "data" else Path(path.value)


def to_yaml(documents: list[dict[str, Any]]) -> str:
    """Write documents as YAML in block style, without anchors."""
    yaml = YAML()
    yaml.default_flow_style = False
    yaml.width = 120
    yaml.representer.ignore_aliases = lambda _: True
    text = io.StringIO()
    yaml.dump_all(documents, text)
    return text.getvalue()
