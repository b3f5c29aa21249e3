"""Sluice finds the importer and the adapters by entry point, or says what to install."""

from __future__ import annotations

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from sluice.runtime import function_adapters, user_code
from sluice_cli.command_groups import optional_group
from sluice_cli.main import app
from sluice_migrate.functions import SLIME, VERL


def test_the_command_line_offers_the_import() -> None:
    result = CliRunner().invoke(app, ["import", "--help"])
    assert result.exit_code == 0
    assert "slime" in result.output
    assert "verl" in result.output


@pytest.mark.parametrize(
    "arguments", [["slime", "run.sh"], ["--help"], []], ids=["command", "help", "no argument"]
)
def test_a_command_that_is_not_installed_says_what_to_install(arguments: list[str]) -> None:
    commands = typer.Typer()
    commands.add_typer(optional_group("absent", "sluice-rl-absent", "Help."), name="absent")
    commands.command("other")(lambda: None)
    result = CliRunner().invoke(commands, ["absent", *arguments])
    assert result.exit_code == 2
    message = "error: sluice absent needs sluice-rl-absent: pip install sluice-rl-absent"
    assert result.output.splitlines() == [message]


def test_adapters_are_found_by_name() -> None:
    assert function_adapters.installed() == (SLIME, VERL)


@pytest.mark.parametrize("project", ["slime", "verl"])
def test_a_function_without_its_adapter_says_what_to_install(
    project: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(function_adapters, "installed", lambda: ())
    path = tmp_path / "function.py"
    path.write_text(f"raise ModuleNotFoundError('No module', name='{project}.utils')")
    with pytest.raises(user_code.LoadError, match="pip install sluice-rl-migrate"):
        user_code.load(f"{path}:generate")
