"""Objects of a job besides its pods: manifest, token, certificates,
the rendezvous' address, storage.
"""

from __future__ import annotations

import json
from typing import Any

from sluice.api import RLJob, manifest
from sluice.api.groups.storage import BufferStorage, CheckpointStorage
from sluice_operator.plan.facts import names
from sluice_operator.plan.facts.job_defaults import NO_DEFAULTS, JobDefaults, with_job_defaults
from sluice_operator.plan.facts.model import KubeObject, Observed
from sluice_operator.plan.manifests import resource_claims
from sluice_operator.plan.manifests.volume_paths import mounted


def supporting_objects(job: RLJob, defaults: JobDefaults = NO_DEFAULTS) -> tuple[KubeObject, ...]:
    """Everything but the pods, in the order of creation."""
    full = with_job_defaults(job, defaults)
    objects = [
        config_map(job, defaults),
        token_secret(job),
        rendezvous_service(job),
        storage_claim(full),
    ]
    if (storage := full.spec.checkpoint.claim) is not None:
        objects.append(checkpoint_claim(job, storage))
    if job.spec.tls.enabled:
        objects.append(tls_secret(job))
    if job.spec.rollout.has_episode_pods:
        objects.append(_generated(job, names.episode_token_name(job), names.GENERATE_EPISODE_TOKEN))
    if job.spec.rollout.nodes_per_replica > 1:
        objects.append(engines_service(job))
    return (*objects, *resource_claims.resource_claims(job))


def missing_objects(job: RLJob, observed: Observed) -> tuple[KubeObject, ...]:
    """The objects that do not exist yet; and the config map where the spec has changed, so that
    later attempts see the change.
    """
    return tuple(
        wanted
        for wanted in supporting_objects(job, observed.defaults)
        if _is_missing(wanted, observed)
    )


def _is_missing(wanted: KubeObject, observed: Observed) -> bool:
    stored = observed.objects.get((wanted["kind"], wanted["metadata"]["name"]))
    return stored is None or (
        wanted["kind"] == "ConfigMap" and stored.get("data") != wanted["data"]
    )


def rendezvous_address(job: RLJob, observed: Observed) -> str | None:
    """host:port by the Service's own address, so that no DNS is needed; None: it has none yet."""
    service = observed.objects.get(("Service", names.rendezvous_name(job)))
    address = (service or {}).get("spec", {}).get("clusterIP")
    if service is None or not address:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{service['spec']['ports'][0]['port']}"


def config_map(job: RLJob, defaults: JobDefaults = NO_DEFAULTS) -> KubeObject:
    """The manifest, for the job's pods; and the cluster's defaults beside it, for its user."""
    data = {names.JOB_FILE: json.dumps(resolved_manifest(job), indent=2, sort_keys=True) + "\n"}
    if defaults != NO_DEFAULTS:
        data[names.DEFAULTS_FILE] = json.dumps(manifest(defaults), indent=2, sort_keys=True) + "\n"
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(job, names.config_name(job)),
        "data": data,
    }


def token_secret(job: RLJob) -> KubeObject:
    """The job's token, which whoever creates it fills in (names.GENERATE)."""
    return _generated(job, names.token_name(job), names.GENERATE_TOKEN)


def tls_secret(job: RLJob) -> KubeObject:
    """The job's certificate authority, and the certificate of its servers."""
    return _generated(job, names.tls_name(job), names.GENERATE_TLS)


def _generated(job: RLJob, name: str, what: str) -> KubeObject:
    """Immutable: pods that were started with different contents could not talk to each other."""
    metadata = names.metadata(job, name) | {"annotations": {names.GENERATE: what}}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata,
        "type": "Opaque",
        "immutable": True,
    }


def rendezvous_service(job: RLJob) -> KubeObject:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(job, names.rendezvous_name(job)),
        "spec": {
            "selector": names.selector(job, "rendezvous"),
            "ports": [{"name": "grpc", "port": names.PORTS["rendezvous"], "targetPort": "grpc"}],
        },
    }


def engines_service(job: RLJob) -> KubeObject:
    """Names in DNS for the pods of an engine that spans several: SGLang wants to be told where its
    first one is.
    """
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(job, names.engines_name(job)),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": names.selector(job, "rollout"),
        },
    }


def storage_claim(job: RLJob) -> KubeObject:
    """The buffer's. It goes with the job, whose prompts and samples mean nothing to another."""
    return _claim(
        names.metadata(job, names.storage_name(job)), job.spec.buffer.storage, ["ReadWriteOnce"]
    )


def checkpoint_claim(job: RLJob, storage: CheckpointStorage) -> KubeObject:
    """Checkpoints, final model, metrics and samples. Kept when the job is deleted, unless the spec
    wants otherwise.
    """
    name = names.checkpoint_name(job)
    retained = storage.when_deleted == "Retain"
    metadata = names.retained_metadata(job, name) if retained else names.metadata(job, name)
    return _claim(metadata, storage, list(storage.access_modes or _access_modes(job)))


def _access_modes(job: RLJob) -> list[str]:
    """ReadWriteMany where pods that no rule puts on one node use the claim."""
    apart = job.spec.transport(one_machine=False) == "disk" and not resource_claims.shared(job)
    return ["ReadWriteMany" if job.spec.trainer.nodes > 1 or apart else "ReadWriteOnce"]


def _claim(
    metadata: dict[str, Any], storage: BufferStorage | CheckpointStorage, access_modes: list[str]
) -> KubeObject:
    spec: dict[str, Any] = {
        "accessModes": access_modes,
        "resources": {"requests": {"storage": str(storage.size)}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    return {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": metadata, "spec": spec}


def resolved_manifest(job: RLJob) -> dict[str, Any]:
    """The manifest as pods see it: paths are those inside the pod;
    nothing that changes without the spec.
    """
    document = manifest(job)
    document.pop("status", None)
    document["apiVersion"], document["kind"] = job.api_version, job.kind
    document["metadata"] = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    document["spec"] = mounted(document["spec"])
    return document
