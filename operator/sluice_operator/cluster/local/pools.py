"""Pools of engines that run on this machine.

`sluice pool up` writes a file for the pool that it runs, and removes it when it ends. The file
holds the key with which the engines know the jobs of this user, so only its owner may read it. A
host that was killed leaves its file; the lock of the pool's directory tells whether the pool still
runs.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sluice.api import RLJob, manifest
from sluice.api.pool import RLEnginePool, RLEnginePoolSpec
from sluice_operator.cluster.local import run_state
from sluice_operator.cluster.local.pod import now_text
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.model import KubeObject, PoolFacts
from sluice_operator.plan.report.pool_fit import misfit

_SUFFIX = ".json"


@dataclass(frozen=True, slots=True)
class RunningPool:
    """A pool that runs on this machine."""

    name: str
    spec: RLEnginePoolSpec
    key: str  # signs the credentials of jobs, in hexadecimal digits
    addresses: tuple[str, ...]  # host:port of engine i
    pid: int  # process of `sluice pool up`

    @property
    def urls(self) -> list[str]:
        return [f"http://{address}" for address in self.addresses]

    @property
    def logs(self) -> Path:
        return directory(self.name) / "logs"


def root() -> Path:
    """Return the directory of all pools of this user."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state") / "sluice" / "pools"


def directory(name: str) -> Path:
    """Return the directory of a pool, with its logs and its lock."""
    return root() / name


def write(pool: RLEnginePool, key: str, addresses: tuple[str, ...]) -> None:
    """Announce a pool whose engines this process runs. Paths of its model are absolute."""
    record = {
        "model": pool.spec.model.path,
        "key": key,
        "maxRank": pool.spec.max_rank,
        "addresses": addresses,
        "pid": os.getpid(),
        "spec": manifest(pool)["spec"],
    }
    path = _file(pool.metadata.name)
    temporary = path.with_suffix(".tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(record, file)
    temporary.rename(path)


def remove(name: str) -> None:
    _file(name).unlink(missing_ok=True)


def is_running(name: str) -> bool:
    """Return True while a process runs the pool, also while it ends."""
    return run_state.is_locked(directory(name))


def read(name: str) -> RunningPool | None:
    """Return a pool; None if none of this name runs."""
    try:
        record: dict[str, Any] = json.loads(_file(name).read_text())
    except FileNotFoundError:
        return None
    if not is_running(name):
        return None
    return RunningPool(
        name,
        RLEnginePoolSpec.model_validate(record["spec"]),
        record["key"],
        tuple(record["addresses"]),
        record["pid"],
    )


def key(job: RLJob) -> str:
    """Return the key of the pool that a job uses; empty if it uses none, or if none runs."""
    pool = read(job.spec.rollout.pool) if job.spec.rollout.pool else None
    return pool.key if pool else ""


def is_credential(stored: KubeObject) -> bool:
    """Return True for the Secret with a job's credential.

    It is made anew with each start of a run, because the pool may have got another key.
    """
    annotations = stored["metadata"].get("annotations") or {}
    return bool(annotations.get(names.GENERATE) == names.GENERATE_POOL_CREDENTIAL)


def as_created_now(job: RLJob) -> RLJob:
    """Return the job for whose credential engines refuse processes that an earlier run has left."""
    created = {"creation_timestamp": now_text()}
    return job.model_copy(update={"metadata": job.metadata.model_copy(update=created)})


def running() -> list[RunningPool]:
    """Return all pools that run, by name."""
    found = sorted(path.stem for path in root().glob(f"*{_SUFFIX}"))
    return [pool for name in found if (pool := read(name)) is not None]


def facts(job: RLJob) -> PoolFacts | None:
    """Return the pool that a job names, and whether it can use it; None if it names none.

    Paths of the job are absolute.
    """
    name = job.spec.rollout.pool
    if name is None:
        return None
    pool = read(name)
    if pool is None:
        return PoolFacts(name, problem=absent(name))
    if problem := misfit(job, pool.spec):
        return PoolFacts(name, problem=problem)
    return PoolFacts(name, len(pool.addresses), pool.addresses)


def absent(name: str) -> str:
    """Return what to do if no pool of this name runs."""
    return (
        f"rollout.pool: no pool {name} runs on this machine: start it with `sluice pool up` and "
        "its manifest, or name one of `sluice pool list`"
    )


@contextlib.contextmanager
def membership(job: RLJob) -> Iterator[None]:
    """Hold the job's name in its pool while it runs; no-op for a job without a pool.

    Engines know a job by its name, so a run of another job of this name would take its adapters.

    Raises
    ------
    RunDirectoryError
        Another run holds the name.

    """
    name = job.spec.rollout.pool
    if name is None:
        yield
        return
    holders = directory(name) / "jobs"
    holders.mkdir(parents=True, exist_ok=True)
    path = holders / f"{job.metadata.namespace}.{job.metadata.name}.lock"
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise run_state.RunDirectoryError(
                f"another run of the job {job.key} uses the pool {name}: stop it, or change "
                "metadata.name of this one"
            ) from None
        yield


def _file(name: str) -> Path:
    return root() / f"{name}{_SUFFIX}"
