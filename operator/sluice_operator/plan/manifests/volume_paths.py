"""Paths of a spec: as pods see them, and as users write them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sluice.api import RLJob, RLJobSpec
from sluice.api.schema.paths import VOLUMES, MarkedPath, rewritten, uri_of, volume_of
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests import downloads

# Directories in pods at which the volumes of a spec's paths are mounted.
DIRECTORIES: Mapping[str, str] = {"model": names.MODEL_DIR, "data": names.DATA_DIR}


def mounted(job: RLJob, spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's spec as pods see it. Paths in mounted directories stay as they are."""
    return rewritten(RLJobSpec, spec, lambda path: _in_pod(path, spec, job))


def spelled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with each path in one spelling, so that two specs can be compared.

    Paths in a volume are relative to its root.
    """

    def new_path(path: MarkedPath) -> str:
        directory = _directory(path, spec)
        if directory is None:
            return downloads.canonical(path, spec)
        return relative(path.value, directory)

    return rewritten(RLJobSpec, spec, new_path)


def model_path(owner: names.Owner) -> str:
    """Return the path of the model of a job or a pool in a pod."""
    model = owner.spec.model
    path = MarkedPath("spec.model.path", "model", model.path)
    return _in_pod(path, {"model": {"volume": model.volume}}, owner)


def draft_path(job: RLJob) -> str | None:
    """Return the path of a job's draft model in a pod."""
    speculative = job.spec.rollout.speculative
    if speculative is None or speculative.model is None:
        return None
    path = MarkedPath("spec.rollout.speculative.model", "draft", speculative.model)
    return _in_pod(path, {"model": {"volume": job.spec.model.volume}}, job)


def _in_pod(path: MarkedPath, spec: Mapping[str, Any], owner: names.Owner) -> str:
    directory = _directory(path, spec)
    if directory is None:
        return downloads.path_in_pod(path, spec, owner)
    return _mounted(path.value, directory)


def _directory(path: MarkedPath, spec: Mapping[str, Any]) -> str | None:
    """Return the directory in pods of the volume that a path is in; None if it is in none."""
    if uri_of(path) or volume_of(path, spec) is None:
        return None
    return DIRECTORIES[VOLUMES[path.kind]]


def _mounted(path: str, directory: str) -> str:
    inside = relative(path, directory)
    return directory if inside == "." else f"{directory}/{inside}"


def relative(path: str, directory: str) -> str:
    """Return a path relative to the root of its volume, which pods mount at `directory`."""
    inside = path[len(directory) :] if f"{path}/".startswith(f"{directory}/") else path
    return inside.removeprefix("./").strip("/") or "."
