"""What a job owns besides pods: manifest, token, certificates, the rendezvous' address, the buffer's storage."""

from __future__ import annotations

import json
from typing import Any

from sluice.api import RLJob, manifest
from sluice_operator.plan import claims, names
from sluice_operator.plan.model import KubeObject, Observed


def supporting_objects(job: RLJob) -> tuple[KubeObject, ...]:
    """Everything but the pods, in the order of creation."""
    found = [config_map(job), token_secret(job), rendezvous_service(job), storage_claim(job)]
    if job.spec.tls.enabled:
        found.append(tls_secret(job))
    if job.spec.rollout.nodes_per_replica > 1:
        found.append(engines_service(job))
    return (*found, *claims.resource_claims(job))


def missing_objects(job: RLJob, observed: Observed) -> tuple[KubeObject, ...]:
    """What does not exist yet; and the config map where the spec has changed, so that later attempts see the change."""
    return tuple(wanted for wanted in supporting_objects(job) if _is_missing(wanted, observed))


def _is_missing(wanted: KubeObject, observed: Observed) -> bool:
    found = observed.objects.get((wanted["kind"], wanted["metadata"]["name"]))
    return found is None or (wanted["kind"] == "ConfigMap" and found.get("data") != wanted["data"])


def rendezvous_address(job: RLJob, observed: Observed) -> str | None:
    """host:port by the Service's own address, so that no DNS is needed; None: it has none yet."""
    service = observed.objects.get(("Service", names.rendezvous_name(job)))
    address = (service or {}).get("spec", {}).get("clusterIP")
    if service is None or not address:
        return None
    host = f"[{address}]" if ":" in address else address
    return f"{host}:{service['spec']['ports'][0]['port']}"


def config_map(job: RLJob) -> KubeObject:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": names.metadata(job, names.config_name(job)),
        "data": {names.JOB_FILE: json.dumps(resolved_manifest(job), indent=2, sort_keys=True) + "\n"},
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
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": "Opaque", "immutable": True}


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
    """Names in DNS for the pods of an engine that spans several: SGLang wants to be told where its first one is."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": names.metadata(job, names.engines_name(job)),
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": names.selector(job, "rollout")},
    }


def storage_claim(job: RLJob) -> KubeObject:
    storage = job.spec.buffer.storage
    spec: dict[str, Any] = {
        "accessModes": ["ReadWriteOnce"],
        "resources": {"requests": {"storage": str(storage.size)}},
    }
    if storage.storage_class_name is not None:
        spec["storageClassName"] = storage.storage_class_name
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": names.metadata(job, names.storage_name(job)),
        "spec": spec,
    }


def model_path(job: RLJob, path: str | None = None) -> str:
    """Where a pod finds the model (or `path`, another directory of the same volume)."""
    return _mounted(path or job.spec.model.path, names.MODEL_DIR, job.spec.model.volume)


def resolved_manifest(job: RLJob) -> dict[str, Any]:
    """The manifest as pods see it: paths are those inside the pod; nothing that changes without the spec."""
    document = manifest(job)
    spec = document["spec"]
    document.pop("status", None)
    document["apiVersion"], document["kind"] = job.api_version, job.kind
    document["metadata"] = {"name": job.metadata.name, "namespace": job.metadata.namespace}
    spec["model"]["path"] = model_path(job)
    if job.spec.model.reference_path is not None:
        spec["model"]["referencePath"] = model_path(job, job.spec.model.reference_path)
    if job.spec.algorithm.critic and job.spec.algorithm.critic.model_path is not None:
        spec["algorithm"]["critic"]["modelPath"] = model_path(job, job.spec.algorithm.critic.model_path)
    if job.spec.algorithm.distillation and job.spec.algorithm.distillation.teacher.path is not None:
        teacher = spec["algorithm"]["distillation"]["teacher"]
        teacher["path"] = model_path(job, job.spec.algorithm.distillation.teacher.path)
    if job.spec.debug.replay is not None:
        spec["debug"]["replay"] = _mounted(job.spec.debug.replay, names.DATA_DIR, job.spec.data.volume)
    for source in [*spec["data"]["prompts"], *spec.get("evaluation", {}).get("datasets", [])]:
        if "path" in source:
            source["path"] = _mounted(source["path"], names.DATA_DIR, job.spec.data.volume)
    return document


def _mounted(path: str, directory: str, volume: object) -> str:
    """A path relative to a volume's root, as a path in the pod; without a volume it is one already."""
    if volume is None:
        return path
    relative = path.removeprefix("./").strip("/")
    return f"{directory}/{relative}" if relative and relative != "." else directory
