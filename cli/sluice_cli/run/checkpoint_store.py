"""Check the object store of `checkpoint.to` before anything is started."""

from __future__ import annotations

from sluice.api import ManifestError, RLJob
from sluice.stores import StoreError, UriError, filesystem, parse_uri, store_errors


def check_store(job: RLJob) -> None:
    """Raise ManifestError if this machine cannot list the prefix of `checkpoint.to`."""
    to = job.spec.checkpoint.to
    try:
        uri = parse_uri(to) if to else None
        if uri is None:
            return
        fs = filesystem(uri)
        with store_errors(uri):
            fs.ls(uri.path)
    except UriError as error:
        raise ManifestError(f"spec.checkpoint.to: {error}") from error
    except StoreError as error:
        if error.kind != "missing":  # the trainer writes the first object
            raise ManifestError(f"spec.checkpoint.to: {error}") from error
