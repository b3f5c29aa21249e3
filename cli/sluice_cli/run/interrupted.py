"""Ctrl-C outside of the part of a run that stops its pods."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import typer

from sluice_cli.exits import Exit


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """A run that is interrupted before its first pod, or after its last, ends like any other that
    was stopped.
    """
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here")
        raise typer.Exit(Exit.STOPPED) from None
