"""Arguments and options that several commands share, and the way commands report errors.

Every start of `sluice` imports this module, so its imports must be quick.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from sluice_cli.entry import exit_on_interrupt
from sluice_cli.exits import Exit
from sluice_cli.output import Format
from sluice_client.runs import run_names

# Libraries that only one extra brings.
_EXTRAS = {
    **dict.fromkeys(("kubernetes", "cryptography"), "operator"),
    **dict.fromkeys(("pyarrow", "xxhash", "lmdb"), "buffer"),
    **dict.fromkeys(("torch", "safetensors"), "trainer"),
    "matplotlib": "local",
}


class ContainerEngine(StrEnum):
    """A container engine that `sluice run` can use."""

    PODMAN = "podman"
    DOCKER = "docker"


Manifest = Annotated[Path, typer.Argument(help="RLJob manifest (YAML).", show_default=False)]
Manifests = Annotated[
    list[Path], typer.Argument(help="RLJob manifests (YAML).", show_default=False)
]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Set a field: trainer.steps=10. May be repeated."
    ),
]
JobName = Annotated[
    str | None,
    typer.Argument(
        metavar="NAME", help="Name of the job.", show_default=False, autocompletion=run_names
    ),
]
Namespace = Annotated[
    str | None,
    typer.Option(
        "--namespace", "-n", help="Kubernetes namespace. Default: of the kubeconfig's context."
    ),
]
RunDir = Annotated[
    Path | None,
    typer.Option(help="Run directory. Default: runs/NAME, if it holds a run and -n is not given."),
]
Output = Annotated[Format, typer.Option("--output", "-o", help="Output format.")]


def examples(*lines: str) -> str:
    """Return the end of a command's help."""
    return "\n\n".join(("Examples:", *(f"$ {line}" for line in lines)))


def say(text: str) -> None:
    """Print a text with one line end."""
    typer.echo(text, nl=not text.endswith("\n"))


def exit_with(error: Exception, code: Exit = Exit.INVALID) -> typer.Exit:
    """Print an error as one line; return the exception that ends the command."""
    typer.echo(f"error: {error}", err=True)
    return typer.Exit(code)


@contextlib.contextmanager
def manifest_errors() -> Iterator[None]:
    """Print an invalid manifest, or a missing library, as one line and exit."""
    with exit_on_interrupt():
        from sluice.api import ManifestError
    try:
        yield
    except ManifestError as error:
        raise exit_with(error) from error
    except ModuleNotFoundError as error:
        raise missing_library(error) from error


def missing_library(
    error: ModuleNotFoundError, code: Exit = Exit.INVALID, default_extra: str = "rollout"
) -> typer.Exit:
    """Say how to install a missing library; return the exception that ends the command.

    Parameters
    ----------
    error
        The failed import.
    code
        Exit code.
    default_extra
        The extra to install if several extras bring the library.

    """
    extra = _EXTRAS.get(str(error.name).partition(".")[0], default_extra)
    from sluice.runtime.extras import install_command

    typer.echo(f"error: {error.name} is missing: {install_command(extra)}", err=True)
    return typer.Exit(code)


@contextlib.contextmanager
def read_errors() -> Iterator[None]:
    """Print the reason that a job cannot be read as one line and exit."""
    try:
        from sluice_operator.cluster.view import ReadError

        try:
            yield
        except ReadError as error:
            raise exit_with(error, Exit.FAILED) from error
    except ModuleNotFoundError as error:
        raise missing_library(error, Exit.FAILED, default_extra="operator") from error
