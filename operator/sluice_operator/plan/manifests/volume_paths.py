"""Paths of a spec that lie in volumes: as pods find them, and as users write them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sluice.api import RLJob
from sluice.api.job import RLJobSpec
from sluice.api.schema.paths import VOLUMES, MarkedPath, rewritten, volume_of
from sluice_operator.plan.facts import names

DIRECTORIES: Mapping[str, str] = {"model": names.MODEL_DIR, "data": names.DATA_DIR}
"""Directories in pods of the volumes that hold a spec's paths."""


def mounted(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec as pods see it. What is mounted already stays as it is."""
    return _in_volumes(spec, _mounted)


def spelled(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with paths relative to their volume's root, each in one spelling:
    two specs can be compared.
    """
    return _in_volumes(spec, _relative)


def model_path(job: RLJob) -> str:
    """Where a pod finds the model."""
    path = job.spec.model.path
    return path if job.spec.model.volume is None else _mounted(path, names.MODEL_DIR)


def _in_volumes(spec: Mapping[str, Any], new: Callable[[str, str], str]) -> dict[str, Any]:
    """A copy of the spec with `new(path, directory of its volume)` for each
    path that a volume holds.
    """

    def of_volume(path: MarkedPath) -> str:
        held = volume_of(path, spec) is not None
        return new(path.value, DIRECTORIES[VOLUMES[path.kind]]) if held else path.value

    return rewritten(RLJobSpec, spec, of_volume)


def _mounted(path: str, directory: str) -> str:
    relative = _relative(path, directory)
    return directory if relative == "." else f"{directory}/{relative}"


def _relative(path: str, directory: str) -> str:
    inside = path[len(directory) :] if f"{path}/".startswith(f"{directory}/") else path
    return inside.removeprefix("./").strip("/") or "."
