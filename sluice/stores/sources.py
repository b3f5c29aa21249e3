"""The URIs of a job, and the job with what they name on this machine."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

from sluice.api import KIND, RLEnginePool, RLJob, manifest
from sluice.api.schema.paths import MarkedPath, marked, rewritten, split_slice, uri_of
from sluice.stores.cache import Fetched, fetch
from sluice.stores.errors import StoreError
from sluice.stores.objects import Progress
from sluice.uri import Uri

J = TypeVar("J", RLJob, RLEnginePool)


@dataclass(frozen=True, slots=True)
class Source:
    """A URI of a job, and the first field that names it, such as `spec.model.path`."""

    field: str
    uri: Uri


def sources_of(job: RLJob | RLEnginePool) -> list[Source]:
    """Return the URIs of a job or a pool.

    `sluice_client.resolve` has made URIs of bare names of the hub.
    """
    found: dict[str, Source] = {}
    for path in marked(type(job.spec), manifest(job)["spec"]):
        if uri := uri_of(path):
            found.setdefault(str(uri), Source(path.field, uri))
    return list(found.values())


def fetch_sources(
    sources: list[Source],
    versions: Mapping[str, str],
    progress: Callable[[Source], Progress],
) -> dict[str, Fetched]:
    """Fetch the URIs of a job, and return what they name, by URI.

    Parameters
    ----------
    sources
        Of the job.
    versions
        The versions of an earlier start of the run, by URI. They are used again.
    progress
        Makes the display of a source.

    Raises
    ------
    StoreError
        With the field of the URI.

    """
    fetched: dict[str, Fetched] = {}
    for source in sources:
        version = versions.get(str(source.uri))
        try:
            fetched[str(source.uri)] = fetch(source.uri, version=version, progress=progress(source))
        except StoreError as error:
            raise StoreError(f"{source.field}: {error}", error.kind) from error
    return fetched


def on_this_machine(job: J, fetched: Mapping[str, Fetched]) -> J:
    """Return a job or a pool with the path of what was fetched in place of each URI."""

    def local(path: MarkedPath) -> str:
        uri = uri_of(path)
        if uri is None or str(uri) not in fetched:
            return path.value
        return f"{fetched[str(uri)].path}{split_slice(path.value)[1]}"

    document = manifest(job)
    document["spec"] = rewritten(type(job.spec), document["spec"], local)
    if isinstance(job, RLJob):
        document["kind"] = KIND
    return type(job).model_validate(document)
