"""Write docs/reference/cli.md from the commands (`make reference`)."""

from __future__ import annotations

import re

import typer
from typer.cli import get_docs_for_click
from typer.core import TyperGroup
from typer.main import get_command

from sluice_cli.exits import MEANING

_HEAD = """\
# The command line

<!-- not run (sluice run, sluice init digits --yes && cd): minutes of training -->
<!-- not run (sluice logs): it follows a log that goes on -->
<!-- not run (sluice pool up, sluice pool down): engines that run until they are ended -->
<!-- not run (sluice track): an account of a tracker -->
<!-- not run (sluice status gsm8k, sluice list -A, sluice crd |, sluice render): a cluster -->
<!-- run by (sluice models pull, sluice models rm): tests/unit/cli/test_models.py -->
<!-- run by (sluice validate jobs/): tests/unit/cli/test_cli_validate.py -->

Generated from `sluice_cli` by `make reference`; `sluice COMMAND --help` prints the same.
`sluice --install-completion` makes a shell complete commands, names of runs and fields of an RLJob.

## Exit codes

| code | meaning |
|---|---|
{codes}

## For programs

The output of `-o json` and `-o yaml`. New releases add fields, and do not rename or remove any.

{answers}
"""
# The shape of each command's output.
ANSWERS = {
    "validate": "a list with an entry for each job and pool: `file`, `valid`, `job` (`name`, "
    "`namespace`, `method`, `steps`, `epochs`, `batchSize`, `samplesPerPrompt`, `trainerRanks`, "
    "`engines` (that it starts), `pool`; null if it is no job), `enginePool` (`name`, "
    "`namespace`, `engines`, `gpusPerReplica`, `maxAdapters`, `maxRank`; null if it is no pool), "
    "`problems`, `notes` (texts), `trial` (with `--deep`: `prompts` with `where`, `tokens`, "
    "`text`; `reward` with `where`, `response`, `label`, `reward`, `parts`)",
    "status": "`where`, `job` (the RLJob with its `status`: [rljob.md](rljob.md)), `pods` (`name`, "
    "`role`, `replica`, `attempt`, `phase`, `ready`, `node`), `events` (`time`, `type`, `reason`, "
    "`message`, `about`, `count`), `notes`",
    "list": "a list: `name`, `where` (run directory, or namespace/name), `state`, `step`, "
    "`totalSteps`, `reward`, `restarts`, `started`",
    "pool list": "a list: `name`, `model`, `engines` (URLs), `ready` (how many answer), `pid` of "
    "sluice pool up, `logs`",
    "explain": "`field`, `type`, `required`, `default`, `limits`, `meaning`, `changes`, `rules`, "
    "`fields` (`name`, `type`, `required`, `default`, `meaning`); a list if several fields have "
    "the name",
}


def reference() -> str:
    """Return Markdown with exit codes, output formats and every command."""
    from sluice_cli.main import app

    command = get_command(app)
    assert isinstance(command, TyperGroup)
    command.commands.pop("reference")  # the command that writes this page
    pages = get_docs_for_click(obj=command, ctx=typer.Context(command), name="sluice", indent=1)
    codes = "\n".join(f"| {code.value} | {meaning} |" for code, meaning in MEANING.items())
    answers = "\n".join(f"- `sluice {name}`: {shape}" for name, shape in ANSWERS.items())
    return _tidy(f"{_HEAD.format(codes=codes, answers=answers)}\n{pages}")


def _tidy(text: str) -> str:
    """Format examples as code, and remove repeated and trailing blank lines."""
    text = re.sub(r"Examples:\n((?:\n\$ .*\n?)+)", _code, text)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def _code(match: re.Match[str]) -> str:
    lines = "\n".join(line for line in match[1].splitlines() if line)
    return f"**Examples**:\n\n```console\n{lines}\n```\n"
