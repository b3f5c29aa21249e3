"""`sluice models`: fetch models and data by URI, list and remove them."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.console import Console

from sluice.stores import StoreError, Uri, UriError, hub_id, parse_uri
from sluice.stores import cache as stores_cache
from sluice.stores.amounts import size_text
from sluice.stores.sources import Source
from sluice_cli.exits import Exit
from sluice_cli.models.fetching import shown
from sluice_cli.options import Output, examples, exit_with, say
from sluice_cli.output import Format, written

app = typer.Typer(help="Fetch models and data by URI; list and remove them.", no_args_is_help=True)


@app.command(
    epilog=examples(
        "sluice models pull Qwen/Qwen3-0.6B",
        "sluice models pull hf://Qwen/Qwen3-0.6B@c1899de s3://models/judge",
    )
)
def pull(
    uris: Annotated[
        list[str],
        typer.Argument(
            metavar="URI...",
            help="hf://org/name@revision, s3://, gs://, az://, https://, or org/name of the hub.",
            show_default=False,
        ),
    ],
) -> None:
    """Fetch models or data into the cache of this machine, and print their paths."""
    console = Console(stderr=True)
    for text in uris:
        try:
            uri = _uri(text)
            entry = stores_cache.fetch(uri, progress=shown(console, Source(text, uri)))
        except (StoreError, UriError, OSError) as error:
            raise exit_with(error, Exit.FAILED) from error
        say(f"{entry.uri} {entry.version[:12]} {entry.path}")


@app.command(name="list", epilog=examples("sluice models list", "sluice models list -o json"))
def list_models(output: Output = Format.TEXT) -> None:
    """List what is in the cache, the version used last first."""
    rows = [_facts(entry) for entry in stores_cache.entries()]
    if output is not Format.TEXT:
        say(written(rows, output))
    elif not rows:
        say(f"nothing in {stores_cache.root()}")
    for row in rows if output is Format.TEXT else []:
        size = "in the hub's cache" if row["inHubCache"] else size_text(row["bytes"])
        say(f"{row['uri']}  {row['version'][:12]}  {size}  used {row['used']}")


@app.command(epilog=examples("sluice models rm s3://models/judge"))
def rm(
    uris: Annotated[
        list[str], typer.Argument(metavar="URI...", help="As listed.", show_default=False)
    ],
) -> None:
    """Remove all versions of models or data from the cache."""
    failed = False
    for text in uris:
        try:
            uri = str(_uri(text))
        except UriError as error:
            raise exit_with(error) from error
        found = [entry for entry in stores_cache.entries() if entry.uri == uri]
        if not found:
            typer.echo(f"error: {uri} is not in {stores_cache.root()}", err=True)
        for entry in found:
            if not stores_cache.remove(entry):
                failed = True
                typer.echo(f"error: {entry.path} is in use by a run", err=True)
        failed = failed or not found
    if failed:
        raise typer.Exit(Exit.FAILED)


def _uri(text: str) -> Uri:
    uri = parse_uri(text) or hub_id(text)
    if uri is None:
        raise UriError(f"{text}: expected a URI, such as hf://org/name or s3://bucket/path")
    return uri


def _facts(entry: stores_cache.Fetched) -> dict[str, Any]:
    used = datetime.fromtimestamp(entry.record.stat().st_mtime, UTC)
    return {
        "uri": entry.uri,
        "version": entry.version,
        "path": str(entry.path),
        "bytes": entry.size,
        "inHubCache": entry.uri.startswith("hf://"),
        "used": f"{used:%Y-%m-%d %H:%M}",
    }
