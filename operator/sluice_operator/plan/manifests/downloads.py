"""Files that URIs of a spec name, fetched by an init container of each pod that reads them.

They are in the cache of a volume, spec.downloads.volume, that jobs may share. Each job has links
there, which name the version that it uses. Containers get the link's path in place of the URI, and
none of them but the init container has credentials or asks a store.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from sluice.api import RLEnginePool, RLEnginePoolSpec, RLJob, RLJobSpec, manifest
from sluice.api.schema.paths import (
    REMOTE,
    MarkedPath,
    PathKind,
    marked,
    rewritten,
    split_slice,
    uri_of,
    volume_of,
)
from sluice.stores.sources import Source
from sluice.uri import Uri, hub_id, link_of, local_path
from sluice_operator.plan.facts import names
from sluice_operator.plan.manifests.containers import (
    Env,
    bare_container,
    has_root,
    hub_token,
    security_beside_engine,
    variables,
)
from sluice_operator.plan.manifests.resources import Container

VOLUME = "downloads"
# Variables of the pod that its log carries.
_LOGGED = ("SLUICE_ROLE", "SLUICE_NAME", "SLUICE_ATTEMPT")
_MODEL = "spec.model.path"
# Kinds of paths that each role reads.
_READ: Mapping[str, tuple[PathKind, ...]] = {
    "trainer": ("model", "draft", "adapter"),
    "rollout": ("draft", "tokenizer"),
    "buffer": ("data",),
}


def uri_in_pod(path: MarkedPath, spec: Mapping[str, Any]) -> Uri | None:
    """Return what a path of a spec names outside of pods and volumes, or None.

    `org/name` is a repository of the hub: without a volume a pod has no relative paths.
    """
    if uri := uri_of(path):
        return uri
    is_name = path.kind in REMOTE and path.kind != "data" and volume_of(path, spec) is None
    return hub_id(path.value) if is_name else None


def path_in_pod(path: MarkedPath, spec: Mapping[str, Any], owner: names.Owner) -> str:
    """Return the path at which pods read what was fetched; other paths as they are."""
    text, part = split_slice(path.value)
    if uri := uri_in_pod(path, spec):
        return f"{link_of(uri, links(owner))}{part}"
    return f"{local_path(text)}{part}" if path.kind in REMOTE else path.value


def canonical(path: MarkedPath, spec: Mapping[str, Any]) -> str:
    """Return a path that is in no volume in its one spelling, for comparisons."""
    text, part = split_slice(path.value)
    if path.kind not in REMOTE:
        return path.value
    return f"{uri_in_pod(path, spec) or local_path(text)}{part}"


def uris(job: RLJob) -> dict[str, str]:
    """Return the URI of each link in the manifest of the job's pods."""
    found = _distinct(_named_by(job))
    return {link_of(source.uri, links(job)): str(source.uri) for source in found}


def with_uris(spec: Mapping[str, Any], uris: Mapping[str, str]) -> dict[str, Any]:
    """Return the spec of a manifest of pods with URIs in place of links."""

    def as_written(path: MarkedPath) -> str:
        text, part = split_slice(path.value)
        return f"{uris[text]}{part}" if text in uris else path.value

    return rewritten(RLJobSpec, spec, as_written)


def links(owner: names.Owner) -> str:
    """Return the directory of an object's links in its pods."""
    metadata = owner.metadata
    own = "-".join(filter(None, (metadata.namespace, metadata.name, metadata.uid[:8])))
    return f"{names.DOWNLOADS_DIR}/{owner.kind.lower()}s/{own}"


def sources(job: RLJob, role: str) -> list[Source]:
    """Return the URIs that a role reads, each once."""
    return _distinct(named for named in _named_by(job) if _reads(job, role, named[0]))


def pool_sources(pool: RLEnginePool) -> list[Source]:
    """Return the URIs that the engines of a pool read, each once."""
    spec = manifest(pool)["spec"]
    return _distinct(_uris(marked(RLEnginePoolSpec, spec), spec))


def volume(owner: RLJob | RLEnginePool) -> dict[str, Any]:
    """Return the source of the volume."""
    settings = owner.spec.downloads
    return (settings.volume if settings else None) or {"emptyDir": {}}


def fetch_container(job: RLJob, role: str, image: str, common: Env, holder: str) -> Container:
    """Return the init container of a role's pod.

    Parameters
    ----------
    job, role
        The pod's job and role.
    image
        Image with sluice's code.
    common
        Variables of all containers of the pod.
    holder
        Name of the pod's volume.

    """
    env = [variable for variable in common if variable["name"] in _LOGGED]
    return _container(
        job, sources(job, role), image, env + hub_token(job), holder, root=has_root(job, role)
    )


def pool_fetch_container(pool: RLEnginePool, image: str, holder: str) -> Container:
    """Return the init container of a pool's engines."""
    root = pool.spec.gpus_per_replica > 0
    return _container(pool, pool_sources(pool), image, [], holder, root=root)


def _container(
    owner: RLJob | RLEnginePool,
    fetched: list[Source],
    image: str,
    env: Env,
    holder: str,
    *,
    root: bool,
) -> Container:
    # A dollar sign is doubled, because Kubernetes replaces $(NAME).
    words = [f"{source.field}={source.uri}".replace("$", "$$") for source in fetched]
    command = ["python", "-m", "sluice.stores.fetch", *words]
    places = {
        "SLUICE_LINKS": links(owner),
        "SLUICE_CACHE": f"{names.DOWNLOADS_DIR}/cache",
        "HF_HOME": f"{names.DOWNLOADS_DIR}/hub",
    }
    mounts = [{"name": holder, "mountPath": names.DOWNLOADS_DIR}]
    fetch = bare_container(names.FETCH, image, command, env + variables(places), {}, mounts)
    settings = owner.spec.downloads
    if settings is not None and settings.secret_ref is not None:
        fetch["envFrom"] = [{"secretRef": {"name": settings.secret_ref.name}}]
    return fetch | {"securityContext": security_beside_engine(names.FETCH, root=root)}


def _reads(job: RLJob, role: str, path: MarkedPath) -> bool:
    if path.field == _MODEL:
        # The buffer encodes given answers with the model's tokenizer.
        return role in ("trainer", "rollout") or (role == "buffer" and job.spec.algorithm.offline)
    return path.kind in _READ.get(role, ())


def _named_by(job: RLJob) -> list[tuple[MarkedPath, Uri]]:
    """Return the paths of a job that are URIs.

    Each of its pods asks several times, so those of the spec that was planned last are kept.
    """
    global _last
    last_spec, named = _last
    if last_spec is not job.spec:
        spec = manifest(job)["spec"]
        named = list(_uris(marked(RLJobSpec, spec), spec))
        _last = job.spec, named
    return named


_last: tuple[RLJobSpec | None, list[tuple[MarkedPath, Uri]]] = (None, [])


def _uris(paths: Iterable[MarkedPath], spec: Mapping[str, Any]) -> Iterator[tuple[MarkedPath, Uri]]:
    return ((path, uri) for path in paths if (uri := uri_in_pod(path, spec)))


def _distinct(named: Iterable[tuple[MarkedPath, Uri]]) -> list[Source]:
    """Return each URI once, with the first field that names it."""
    found: dict[Uri, Source] = {}
    for path, uri in named:
        found.setdefault(uri, Source(path.field, uri))
    return list(found.values())
