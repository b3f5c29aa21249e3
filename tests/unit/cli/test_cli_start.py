"""How the command line begins: quickly, quietly, and with words on every command."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from sluice_cli.exits import MEANING, Exit
from sluice_cli.main import app
from sluice_cli.options import runs_here
from tests.unit.cli.conftest import Sluice

HEAVY = ["sluice.api", "pydantic", "structlog", "asyncio", "sluice_cli.data", "sluice_operator"]
INTERRUPT = """\
import os, signal, sys
from importlib.abc import MetaPathFinder
from sluice_cli.entry import main

class CtrlC(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)

MODULE, sys.argv = sys.argv[1], ["sluice", *sys.argv[2:]]
sys.meta_path.insert(0, CtrlC())
main()
"""


def python(text: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", text, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def loaded(text: str, modules: list[str]) -> list[str]:
    done = python(f"{text}\nimport json, sys\nprint(json.dumps(sorted(sys.modules)))")
    assert done.returncode == 0, done.stderr
    return [each for each in modules if each in json.loads(done.stdout.splitlines()[-1])]


def test_help_needs_nothing_heavy() -> None:
    text = "from typer.testing import CliRunner\nfrom sluice_cli.main import app\n"
    assert loaded(f"{text}assert not CliRunner().invoke(app, ['--help']).exit_code", HEAVY) == []


def test_a_run_of_this_machine_needs_no_client_of_kubernetes() -> None:
    assert loaded("import sluice_cli.run", ["kubernetes", "kopf", "torch"]) == []


@pytest.mark.parametrize(
    "module", ["typer", "sluice_cli.options", "sluice_cli.run", "sluice_cli.contents"]
)
def test_ctrl_c_in_the_first_second_gives_no_traceback(
    module: str, task: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    done = python(INTERRUPT, module, "run", task / "job.yaml", "--run-dir", run)
    assert done.returncode == Exit.STOPPED == 128 + signal.SIGINT
    assert "Traceback" not in done.stderr
    assert not run.exists()


def test_the_version_is_the_distributions(sluice: Sluice) -> None:
    result = sluice("--version")
    assert (result.exit_code, result.output.strip()) == (0, "0.1.0")


@pytest.mark.parametrize("name", sorted(set(get_command(app).commands) - {"reference"}))  # type: ignore[attr-defined]
def test_every_command_shows_how_it_is_used(name: str, sluice: Sluice) -> None:
    result = sluice(name, "--help")
    assert result.exit_code == 0
    group = name in ("convert", "data", "import")
    assert ("Commands" if group else f"$ sluice {name}") in result.output


def test_a_shell_completes_runs_and_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sluice: Sluice
) -> None:
    for name in ("quickstart", "quick", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.json").touch()
    monkeypatch.chdir(tmp_path)
    assert runs_here("qu") == ["quick", "quickstart"]
    monkeypatch.setenv("_SLUICE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "sluice explain trainer.optimizer.l")
    monkeypatch.setenv("COMP_CWORD", "2")
    done = python("from sluice_cli.main import app\napp(prog_name='sluice')")
    assert done.stdout.split() == ["trainer.optimizer.lr"]


def test_every_exit_code_has_a_meaning() -> None:
    assert MEANING.keys() == set(Exit)
