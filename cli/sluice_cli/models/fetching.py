"""Fetch the files that the URIs of a job name, and show how far it is."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from rich.console import Console

from sluice.api import ManifestError, RLEnginePool, RLJob
from sluice.stores import StoreError
from sluice.stores.amounts import progress_text
from sluice.stores.cache import Fetched, newest
from sluice.stores.objects import Progress
from sluice.stores.sources import Source, fetch_sources, on_this_machine, sources_of
from sluice.telemetry import run_directory

# Seconds between two lines about a fetch: on a terminal one line is written anew.
_TERMINAL_SECONDS, _LOG_SECONDS = 0.2, 30.0


J = TypeVar("J", RLJob, RLEnginePool)


@dataclass(frozen=True, slots=True)
class Local(Generic[J]):
    """A job or a pool with local paths in place of URIs, and what was fetched for it, by URI."""

    job: J
    fetched: Mapping[str, Fetched]


def local(job: J, run: Path | None = None) -> Local[J]:
    """Fetch the URIs of a resolved job or pool.

    Parameters
    ----------
    job
        The job or pool, as `sluice_client.resolve.resolve` returns it.
    run
        Directory of an earlier start of the run, whose versions are used again.

    Raises
    ------
    ManifestError
        A URI cannot be fetched.

    """
    sources = sources_of(job)
    if not sources:
        return Local(job, {})
    console = Console(stderr=True)
    versions = _versions(run) if run else {}
    try:
        fetched = fetch_sources(sources, versions, lambda source: shown(console, source))
    except StoreError as error:
        raise ManifestError(str(error)) from error
    except OSError as error:
        raise ManifestError(
            f"{error.filename or 'the cache'}: {error.strerror or error}"
        ) from error
    return Local(on_this_machine(job, fetched), fetched)


def cached(job: J) -> Local[J]:
    """Return a job with local paths in place of those URIs that are in the cache."""
    kept = {str(source.uri): newest(source.uri) for source in sources_of(job)}
    fetched = {uri: entry for uri, entry in kept.items() if entry is not None}
    return Local(on_this_machine(job, fetched), fetched)


def write_versions(run: Path, fetched: Mapping[str, Fetched]) -> None:
    """Write which version of each URI a run uses into its directory."""
    entries = {
        uri: {"version": entry.version, "path": str(entry.path)} for uri, entry in fetched.items()
    }
    if entries:
        run_directory.write_json(run / run_directory.SOURCES, entries)


def shown(console: Console, source: Source) -> Progress:
    """Return a display of a fetch: a line that changes on a terminal, else a line now and then."""
    interval = _TERMINAL_SECONDS if console.is_terminal else _LOG_SECONDS
    end, next_at = "\r" if console.is_terminal else "\n", 0.0

    def show(done: int, total: int) -> None:
        nonlocal next_at
        if (now := time.monotonic()) < next_at and done < total:
            return
        next_at = now + interval
        text = f"fetching {source.uri}: {progress_text(done, total)}"
        ending = "\n" if done >= total else end
        console.print(text, end=ending, markup=False, highlight=False, soft_wrap=True)

    return show


def not_fetched(sources: Sequence[Source], command: str = "sluice run") -> list[str]:
    """Return a note for each URI that a command would fetch."""
    return [
        f"{source.field}: not checked: {command} fetches {source.uri}; sluice models pull "
        f"{source.uri} does so now"
        for source in sources
    ]


def _versions(run: Path) -> dict[str, str]:
    file = run / run_directory.SOURCES
    if not file.exists():
        return {}
    try:
        return {uri: str(entry["version"]) for uri, entry in json.loads(file.read_text()).items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ManifestError(
            f"{file}: expected the versions of the run's URIs; remove this file to use the newest"
        ) from error
