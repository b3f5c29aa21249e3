"""`sluice run --containers`: run programs that have an image in containers on this machine."""

from __future__ import annotations

import re
import shutil
import subprocess

from sluice.api import ManifestError, RLJob

_INFO_SECONDS = 60.0
# Security option in `docker info`. Podman, which may be rootless, writes `rootless: true`.
_ROOTLESS = re.compile(r"^ +rootless$", re.MULTILINE)


def variables(engine: str | None) -> dict[str, str]:
    """Return environment variables for the run's processes; rollout workers read them."""
    return {"SLUICE_CONTAINERS": engine} if engine else {}


def check(job: RLJob, engine: str | None) -> None:
    """Check that this machine can run the job's images.

    Raises ManifestError if the container engine is missing or not fit, if the job has no image to
    run in it, or if the job has an image that only a cluster can run.
    """
    environment = job.spec.rollout.environment
    if environment and environment.openenv and environment.openenv.image:
        raise ManifestError(
            "spec.rollout.environment.openenv.image: only a cluster can run an OpenEnv image; on "
            "this machine start its server and use --set rollout.environment.openenv.image=null "
            f"--set rollout.environment.openenv.url=http://127.0.0.1:{environment.openenv.port}"
        )
    if engine is None:
        return
    if environment is None or environment.image is None:
        raise ManifestError(
            "--containers needs a program with an image: spec.rollout.environment.image is not set"
        )
    if shutil.which(engine) is None:
        raise ManifestError(f"--containers {engine}: there is no program {engine!r} on the PATH")
    if problem := _problem(engine):
        raise ManifestError(f"--containers {engine}: {problem}")


def _problem(engine: str) -> str:
    """Say why this machine's container engine cannot run episodes; empty if it can."""
    try:
        result = subprocess.run(
            [engine, "info"], text=True, capture_output=True, timeout=_INFO_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"`{engine} info` does not answer within {_INFO_SECONDS:g} s"
    if result.returncode:
        return f"`{engine} info` failed: {_error_line(result.stdout, result.stderr)}"
    return problem_with(result.stdout)


def _error_line(out: str, errors: str) -> str:
    # Older versions of Docker print the error to standard output.
    lines = [line for line in out.splitlines() if line.startswith("ERROR: ")] or errors.splitlines()
    return lines[-1].removeprefix("ERROR: ") if lines else "it printed no reason"


def problem_with(info: str) -> str:
    """Say why an engine with this `info` output cannot run episodes; empty if it can."""
    if _ROOTLESS.search(info):
        return (
            "rootless docker is not supported: its containers cannot reach the model at this "
            "machine's loopback address; use podman, which may be rootless, or run docker's daemon "
            "as root"
        )
    return ""


def notes(job: RLJob, engine: str | None) -> list[str]:
    """Return a note if the job has an image that this run does not use."""
    environment = job.spec.rollout.environment
    if engine or environment is None or environment.image is None:
        return []
    return [
        "rollout.environment.image is not used: episodes run as processes of this machine; "
        "--containers podman or docker runs them in the image"
    ]
