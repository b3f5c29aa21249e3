"""Jobs of a cluster's namespace.

The user needs the rights of the role sluice-editor, and to submit functions or rows also the right
to create ConfigMaps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sluice.api import manifest
from sluice.api.job import KIND
from sluice.telemetry import run_directory
from sluice_client.errors import ClientError
from sluice_client.job_list import JobSummary, cluster_job
from sluice_client.pool_list import PoolSummary, cluster_pool
from sluice_client.submission import REWARD_FILE, Submission
from sluice_operator.cluster import errors
from sluice_operator.cluster.kube.api import Api
from sluice_operator.cluster.kube.paths import collection, path
from sluice_operator.cluster.kube.reader import KubeReader, current_namespace

# Directory of a submission's files in the pods.
CODE_DIR = "/sluice/code"
# Largest size of a ConfigMap in bytes, a limit of Kubernetes.
MAX_FILE_BYTES = 1 << 20
# Roles that read functions and prompts, and their containers.
_READERS = {"rollout": "worker", "buffer": "buffer"}
_STEP = re.compile(r"step (\d+)/\d+")


class ClusterJobs:
    """A namespace of a cluster. The client's event loop owns the connection."""

    shares_files = False

    def __init__(self, api: Api, namespace: str) -> None:
        self._api, self._namespace = api, namespace
        self.no_pool = f"namespace {namespace} has none; look with: kubectl get rlenginepools -A"

    @classmethod
    async def connect(cls, namespace: str | None) -> ClusterJobs:
        """Connect to the API server. Raises ConfigurationError if none is configured."""
        return cls(await Api.connect(), namespace or current_namespace())

    async def close(self) -> None:
        await self._api.__aexit__()

    async def submit(self, submission: Submission) -> str:
        """Create the job, and a ConfigMap of its files that is deleted with the job.

        If the ConfigMap cannot be created, the job is deleted: its pods would wait for the files.
        """
        name = submission.job.metadata.name
        if not submission.files:
            await self._create("RLJob", submission.document())
            return name
        if submission.job.spec.data.volume is not None and REWARD_FILE in submission.files:
            raise ClientError(
                "spec.data.volume: a job with a data volume takes its functions from there: put "
                "the reward's file into it, and give its path in the volume"
            )
        size = sum(len(text.encode()) for text in submission.files.values())
        if size > MAX_FILE_BYTES:
            raise ClientError(
                f"functions and prompts have {size} bytes, and a ConfigMap holds {MAX_FILE_BYTES}: "
                "put the prompts into a volume (spec.data.volume) or behind a source"
            )
        # The ConfigMap names the job as its owner, so the job must exist first.
        document = manifest(submission.placed(CODE_DIR))
        document["spec"].setdefault("podTemplateOverrides", []).extend(_mounts(name))
        owner = await self._create("RLJob", document)
        try:
            await self._create("ConfigMap", _config_map(owner, submission.files))
        except ClientError as error:
            try:
                await self.delete(name)
            except ClientError as second:
                raise ClientError(f"{error}; and the job could not be deleted: {second}") from error
            raise
        return name

    def reader(self, name: str) -> KubeReader:
        return KubeReader(self._api, name, self._namespace)

    async def list_jobs(self) -> list[JobSummary]:
        reader = KubeReader(self._api, "", self._namespace)
        return [cluster_job(document) for document in await reader.jobs(everywhere=False)]

    async def list_pools(self) -> list[PoolSummary]:
        reader = KubeReader(self._api, "", self._namespace)
        return [cluster_pool(document) for document in await reader.pools()]

    async def suspend(self, name: str, suspend: bool) -> None:
        await self._merge(name, {"spec": {"suspend": suspend}})

    async def scale(self, name: str, replicas: int) -> None:
        await self._merge(name, {"spec": {"rollout": {"replicas": replicas}}})

    async def delete(self, name: str) -> None:
        with _client_errors(f"delete {name}"):
            await self._api.delete(path("RLJob", self._namespace, name), {})

    async def records(self, name: str, file: str) -> list[dict[str, Any]]:
        """Read the steps from the trainer's log: the files are in the job's volume claim."""
        if file != run_directory.METRICS:
            raise ClientError(await self._location_of(name, file))
        # A restarted trainer repeats some steps; the later record replaces the earlier one.
        reader, steps = self.reader(name), dict[int, dict[str, Any]]()
        streams, _ = await reader.streams()
        for stream in streams:
            if stream.role == "trainer" and stream.index == 0 and not stream.silent:
                async for _, line in reader.lines(stream, follow=False, tail=None):
                    if record := step_of(line):
                        steps[record["step"]] = record
        return [steps[step] for step in sorted(steps)]

    async def newest(self, name: str, pattern: str) -> str | None:
        raise ClientError(await self._location_of(name, pattern))

    async def _location_of(self, name: str, file: str) -> str:
        job = (await self.reader(name).snapshot()).job
        claim = (job.get("status") or {}).get("checkpointClaim") or "the job's checkpoint volume"
        return (
            f"{file} of a job in a cluster is in the run directory on {claim}: mount the claim, "
            "or copy the file from the trainer's pod with kubectl cp"
        )

    async def _create(self, kind: str, document: dict[str, Any]) -> dict[str, Any]:
        with _client_errors(f"create {kind} {document['metadata']['name']}"):
            return await self._api.create(collection(kind, self._namespace), document)

    async def _merge(self, name: str, patch: dict[str, Any]) -> None:
        with _client_errors(f"change {name}"):
            await self._api.merge(path("RLJob", self._namespace, name), patch)


def step_of(line: str) -> dict[str, Any] | None:
    """Parse a line of a trainer's log, as pods write it; None if it reports no step."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    match = _STEP.fullmatch(str(entry.get("event"))) if isinstance(entry, dict) else None
    if match is None:
        return None
    # The trainer logs figures as text, with a fixed number of digits.
    numbers = {key: _number(value) for key, value in entry.items()}
    return {"step": int(match[1])} | {k: v for k, v in numbers.items() if v is not None}


def _number(value: Any) -> float | None:
    try:
        return float(value) if isinstance(value, str) else None
    except ValueError:
        return None


def _mounts(job: str) -> list[dict[str, Any]]:
    """Make the pod templates that mount the ConfigMap at the paths which the job names."""
    mount = {"name": "code", "mountPath": CODE_DIR, "readOnly": True}
    return [
        {
            "roles": [role],
            "template": {
                "spec": {
                    "containers": [{"name": container, "volumeMounts": [mount]}],
                    "volumes": [{"name": "code", "configMap": {"name": f"{job}-code"}}],
                }
            },
        }
        for role, container in _READERS.items()
    ]


def _config_map(owner: dict[str, Any], files: dict[str, str]) -> dict[str, Any]:
    metadata = owner["metadata"]
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": KIND,
        "name": metadata["name"],
        "uid": metadata["uid"],
    }
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"{metadata['name']}-code", "ownerReferences": [reference]},
        "data": files,
    }


@contextmanager
def _client_errors(action: str) -> Iterator[None]:
    """Raise ClientError for an error of the API server."""
    try:
        yield
    except errors.ApiError as error:
        raise ClientError(f"cannot {action}: {error}") from error
