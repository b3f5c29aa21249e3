"""Commands that describe sluice: explain, crd, reference."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

import typer

from sluice_cli.options import Output, examples, manifest_errors, say
from sluice_cli.output import Format


class Page(StrEnum):
    """A generated page of docs/reference."""

    RLJOB = "rljob"
    RLENGINEPOOL = "rlenginepool"
    CLI = "cli"


class KindName(StrEnum):
    """A kind of objects that sluice defines."""

    RLJOB = "rljob"
    RLENGINEPOOL = "rlenginepool"


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.command(
        epilog=examples(
            "sluice explain",
            "sluice explain trainer.optimizer",
            "sluice explain lr",
            "sluice explain rlenginepool.maxAdapters",
        )
    )(explain)
    app.command(epilog=examples("sluice crd | kubectl apply --server-side -f -"))(crd)
    app.command(hidden=True)(reference)


def _fields(incomplete: str) -> list[str]:
    from sluice.api.schema.explain import completions

    return completions(incomplete)


def explain(
    field: Annotated[
        str,
        typer.Argument(
            metavar="FIELD",
            help="Path of a field (trainer.steps, data.prompts[].path, status, "
            "rlenginepool.replicas) or its name (lr).",
            show_default=False,
            autocompletion=_fields,
        ),
    ] = "spec",
    output: Output = Format.TEXT,
) -> None:
    """Explain a field of an RLJob, or of an RLEnginePool.

    Prints its type, default, limits and meaning, and when it may change.
    """
    with manifest_errors():
        from sluice.api.schema.explain import find
        from sluice_cli.output import written

        field_of_job = find(field)
        say(field_of_job.text() if output is Format.TEXT else written(field_of_job.facts(), output))


def crd(
    kind: Annotated[
        KindName | None, typer.Argument(help="Kind to define.", show_default="both")
    ] = None,
) -> None:
    """Print the CustomResourceDefinitions of RLJobs and RLEnginePools."""
    from sluice.api.schema.crd import KINDS, custom_resource_definition
    from sluice_cli.render import to_yaml

    chosen = [entry for entry in KINDS if kind in (None, entry.name.lower())]
    say(to_yaml([custom_resource_definition(entry) for entry in chosen]))


def reference(
    page: Annotated[Page, typer.Argument(help="A page of docs/reference.")] = Page.RLJOB,
) -> None:
    """Print a page of the reference as Markdown."""
    if page is Page.CLI:
        from sluice_cli.explain import cli_reference

        say(cli_reference.reference())
        return
    from sluice.api.schema import reference as api_reference

    say(api_reference.job() if page is Page.RLJOB else api_reference.pool())
