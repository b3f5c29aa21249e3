"""`sluice run --containers`: programs that have an image run in it on this machine, too."""

from __future__ import annotations

import shutil

from sluice.api import ManifestError, RLJob


def variables(engine: str | None) -> dict[str, str]:
    """Variables of the run's processes: rollout workers read them."""
    return {"SLUICE_CONTAINERS": engine} if engine else {}


def check(job: RLJob, engine: str | None) -> None:
    """Raise ManifestError where this machine has not the container engine that is asked for, or the
    job nothing to run in it; or has an image that only a cluster runs.
    """
    environment = job.spec.rollout.environment
    if environment and environment.openenv and environment.openenv.image:
        raise ManifestError(
            "spec.rollout.environment.openenv.image: an image of OpenEnv is for a cluster; here "
            "start its server, and name that: --set rollout.environment.openenv.image=null "
            f"--set rollout.environment.openenv.url=http://127.0.0.1:{environment.openenv.port}"
        )
    if engine is None:
        return
    if environment is None or environment.image is None:
        raise ManifestError(
            "--containers is for programs that have an image: spec.rollout.environment.image is "
            "not set"
        )
    if shutil.which(engine) is None:
        raise ManifestError(f"--containers {engine}: there is no program {engine!r} on the PATH")


def words(job: RLJob, engine: str | None) -> list[str]:
    """Words about an image that this run does without."""
    environment = job.spec.rollout.environment
    if engine or environment is None or environment.image is None:
        return []
    return [
        "rollout.environment.image: episodes are processes of this machine; with --containers "
        "podman, or docker, they run in the image"
    ]
