"""`sluice run --containers`: programs that have an image run in it on this machine, too."""

from __future__ import annotations

import re
import shutil
import subprocess

from sluice.api import ManifestError, RLJob

_INFO_SECONDS = 60.0
_ROOTLESS = re.compile(r"^ +rootless$", re.MULTILINE)
"""Among the security options of `docker info`. Podman's says `rootless: true`."""


def variables(engine: str | None) -> dict[str, str]:
    """Variables of the run's processes: rollout workers read them."""
    return {"SLUICE_CONTAINERS": engine} if engine else {}


def check(job: RLJob, engine: str | None) -> None:
    """Raise ManifestError where this machine has not the container engine that is asked for, or the
    job nothing to run in it; or has an image that only a cluster runs. Asks the container engine.
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
    if reason := _trouble(engine):
        raise ManifestError(f"--containers {engine}: {reason}")


def _trouble(engine: str) -> str:
    """Why this machine's container engine cannot run episodes; empty: it can."""
    try:
        asked = subprocess.run(
            [engine, "info"], text=True, capture_output=True, timeout=_INFO_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"`{engine} info` does not answer within {_INFO_SECONDS:g} s"
    if asked.returncode:
        return f"`{engine} info` failed: {_reason(asked.stdout, asked.stderr)}"
    return unfit(asked.stdout)


def _reason(out: str, errors: str) -> str:
    """The line that says it. Older dockers have that among their output."""
    said = [line for line in out.splitlines() if line.startswith("ERROR: ")] or errors.splitlines()
    return said[-1].removeprefix("ERROR: ") if said else "it says nothing"


def unfit(info: str) -> str:
    """Why an engine with this `info` cannot run episodes; empty: it can."""
    if _ROOTLESS.search(info):
        return (
            "it runs rootless, and its containers would not reach the model at this machine's "
            "loopback; take podman, which may be rootless, or a docker whose daemon runs as root"
        )
    return ""


def words(job: RLJob, engine: str | None) -> list[str]:
    """Words about an image that this run does without."""
    environment = job.spec.rollout.environment
    if engine or environment is None or environment.image is None:
        return []
    return [
        "rollout.environment.image: episodes are processes of this machine; with --containers "
        "podman, or docker, they run in the image"
    ]
