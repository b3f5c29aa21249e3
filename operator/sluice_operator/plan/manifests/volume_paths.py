"""Paths of a spec that are in volumes: as pods see them, and as users write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sluice.api import ModelSource, RLJob
from sluice.api.job import RLJobSpec
from sluice.api.pool import PoolModel
from sluice.api.schema.paths import VOLUMES, MarkedPath, rewritten, volume_of
from sluice_operator.plan.facts import names

# Directories in pods at which the volumes of a spec's paths are mounted.
DIRECTORIES: Mapping[str, str] = {"model": names.MODEL_DIR, "data": names.DATA_DIR}


def mounted(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec as pods see it. Paths in mounted directories stay as they are."""
    return _in_volumes(spec, _mounted)


def spelled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return the spec with paths relative to the root of their volume.

    Each path has one spelling, so that two specs can be compared.
    """
    return _in_volumes(spec, relative)


def model_path(job: RLJob) -> str:
    """Return the path of a job's model in a pod."""
    return path_of_model(job.spec.model)


def draft_path(job: RLJob) -> str | None:
    """Return the path of a job's draft model in a pod."""
    speculative = job.spec.rollout.speculative
    if speculative is None or speculative.model is None:
        return None
    in_volume = job.spec.model.volume is not None
    return _mounted(speculative.model, names.MODEL_DIR) if in_volume else speculative.model


def path_of_model(model: ModelSource | PoolModel) -> str:
    """Return the path of a model in a pod."""
    return model.path if model.volume is None else _mounted(model.path, names.MODEL_DIR)


def _in_volumes(spec: Mapping[str, Any], new: Callable[[str, str], str]) -> dict[str, Any]:
    """Return a copy of the spec, with `new(path, directory of its volume)` for paths in volumes."""

    def new_path(path: MarkedPath) -> str:
        in_volume = volume_of(path, spec) is not None
        return new(path.value, DIRECTORIES[VOLUMES[path.kind]]) if in_volume else path.value

    return rewritten(RLJobSpec, spec, new_path)


def _mounted(path: str, directory: str) -> str:
    inside = relative(path, directory)
    return directory if inside == "." else f"{directory}/{inside}"


def relative(path: str, directory: str) -> str:
    """Return a path relative to the root of its volume, which pods mount at `directory`."""
    inside = path[len(directory) :] if f"{path}/".startswith(f"{directory}/") else path
    return inside.removeprefix("./").strip("/") or "."
