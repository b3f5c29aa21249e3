"""Helpers that call `sluice import` and read its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from typer.testing import CliRunner, Result

from sluice_cli.main import app


def run(*words: Any) -> Result:
    return CliRunner().invoke(app, ["import", *map(str, words)])


def spec_of(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    spec: dict[str, Any] = YAML(typ="safe").load(result.stdout)["spec"]
    return spec


def slime(tmp_path: Path, arguments: str, *options: str, entry: str = "train.py") -> Result:
    script = tmp_path / "run.sh"
    script.write_text(
        f"python3 {entry} --hf-checkpoint /m --prompt-data /d/rows.jsonl --num-rollout 9 "
        f"--rollout-batch-size 8 --n-samples-per-prompt 4 --rm-type math {arguments}\n"
    )
    return run("slime", script, *options)


def verl(arguments: str, *options: str, entry: str = "verl.trainer.main_ppo") -> Result:
    command = (
        f"python3 -m {entry} data.train_files=/d/train.parquet actor_rollout_ref.model.path=/m "
        f"{arguments}"
    )
    return run("verl", command, *options)


def unwrapped(result: Result) -> str:
    """Return the notes above the manifest as one line."""
    return " ".join(result.stdout.partition("apiVersion")[0].replace("#", "").split())


def check(section: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare a section; a field that is expected to be None or empty must be absent."""
    for key, value in expected.items():
        if isinstance(value, dict) and value:
            check(section[key], value)
        else:
            assert section.get(key) == (value or None)
