"""`sluice validate`: all that can be known of a job before it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from sluice.api import ManifestError, RLJob, load_job
from sluice_cli.options import say
from sluice_cli.output import Format, written
from sluice_cli.validate import file_checks, footprint
from sluice_cli.validate.missing_files import check_files
from sluice_client.resolve import resolve

if TYPE_CHECKING:
    from sluice_cli.validate.deep_checks import Trial


@dataclass(slots=True)
class Validation:
    """One manifest. job: None where it is not even a job. problems: empty where it is valid."""

    file: Path
    job: RLJob | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    trial: Trial | None = None

    def facts(self) -> dict[str, Any]:
        """The shape of `-o json`: docs/reference/cli.md."""
        return {
            "file": str(self.file),
            "valid": not self.problems,
            "job": _facts(self.job) if self.job else None,
            "problems": self.problems,
            "notes": self.notes,
            "trial": self.trial.facts() if self.trial else None,
        }

    def show(self) -> None:
        """Print what is right, and what to know, for people."""
        if self.job and not self.problems:
            typer.echo(_summary(self.file, self.job))
        for note in self.notes:
            typer.echo(f"note: {note}")
        if self.trial:
            typer.echo(self.trial.text())

    def show_problems(self, *, named: bool) -> None:
        """Print what is wrong to standard error. named: with the file, also if no line says it."""
        for problem in self.problems:
            file = f"{self.file}: " if named and str(self.file) not in problem else ""
            typer.echo(f"error: {file}{problem}", err=True)


def validate_all(
    paths: list[Path], overrides: list[str], *, thoroughly: bool, form: Format
) -> bool:
    """Look at manifests and print what is found; True if all are valid.

    A bad file does not keep the next from its turn. The errors of all come last, where a terminal
    shows them.
    """
    validations = []
    for path in paths:
        validations.append(_validated(path, overrides, thoroughly))
        if form is Format.TEXT:
            validations[-1].show()
    if form is Format.TEXT:
        for validation in validations:
            validation.show_problems(named=len(paths) > 1)
    else:
        say(written([each.facts() for each in validations], form))
    return not any(each.problems for each in validations)


def _validated(path: Path, overrides: list[str], thoroughly: bool) -> Validation:
    try:
        return validate_file(path, overrides, thoroughly=thoroughly)
    except ManifestError as error:
        return Validation(path, problems=str(error).splitlines())


def validate_file(path: Path, overrides: list[str], *, thoroughly: bool = False) -> Validation:
    """Look at the manifest and, where no volume holds them, at all files that it names.

    thoroughly: also render prompts and judge an answer (`--deep`).

    Raises ManifestError where the manifest itself cannot be read, or files are not there.
    """
    job = load_job(path, overrides)
    validation = Validation(path, job)
    spec = job.spec
    if spec.model.volume is not None or spec.data.volume is not None:
        validation.notes.append("the files are in volumes of a cluster, and were not looked at")
        return validation
    here = resolve(job, path.parent)
    check_files(here)
    findings = file_checks.look(here, run_code=True)
    validation.problems, validation.notes = findings.problems, findings.notes
    if problem := footprint.shortage(here):
        validation.notes.append(f"sluice run refuses it on this machine: {problem}")
    if thoroughly and not findings.problems:
        from sluice_cli.validate import deep_checks

        validation.trial = deep_checks.try_out(here)
        validation.problems += validation.trial.problems
    return validation


def _facts(job: RLJob) -> dict[str, Any]:
    spec = job.spec
    return {
        "name": job.metadata.name,
        "namespace": job.metadata.namespace,
        "method": "sft" if spec.algorithm.sft else spec.algorithm.estimator,
        "steps": spec.trainer.steps,
        "epochs": spec.trainer.epochs,
        "batchSize": spec.rollout.batch_size,
        "samplesPerPrompt": spec.samples_per_prompt,
        "trainerRanks": spec.trainer.world_size,
        "engines": spec.replicas,
    }


def _summary(path: Path, job: RLJob) -> str:
    facts = _facts(job)
    length = f"{facts['steps']} steps" if facts["steps"] else f"{facts['epochs']} epochs"
    return (
        f"{path}: RLJob {job.key} is valid: {facts['method']}, {length} of {facts['batchSize']} x "
        f"{facts['samplesPerPrompt']} samples, {facts['trainerRanks']} trainer rank(s), "
        f"{facts['engines']} engine(s)"
    )
