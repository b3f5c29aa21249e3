"""Groups of commands whose modules are imported when one of their commands is asked for."""

from __future__ import annotations

from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group


def group(module: str, words: str) -> typer.Typer:
    """The group that `app` in a module is. words: its help, which is shown without it."""

    class Lazy(TyperGroup):
        def _load(self) -> None:
            if not self.commands:
                self.commands.update(get_group(import_module(module).app).commands)

        def list_commands(self, ctx: Any) -> list[str]:
            self._load()
            return super().list_commands(ctx)

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            self._load()
            return super().get_command(ctx, cmd_name)

    return typer.Typer(cls=Lazy, help=words, no_args_is_help=True)
