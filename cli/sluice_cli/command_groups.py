"""Groups of commands that are imported when one of their commands is called."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from sluice_cli.exits import Exit

# Entry points of optional distributions: the name of a group of commands, and its typer.Typer.
COMMANDS = "sluice.commands"


def group(module: str, summary: str) -> typer.Typer:
    """Return the group that is `app` in a module.

    `sluice --help` shows `summary` without importing the module.
    """
    return _lazy(lambda: import_module(module).app, summary)


def optional_group(name: str, distribution: str, summary: str) -> typer.Typer:
    """Return the group that an optional distribution provides as an entry point."""

    def load() -> typer.Typer:
        from importlib.metadata import entry_points  # slow, and `sluice --help` does not need it

        for entry in entry_points(group=COMMANDS, name=name):
            return entry.load()  # type: ignore[no-any-return]
        typer.echo(
            f"error: sluice {name} needs {distribution}: pip install {distribution}", err=True
        )
        raise typer.Exit(Exit.INVALID)

    return _lazy(load, summary)


def _lazy(load: Callable[[], typer.Typer], summary: str) -> typer.Typer:
    class LazyGroup(TyperGroup):
        def _load(self) -> None:
            if not self.commands:
                self.commands.update(get_group(load()).commands)

        def format_help(self, ctx: Any, formatter: Any) -> None:
            self._load()  # before anything is printed, as loading may fail
            super().format_help(ctx, formatter)

        def list_commands(self, ctx: Any) -> list[str]:
            self._load()
            return super().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            self._load()
            return super().get_command(ctx, cmd_name)

    return typer.Typer(cls=LazyGroup, help=summary, no_args_is_help=True)
