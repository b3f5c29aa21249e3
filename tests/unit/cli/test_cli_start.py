"""The command line starts quickly, ends quietly and has help on every command."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from sluice.runtime.extras import install_command
from sluice_cli.exits import MEANING, Exit
from sluice_cli.main import app
from sluice_client.runs import run_names
from tests.unit.cli.conftest import Sluice

ROOT = Path(__file__).parents[3]
HEAVY = [
    "sluice.api",
    "pydantic",
    "structlog",
    "asyncio",
    "sluice_cli.data.commands",
    "sluice_operator",
]
INTERRUPT = """\
import os, signal, sys
from importlib.abc import MetaPathFinder
from sluice_cli.entry import main

# As at a terminal: tests that run in the background have it ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)

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
    return [module for module in modules if module in json.loads(done.stdout.splitlines()[-1])]


def test_help_imports_nothing_slow() -> None:
    text = "from typer.testing import CliRunner\nfrom sluice_cli.main import app\n"
    assert loaded(f"{text}assert not CliRunner().invoke(app, ['--help']).exit_code", HEAVY) == []


def test_a_local_run_does_not_import_the_kubernetes_client() -> None:
    assert loaded("import sluice_cli.run.command", ["kubernetes", "kopf", "torch"]) == []


def test_checking_a_task_does_not_import_torch(task: Path) -> None:
    """It would cost seconds before a run begins, and be in memory until the run's end."""
    text = (
        "from pathlib import Path\nfrom sluice.api import load_job\n"
        "from sluice_cli.validate.file_checks import check_contents\n"
        "from sluice_client.resolve import resolve\n"
        f"folder = Path({str(task)!r})\n"
        "found = check_contents(resolve(load_job(folder / 'job.yaml'), folder))\n"
        "assert not found.problems and not found.notes, found\n"
    )
    assert loaded(text, ["torch", "megatron", "transformers"]) == []


@pytest.mark.parametrize(
    "module",
    ["typer", "sluice_cli.options", "sluice.api.groups.data", "sluice_cli.run.command", "grpc.aio"],
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
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    result = sluice("--version")
    assert (result.exit_code, result.output.strip()) == (0, project["version"])


def test_extras_are_named_after_our_distribution() -> None:
    """Another project owns the name `sluice`, so an extra must name `sluice-rl`."""
    name = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"]
    folders = ("cli", "client", "docker", "docs", "operator", "services", "sluice")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file()]
    texts = [path.read_text() for path in files if path.suffix in ("", ".md", ".py")]
    names = r"operator|buffer|rollout|trainer|wandb|local|\{extra\}"
    # What follows tells an extra from a subscript in Python code.
    extras = re.compile(rf"([\w-]+)\[(?:{names})[],](?![(),])")
    assert {extra for text in texts for extra in extras.findall(text)} == {name}


@pytest.mark.parametrize("name", sorted(set(get_command(app).commands) - {"reference"}))  # type: ignore[attr-defined]
def test_every_command_has_help_with_an_example(name: str, sluice: Sluice) -> None:
    result = sluice(name, "--help")
    assert result.exit_code == 0
    group = name in ("convert", "data", "import", "models", "pool")
    assert ("Commands" if group else f"$ sluice {name}") in result.output


def test_a_shell_completes_runs_and_fields(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sluice: Sluice
) -> None:
    for name in ("quickstart", "quick", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "job.json").touch()
    monkeypatch.chdir(tmp_path)
    assert run_names("qu") == ["quick", "quickstart"]
    monkeypatch.setenv("_SLUICE_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "sluice explain trainer.optimizer.l")
    monkeypatch.setenv("COMP_CWORD", "2")
    done = python("from sluice_cli.main import app\napp(prog_name='sluice')")
    assert done.stdout.split() == ["trainer.optimizer.lr"]


@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        ("tokenizers", "init new -y", f"tokenizers is missing: {install_command('rollout')}"),
        (
            "cryptography",
            "run {task}/job.yaml",
            f"cryptography is missing: {install_command('operator')}",
        ),
        ("cryptography", "list", f"cryptography is missing: {install_command('operator')}"),
    ],
    ids=["init", "run", "list"],
)
def test_a_missing_library_is_a_one_line_error(
    module: str, words: str, expected: str, task: Path, tmp_path: Path
) -> None:
    text = f"import sys\nsys.modules['{module}'] = None\nfrom sluice_cli.entry import main\n"
    text += "sys.argv[0] = 'sluice'\nmain()"
    command = [sys.executable, "-c", text, *words.format(task=task).split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode in (Exit.INVALID, Exit.FAILED)
    assert done.stderr.splitlines()[-1] == f"error: {expected}"
    assert "Traceback" not in done.stderr


def test_every_exit_code_has_a_meaning() -> None:
    assert MEANING.keys() == set(Exit)
