"""Fetch URIs for the containers of a pod: `python -m sluice.stores.fetch FIELD=URI ...`.

It runs in an init container, in the pods of every role that needs the files. They are in the cache
of the pod's volume (SLUICE_CACHE, HF_HOME), which pods and jobs may share. SLUICE_LINKS is a
directory of the job on the same volume:

    LINKS/<digest of the URI>/version    what the job uses, whatever the store has later
    LINKS/<digest of the URI>/NAME       link to the files of that version
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from sluice.runtime import pod_env
from sluice.runtime.pod_env import ConfigurationError
from sluice.stores.cache import Fetched, fetch
from sluice.stores.errors import StoreError
from sluice.stores.progress import LoggedProgress
from sluice.stores.retrying import retried
from sluice.stores.sources import Source
from sluice.telemetry import logs
from sluice.uri import link_of, parse_uri

# Errors that no restart cures.
_FINAL = ("package", "credential", "missing", "full")
# Seconds for which a store that fails is asked again, without a byte that arrives.
_PATIENCE_SECONDS = 900.0
_PAUSE_SECONDS = 10.0
_VERSION = "version"


def fetch_and_link(source: Source, links: Path) -> Path:
    """Fetch the files of a URI, and return the link to them.

    All pods that share the directory of links use the version that was found first.

    Raises
    ------
    StoreError
        The files cannot be had.
    OSError
        The volume cannot be written.

    """
    link = Path(link_of(source.uri, str(links)))
    link.parent.mkdir(parents=True, exist_ok=True)
    version = link.parent / _VERSION
    expected = version.read_text() if version.exists() else None
    fetched = _patiently(source, expected)
    if expected is None and (first := _write_once(version, fetched.version)) != fetched.version:
        # The store has changed between this pod and the one that came first.
        fetched = _patiently(source, first)
    temporary = link.parent / f".link-{os.uname().nodename}-{os.getpid()}"
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(fetched.path)
    temporary.rename(link)
    return link


def _write_once(file: Path, text: str) -> str:
    """Write a file unless it is there, whole or not at all, and return what it holds."""
    temporary = file.with_name(f".{file.name}-{os.uname().nodename}-{os.getpid()}")
    temporary.write_text(text)
    try:
        os.link(temporary, file)
    except FileExistsError:
        return file.read_text()
    finally:
        temporary.unlink()
    return text


def _patiently(source: Source, version: str | None) -> Fetched:
    """Fetch a URI; ask again after errors that pass, because a new pod would have to start over."""
    shown = LoggedProgress(source.uri)
    return retried(
        lambda: fetch(source.uri, version=version, progress=shown),
        _pauses(shown, time.monotonic() + _PATIENCE_SECONDS),
        report=lambda error, _: logs.get().warning(
            "fetching again", field=source.field, error=str(error)
        ),
    )


def _pauses(shown: LoggedProgress, end: float) -> Iterator[float]:
    """Yield pauses until `end`, which moves on to `_PATIENCE_SECONDS` after bytes have arrived."""
    arrived = 0
    while True:
        if shown.done > arrived:
            end, arrived = time.monotonic() + _PATIENCE_SECONDS, shown.done
        if time.monotonic() > end:
            return
        yield _PAUSE_SECONDS


def _source(word: str) -> Source:
    field, _, text = word.partition("=")
    uri = parse_uri(text)
    if uri is None:
        raise ConfigurationError(
            f"{word}: expected FIELD=URI, such as spec.model.path=hf://org/name"
        )
    return Source(field, uri)


def main() -> int:
    env = pod_env.read("fetch")
    logs.configure(env.role, name=env.name, attempt=env.attempt)
    links = env.directory("links")
    for source in map(_source, sys.argv[1:]):
        try:
            link = fetch_and_link(source, links)
        except StoreError as error:
            if error.kind in _FINAL:
                raise ConfigurationError(f"{source.field}: {_advised(error)}") from error
            logs.fail(f"{source.field}: {error}", 1)
        except OSError as error:
            raise ConfigurationError(
                f"{source.field}: {source.uri}: {error.filename or links}: "
                f"{error.strerror or error}; spec.downloads.volume names another volume"
            ) from error
        logs.get().info("fetched", field=source.field, uri=str(source.uri), path=str(link))
    return 0


def _advised(error: StoreError) -> str:
    volume = "; spec.downloads.volume names another volume" if error.kind == "full" else ""
    return f"{error}{volume}"


if __name__ == "__main__":
    logs.run_blocking("fetch", main)
