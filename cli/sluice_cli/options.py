"""Arguments and options that several commands share, and how they refuse bad input.

Nothing heavy is imported here: every `sluice --help` reads it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sluice_cli.entry import nothing_begun
from sluice_cli.exits import Exit
from sluice_cli.output import Format
from sluice_client.runs import run_names

_EXTRAS = {
    **dict.fromkeys(("kubernetes", "cryptography"), "operator"),
    **dict.fromkeys(("pyarrow", "xxhash", "lmdb"), "buffer"),
    **dict.fromkeys(("torch", "safetensors"), "trainer"),
    "matplotlib": "local",
}
"""Library -> the extra that brings it, where several do not."""


class ContainerEngine(StrEnum):
    """A container engine whose command line sluice speaks."""

    PODMAN = "podman"
    DOCKER = "docker"


Manifest = Annotated[Path, typer.Argument(help="RLJob manifest (YAML).", show_default=False)]
Manifests = Annotated[
    list[Path], typer.Argument(help="RLJob manifests (YAML).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Override a field: trainer.steps=10. May be repeated."
    ),
]
JobName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="The job's name.", show_default=False, autocompletion=run_names
    ),
]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Default: that of the kubeconfig's context.")
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        help="A run of this machine. Default: runs/NAME, if there is one and no -n is given."
    ),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="For people, or for programs.")]


def examples(*lines: str) -> str:
    """The end of a command's help."""
    return "\n\n".join(("Examples:", *(f"$ {line}" for line in lines)))


def say(text: str) -> None:
    typer.echo(text, nl=not text.endswith("\n"))


def refuse(error: Exception, code: Exit = Exit.INVALID) -> typer.Exit:
    """Tell an error in a line; the exception to raise then."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(code)


@contextlib.contextmanager
def manifests() -> Iterator[None]:
    """A manifest that cannot be used, in a line; so a library that is not installed."""
    with nothing_begun():
        from sluice.api import ManifestError
    try:
        yield
    except ManifestError as error:
        raise refuse(error) from error
    except ModuleNotFoundError as error:
        raise lacking(error) from error


def lacking(
    error: ModuleNotFoundError, code: Exit = Exit.INVALID, usual: str = "rollout"
) -> typer.Exit:
    """Tell which extra brings a library that is missing; the exception to raise then. usual: the
    extra of libraries that several bring.
    """
    extra = _EXTRAS.get(str(error.name).partition(".")[0], usual)
    from sluice.runtime.extras import install_command

    typer.echo(f"error: {error.name} is missing: {install_command(extra)}", err=True)
    return typer.Exit(code)


@contextlib.contextmanager
def reading() -> Iterator[None]:
    """Why a job cannot be read, in a line."""
    try:
        from sluice_operator.cluster.view import ReadError

        try:
            yield
        except ReadError as error:
            raise refuse(error, Exit.FAILED) from error
    except ModuleNotFoundError as error:
        raise lacking(error, Exit.FAILED, usual="operator") from error
